import dataclasses
import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from flax.linen import LogicallyPartitioned

from meshtrain.cli import flags
from meshtrain.config import __main__ as fields
from meshtrain.config.build import default
from meshtrain.config.mesh_checks import check, num_microbatches
from meshtrain.config.resolve import parse, resolve, to_json
from meshtrain.config.resume import difference, from_json
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.main import main
from meshtrain.models.task import Task
from meshtrain.options import option
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]


def problems(changes=(), **keywords):
    """The lines that a default configuration with these texts gets."""
    try:
        resolve(default(), dict(change.split("=", 1) for change in changes), **keywords)
    except UserError as error:
        return list(error.problems)
    return []


def test_defaults_are_legal():
    model = dataclasses.replace(Config().model, vocab_size=257)  # that of the data, which are bytes
    wanted = dataclasses.replace(Config(), model=model)
    assert resolve(default()) == wanted
    assert resolve(Config()) == wanted
    assert resolve({}) == wanted


def test_a_file_edits_and_the_command_line_goes_before_it():
    given = default()
    given.mesh.data = 2
    given.batch_size = 64
    given.learning_rate.peak = 1
    config = resolve(given, {"mesh.data": "4", "num_steps": "1e2", "observe.progress": "no"})
    assert (config.mesh.data, config.batch_size, config.num_steps, config.observe.progress) == (4, 64, 100, False)
    assert type(config.learning_rate.peak) is float
    assert type(config.num_steps) is int


def test_all_problems_of_a_file_are_reported_together():
    given = default()
    given.mesh.tensr = 4
    given.model.num_heads = "four"
    given.model.vocab_size = -1
    given.optimizer = 3
    given.batch_size = 30
    given.mesh.data = 4
    with pytest.raises(UserError) as caught:
        resolve(given, {"seed": "x"})
    named = [line.partition(":")[0] for line in caught.value.problems]
    assert sorted(named) == ["batch_size", "mesh.tensr", "model.num_heads", "model.vocab_size", "optimizer", "seed"]
    allowed = ", ".join(f"mesh.{axis}" for axis in AXES)
    assert f"mesh.tensr: unknown key; allowed: {allowed}; did you mean" in str(caught.value)


@pytest.mark.parametrize(
    "texts",
    [
        ["pipeline.schedule=gpipe", "pipeline.num_microbatches=7", "batch_size=1"],  # no effect without a pipeline
        ["mesh.data=-1", "batch_size=5"],  # nothing is known yet that 5 would have to divide by
        ["num_steps=1", "learning_rate.warmup_steps=100", "checkpoint.every=1000"],  # shorter than its warm-up
        ["model.attention=cudnn", "precision.policy=bfloat16"],
        ["model.head_dim=50", "model.embed_dim=130"],
        ["data.source=synthetic", "model.vocab_size=10"],
        ["mesh.tensor=4", "model.embed_dim=130", "model.head_dim=32"],  # no rule splits embed over tensor
    ],
)
def test_what_looks_odd_and_is_legal(texts):
    assert problems(texts) == []


def test_what_is_trained_of_a_task_without_names_of_dims_is_checked_on_one_device():
    (line,) = problems(["optimizer.trainable=bias"], make_task=unnamed_task)
    assert line.startswith("optimizer.trainable: got 'bias'")
    assert line.endswith("nearest: 'table'")
    assert problems(["optimizer.trainable=tab"], make_task=unnamed_task) == []


def unnamed_task(config, placement):
    return Task(lambda rng: {"table": jnp.zeros((2, 3))}, len, {})


@pytest.mark.parametrize("key", ["mesh.dat", "s", "model.mlp"])
def test_an_unknown_key_hides_no_problem_of_known_ones_that_it_is_a_part_of(key):
    found = problems([f"{key}=3", "model.mlp_dim=510", "mesh.tensor=4", "mesh.data=3"])
    assert [line.partition(":")[0] for line in found] == [key, "batch_size", "model.mlp_dim"]


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    """Options of a task of one's own, of which one is the size of a dim."""

    groups: int = option(6, "groups of heads", dim="heads")


def own_task(config, placement):
    init = lambda rng: {"w": LogicallyPartitioned(jnp.zeros((2 * config.model.groups, 8)), ("heads", "embed"))}  # noqa: E731
    return Task(init, len, {})


own_task.options = OwnOptions


