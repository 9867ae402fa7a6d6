"""Configurations of former versions: renamed keys, keys that are gone, in files, on command lines, in config.json."""

import dataclasses
import json

import numpy as np
import pytest

from meshtrain.cli import flags
from meshtrain.config import former
from meshtrain.config.former import FORMER, Gone
from meshtrain.config.resolve import configure, resolve, to_json
from meshtrain.config.resume import difference, is_free
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.run.weights import configuration

ROWS = {
    "optimizer.first_decay": "optimizer.beta1",
    "steps": "num_steps",
    "pipeline.plan": Gone("", "as pipeline.schedule takes its place"),
    "optimizer.depth": Gone(2, "as it is found from the model"),
    "batch_size": Gone(7, "never read: today's options have a key of this name"),
}
PLAN = 'allowed: "", the only value now, as pipeline.schedule takes its place; nearest: pipeline.plan=""'


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    monkeypatch.setattr(former, "FORMER", ROWS)
    monkeypatch.setattr("meshtrain.run.weights.FORMER", ROWS)


def refused(given, overrides=None):
    with pytest.raises(UserError) as caught:
        resolve(given, overrides or {})
    return list(caught.value.problems)


def test_a_renamed_key_has_todays_name_in_a_mapping_and_on_the_command_line():
    assert resolve({"optimizer": {"first_decay": 0.5}, "steps": 7}).optimizer.beta1 == 0.5
    assert resolve({"steps": 7}, {"optimizer.first_decay": "0.5"}).num_steps == 7
    assert resolve({"optimizer": {"beta1": 0.7}}, {"optimizer.first_decay": "0.5"}).optimizer.beta1 == 0.5
    assert resolve({"optimizer": {"first_decay": 0.5}}, {"optimizer.beta1": "0.7"}).optimizer.beta1 == 0.7


def test_a_file_that_begins_with_todays_defaults_may_set_the_former_name(tmp_path):
    file = tmp_path / "old.py"
    file.write_text(
        "from meshtrain.config import default\n\n\ndef get_config():\n    config = default()\n"
        "    config.steps = 7\n    config.pipeline.plan = ''\n    return config\n"
    )
    assert configure(flags.arguments([f"--config={file}"]), reads_data=False).num_steps == 7


def test_two_values_for_one_option_are_refused():
    line = "steps: got 7, and num_steps is 8; allowed: num_steps alone, its name today; nearest: leave steps out"
    assert refused({"steps": 7, "num_steps": 8}) == [line]
    assert refused({}, {"steps": "300", "num_steps": "8"})[0].startswith('steps: got "300", and num_steps is "8"')
    assert resolve({"steps": 8, "num_steps": 8}).num_steps == 8


def test_a_wrong_value_of_a_renamed_key_is_told_under_todays_name():
    assert refused({"num_steps": 300, "steps": np.zeros(2)})[0].startswith("num_steps: got array([0., 0.]) (ndarray)")
    assert refused({"steps": "x"})[0].startswith("num_steps: got 'x' (str); allowed: a whole number")


def test_a_gone_key_at_its_default_is_dropped():
    given = {"pipeline": {"plan": ""}, "optimizer": {"depth": 2}}
    assert resolve(given) == resolve({}) == resolve({}, {"pipeline.plan": "", "optimizer.depth": "2"})


def test_any_other_value_of_a_gone_key_is_one_line_and_what_it_suggests_is_accepted():
    assert refused({"pipeline": {"plan": "x.csv"}}) == [f'pipeline.plan: got "x.csv"; {PLAN}']
    assert refused({}, {"pipeline.plan": "x.csv", "seed": "-1"}) == [
        f'pipeline.plan: got "x.csv"; {PLAN}',
        "seed: got -1; allowed: at least 0; nearest: 0",
    ]
    assert refused({"pipeline": {"plan": [1]}}) == [f"pipeline.plan: got [1] (list); {PLAN}"]
    assert refused({}, {"optimizer.depth": "many"})[0].startswith("optimizer.depth: got 'many'; allowed: 2, the only")
    assert resolve({"pipeline": {"plan": "x.csv"}}, {"pipeline.plan": ""}) == resolve({})


def test_a_row_for_a_key_of_today_has_no_effect():
    assert resolve({"batch_size": 8}).batch_size == 8


