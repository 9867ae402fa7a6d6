"""docs/guide/numbers.md: its example runs, its options are there; the table of results is the script's."""

import dataclasses
import pathlib
import re

import pytest

from meshtrain.config.resolve import parse, resolve
from meshtrain.config.tasks import abstract_task
from meshtrain.data.dataset import open_user_data
from meshtrain.examples.seq2seq import Seq2SeqOptions
from meshtrain.models.task import entries, limits
from scripts.benchmarks import numbers
from scripts.benchmarks.numbers import SETTINGS, Outcome, line, missed, trained

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "numbers.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results" / "training.md").read_text(encoding="utf-8")


def test_pairs_of_ones_own_fit_the_task():
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(compile(block, "docs/guide/numbers.md", "exec"), names)
    model = {"vocab_size": 10, "source_length": 8}
    config = resolve({"task": "seq2seq", "batch_size": 4, "model": model, "data": {"source": "json:loads"}})
    task = abstract_task(config)
    data = open_user_data(names["make_data"](config), entries(task, 4), limits(task), 0)
    assert (len(data.train), len(data.validation)) == (500, 1)
    assert data.train[0]["tokens"][:7].tolist() == [0, 8, 9, 0, 8, 9, 0]


def test_options_of_the_page_are_there():
    fields = {f"model.{field.name}" for field in dataclasses.fields(Seq2SeqOptions)}
    named = set(re.findall(r"`(model\.\w+)`", PAGE))
    assert named <= fields, named - fields
    assert len(named) >= 8


def rows_of_the_page():
    _, _, after = RESULTS.partition("\n".join(numbers.HEADER))
    return [row.split("|")[1:-1] for row in after.split("\n\n")[0].strip().splitlines()]


def test_the_table_has_the_settings_of_the_script_and_keeps_its_promise():
    rows = rows_of_the_page()
    assert len(rows) == len(SETTINGS)
    for row, setting in zip(rows, SETTINGS, strict=True):
        assert row[:3] == line(setting, [Outcome((1.0,), 1.0)], 1.0).split("|")[1:4]
        last, best = ([int(count) / setting.num_held_out for count in cell.split(",")] for cell in row[3:5])
        seconds, start = (float(cell) for cell in row[5:])
        outcomes = [Outcome((best_share, share), seconds) for share, best_share in zip(last, best, strict=True)]
        assert len(outcomes) == setting.num_seeds
        assert not missed(setting, outcomes, start)


def test_a_bar_that_is_missed_is_said():
    setting = SETTINGS[0]
    assert not missed(setting, [Outcome((0.5, 1.0, 0.99), 70.0)], 10.0)
    assert missed(setting, [Outcome((1.0, 0.98), 70.1), Outcome((0.99, 0.99), 1.0)], 10.0) == [
        "seed 0: 98.0% right at the last step, wanted 99.0%",
        "seed 0: 60 s, wanted 60",
        "seed 1: 99.0% right at the best, wanted 100.0%",
    ]


def test_the_script_holds_out_what_the_data_do():
    for setting in SETTINGS:
        config, _ = parse([f"--config={ROOT}/configs/numbers.py", *setting.words()])
        assert min(config.data.numbers_below // 10, 1000) == setting.num_held_out
        assert config.eval_every


@pytest.mark.slow
def test_the_script_trains(tmp_path):
    small = (
        "--config.num_steps=3",
        "--config.eval_every=2",
        "--config.model.embed_dim=16",
        "--config.model.mlp_dim=16",
    )
    outcome = trained(SETTINGS[0], 0, tmp_path, *small)
    assert len(outcome.shares) == 2
    assert outcome.seconds > 0