def test_weights_of_a_task_of_ones_own_are_checked_under_rules_of_ones_own():
    (line,) = problems(["mesh.tensor=8"], make_task=own_task)
    assert line == (
        "model.groups: got 6, which makes 12, for dim 'heads' of w; allowed: a multiple of 8, because it is "
        "split over mesh.tensor = 8; nearest: 8, or mesh.tensor=6"
    )
    rules = extend(default_rules(LayoutOptions()), Rule("heads"))
    assert problems(["mesh.tensor=8"], make_task=own_task, rules=rules) == []
    config = resolve({"mesh": {"tensor": -1}}, make_task=own_task)
    shape = dict.fromkeys(AXES, 1) | {"tensor": 8}
    assert check(config, shape, own_task) == [line]
    assert check(config, shape, own_task, rules) == []


def test_a_rule_of_ones_own_that_matches_nothing_is_refused_on_one_device():
    rules = extend(default_rules(LayoutOptions()), Rule("hads", parameters=("tensor",)))
    (line,) = problems([], make_task=own_task, rules=rules)
    assert line == "rule 'hads' -> tensor (size 1): matches no array; allowed: embed, heads; did you mean 'heads'?"


def test_an_open_axis_is_checked_once_its_size_is_known():
    config = resolve(default(), {"mesh.data": "-1", "batch_size": "20"})
    shape = dict.fromkeys(AXES, 1) | {"data": 8}
    [line] = check(config, shape)
    assert line.endswith("a multiple of 8 = mesh.data 8 x mesh.fsdp 1 x 1 microbatches; nearest: 24")
    assert check(config, shape | {"data": 4}) == []


def test_a_pipeline_cuts_each_part_of_an_accumulated_batch_again():
    config = resolve({"accumulation_steps": 2, "pipeline": {"num_microbatches": 4}})
    assert [num_microbatches(config, {"pipeline": size}) for size in (1, 2)] == [2, 8]


def test_a_model_of_ones_own_is_not_measured_by_the_decoders_options():
    texts = ["mesh.tensor=8", "model.num_heads=3", "batch_size=8"]
    assert problems(texts)
    own = lambda config, placement: Task(lambda rng: {}, len, {})  # noqa: E731
    assert problems(texts, make_task=own) == []
    assert problems(["mesh.data=3"], make_task=own)


def test_a_plan_needs_no_data():
    texts = ["data.source=tokens", "data.path=/cluster/only/*.bin", "model.vocab_size=50257"]
    assert problems(texts)
    assert problems(texts, reads_data=False) == []


def test_problems_found_elsewhere_come_first():
    assert problems(["seed=-1"], also=["first"]) == ["first", "seed: got -1; allowed: at least 0; nearest: 0"]
    assert problems(also=["alone"]) == ["alone"]


def test_json_goes_there_and_back():
    config = resolve(default(), {"mesh.data": "2", "model.rope.base": "500000", "data.path": ""})
    text = to_json(config)
    assert from_json(text) == config
    assert json.loads(text)["mesh"] == dict.fromkeys(AXES, 1) | {"data": 2}


def test_json_of_another_version():
    older = json.loads(to_json(Config()))
    del older["model"]["rope"]["base"], older["remat"]
    assert from_json(json.dumps(older)) == Config()
    with pytest.raises(UserError, match=r"config.json: model.colour: unknown key"):
        from_json(json.dumps(older | {"model": {"colour": 1}}))
    with pytest.raises(UserError, match=r"config.json: not JSON"):
        from_json("{")


def test_what_may_change_on_resume_and_what_may_not():
    old = json.loads(to_json(resolve({})))
    free = ["mesh.data=2", "pipeline.num_microbatches=8", "remat.policy=full", "num_steps=9", "checkpoint.every=3",
            "log_every=1", "observe.progress=no", "profile.steps=1,2", "layout.sequence_parallel=yes"]  # fmt: skip
    bound = {"seed": 1, "batch_size": 64, "model.mlp_dim": 256, "optimizer.beta1": 0.8, "optimizer.trainable": "query",
             "learning_rate.name": "noam",
             "data.packing": "first_fit", "precision.policy": "bfloat16", "sequence_length": 64}  # fmt: skip
    changed = resolve(default(), dict(text.split("=", 1) for text in free))
    assert difference(old, dataclasses.asdict(changed)) == []
    changed = resolve(changed, {key: str(value) for key, value in bound.items()})
    lines = difference(old, dataclasses.asdict(changed))
    assert sorted(line.partition(":")[0] for line in lines) == sorted(bound)
    assert "seed: was 0, now 1" in lines
    assert 'learning_rate.name: was "cosine", now "noam"' in lines