def written(folder, **changes):
    """A workdir of a former version."""
    values = json.loads(to_json(resolve({})))
    for key, value in changes.items():
        group, _, field = key.partition("__")
        values[group][field] = value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def read(folder, *words):
    return configuration(flags.arguments([f"--workdir={folder}", *words]), (), reads_data=False)


def test_commands_read_the_config_of_a_former_version(tmp_path):
    run = written(tmp_path, optimizer__first_decay=0.5, pipeline__plan="", optimizer__depth=2)
    assert read(run).optimizer.beta1 == 0.5
    run = written(tmp_path, pipeline__plan="x.csv")
    with pytest.raises(UserError, match=r"^config.json: pipeline.plan: got \"x.csv\"; allowed: "):
        read(run)
    assert read(run, "--config.pipeline.plan=").pipeline == Config().pipeline


def test_a_run_of_a_former_version_resumes():
    now = json.loads(to_json(resolve({"optimizer": {"beta1": 0.5}})))
    then = json.loads(json.dumps(now))
    del then["optimizer"]["beta1"]
    then["optimizer"] |= {"first_decay": 0.5, "depth": 2}
    then["pipeline"]["plan"] = ""
    assert difference(then, now) == []
    then["optimizer"]["first_decay"] = 0.6
    assert difference(then, now) == ["optimizer.beta1: was 0.6, now 0.5"]


def test_a_run_whose_gone_option_changed_its_numbers_does_not_resume():
    now = json.loads(to_json(resolve({})))
    then = now | {"optimizer": now["optimizer"] | {"depth": 3}}
    assert difference(then, now) == [
        "optimizer.depth: got 3; allowed: 2, the only value now, as it is found from the model; nearest: "
        "optimizer.depth=2"
    ]
    # The schedule may change between two starts.
    assert is_free("pipeline.plan")
    assert difference(now | {"pipeline": now["pipeline"] | {"plan": "x.csv"}}, now) == []


@pytest.fixture
def rows_of_today(monkeypatch):
    monkeypatch.setattr(former, "FORMER", FORMER)


COMPRESSION = {"block": 128, "kept": 4, "feedback": False}


@pytest.mark.parametrize(
    ("given", "overrides", "now"),
    [
        ({"compression": {"kind": "none"} | COMPRESSION, "local_steps": {"delay": 0}}, {}, {"name": "sum"}),
        ({"compression": {"kind": "topk"} | COMPRESSION}, {}, {"name": "topk"} | COMPRESSION),
        ({"compression": {"kind": "none"}, "local_steps": {"delay": 1}}, {}, {"name": "one_step_late"}),
        ({"reduction": {"name": "int8"} | COMPRESSION}, {"compression.kind": "none"}, {"name": "sum"}),
        ({"reduction": {"name": "int8"} | COMPRESSION}, {"local_steps.delay": "0"}, {"name": "int8"} | COMPRESSION),
        ({"local_steps": {"delay": 1}}, {"local_steps.delay": "0"}, {"name": "sum"}),
        ({"compression": {"kind": "int8"}}, {"compression.kind": "none", "local_steps.delay": "1"},
         {"name": "one_step_late"}),
        ({}, {"compression.kind": "int8", "compression.block": "64"},
         {"name": "int8", "block": 64, "kept": 8, "feedback": True}),
    ],
)  # fmt: skip
def test_compression_and_a_delay_are_reductions(rows_of_today, given, overrides, now):
    assert dataclasses.asdict(resolve(given, overrides).reduction) == now


def test_a_file_that_begins_with_todays_defaults_may_set_a_former_group(rows_of_today, tmp_path):
    file = tmp_path / "old.py"
    file.write_text(
        "from meshtrain.config import default\n\n\ndef get_config():\n    config = default()\n"
        "    config.compression.kind = 'topk'\n    config.compression.kept = 4\n    return config\n"
    )
    reduction = configure(flags.arguments([f"--config={file}"]), reads_data=False).reduction
    assert dataclasses.asdict(reduction) == {"name": "topk", "block": 256, "kept": 4, "feedback": True}


def test_two_reductions_at_once_are_refused(rows_of_today):
    line = (
        "local_steps.delay: got 1, and reduction.name is int8; allowed: reduction.name alone, its name today; nearest: "
    )
    assert refused({"compression": {"kind": "int8"}, "local_steps": {"delay": 1}}) == [
        f"{line}leave local_steps.delay out"
    ]
    allowed = "compression.kind: got 'int9'; allowed: none, int8, topk; did you mean 'int8'?"
    assert refused({}, {"compression.kind": "int9"}) == [allowed]
