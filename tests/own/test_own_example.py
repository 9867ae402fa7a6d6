"""The example that README shows: short enough, the same text, and it learns on three axes."""

import json
import pathlib
import subprocess
import sys

import pytest

from meshtrain.training import train

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "own_model.py"
MOST_LINES = 70


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import own_model

    return own_model


def test_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_readme_shows_the_example_as_it_runs():
    block = f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```\n"
    assert block in (ROOT / "README.md").read_text(encoding="utf-8"), "README.md: put docs/own_model.py there, verbatim"


def test_example_trains_on_three_axes(example, tmp_path, monkeypatch):
    given = {
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "num_steps": 30,
        "log_every": 1,
        "num_eval_batches": 1,
        "learning_rate": {"peak": 1e-2, "warmup_steps": 3},
        "observe": {"progress": False},
    }
    monkeypatch.chdir(ROOT)
    result = train(given, tmp_path, example.eight_bytes)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in logged if "loss" in line]
    assert losses[0] > 5.0, "the first loss is that of guessing"
    assert losses[-1] < 3.5
    assert result.assembly.task.num_parameters == 384 * 64 + 8 * 64 * 256 + 256 * 64
    table = result.state.params["table"]
    assert table.addressable_shards[0].data.shape == (384 // 2, 64 // 2)


@pytest.mark.slow
def test_example_beats_the_bigram(tmp_path):
    """As README starts it."""
    ended = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the run is better" in ended.stdout
    assert (tmp_path / "runs" / "own_model" / "layout.txt").exists()