def test_a_run_older_than_a_field_goes_on_with_its_default():
    old = json.loads(to_json(resolve({})))
    del old["model"]["rope"]["base"]
    assert difference(old, dataclasses.asdict(resolve({}))) == []
    changed = dataclasses.asdict(resolve(default(), {"model.rope.base": "2"}))
    assert difference(old, changed) == ["model.rope.base: was 10000.0, now 2.0"]
    assert difference(old | {"gone": 1}, dataclasses.asdict(resolve({}))) == ["gone: was 1, now absent"]


def test_parse_reports_arguments_file_and_overrides_together(tmp_path):
    file = tmp_path / "mine.py"
    text = (
        "from meshtrain.config import default\ndef get_config():\n    c = default()\n    c.batch_sise = 3\n    return c"
    )
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse([f"--config={file}", "--config.mesh.tensr=2", "--confg=x", "--config.seed=one"])
    named = [line.partition(":")[0] for line in caught.value.problems]
    assert sorted(named) == ["arguments", "batch_sise", "mesh.tensr", "seed"]


def test_overrides_are_checked_although_the_file_is_broken(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def get_config():\n    return 3")
    with pytest.raises(UserError) as caught:
        parse([f"--config={file}", "--config.seed=one"])
    assert [line.partition(":")[0] for line in caught.value.problems] == ["--config", "seed"]
    assert "got int from get_config()" in caught.value.problems[0]


def test_every_field_has_a_text_and_a_plain_type():
    for key, entry in flags.schema(Config()).items():
        assert entry.kind in (int, float, bool, str), key
        assert isinstance(entry.default, entry.kind), key
        assert entry.text, key
        assert "\n" not in entry.text, key


def test_the_table_of_fields(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert fields.main(["--config.mesh.data=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["field", "type", "default", "here", "meaning"]
    assert [line.split()[0] for line in lines[2:] if line[0] != " "] == list(flags.schema(Config()))
    assert max(map(len, lines)) <= 120
    [line] = [line for line in lines if line.startswith("mesh.data")]
    assert line.split()[:4] == ["mesh.data", "int", "1", "2"]
    [line] = [line for line in lines if line.startswith("model.norm.name ")]
    assert "rmsnorm, layernorm" in line
    monkeypatch.setenv("COLUMNS", "90")  # a narrower terminal
    fields.main([])
    narrow = capsys.readouterr().out.splitlines()
    assert narrow[0].split() == ["field", "type", "default", "meaning"], "nothing was chosen"
    assert max(map(len, narrow)) <= 90
    texts = " ".join(line.split("  ")[-1].strip() for line in narrow)
    assert not [key for key, entry in flags.schema(Config()).items() if entry.text not in texts], "cut short"


def test_main_refuses_before_it_starts(tmp_path):
    with pytest.raises(UserError) as caught:
        main(["--workdir=/proc/run", "--config.seed=x"])
    assert [line.partition(":")[0] for line in caught.value.problems] == ["--workdir", "--config", "seed"]


def test_the_programs_exit_with_2_and_one_line_for_each_problem():
    words = ["--config=configs/tiny.py", "--config.mesh.tensor=3", "--config.sed=1"]
    program = [sys.executable, "-m", "meshtrain.main", *words]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    assert len(lines) == 4
    assert all(line.startswith("meshtrain: error: ") for line in lines)


def test_checks_of_weights_touch_no_device():
    # JAX refuses another number of CPU devices once it has looked for them.
    code = (
        "import jax\nfrom meshtrain.config.__main__ import main\nmain(['--config.mesh.tensor=2'])\n"
        "jax.config.update('jax_num_cpu_devices', 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "mesh.tensor" in done.stdout


def test_a_configuration_of_ours_is_copied_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert fields.main(["--copy=llama3_8b"]) == 0
    assert capsys.readouterr().out.endswith(" train --config=llama3_8b.py\n")
    copied = tmp_path / "llama3_8b.py"
    assert copied.read_bytes() == (ROOT / "configs" / "llama3_8b.py").read_bytes()
    copied.write_text("changed")
    refused = {"llama3_8b": "llama3_8b.py already exists in this folder; ", "llama3_8": r"did you mean 'llama3_8b'\?$"}
    for name, line in (refused | {"../x": "nearest: 3d$"}).items():
        with pytest.raises(UserError, match=rf"^--copy: got '{name}'.*{line}"):
            fields.main([f"--copy={name}"])
    assert copied.read_text() == "changed"
    assert list(tmp_path.iterdir()) == [copied]
