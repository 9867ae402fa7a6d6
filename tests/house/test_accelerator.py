"""The day with an accelerator: a step that fails loses nothing, what is done is kept, and the page has its table."""

import json
import pathlib

import pytest

from meshtrain.errors import UserError
from scripts.benchmarks import accelerator, accelerator_steps

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [*accelerator.STEPS]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results.json"


@pytest.fixture
def ran(monkeypatch):
    """The names of the steps that were run, by a stand-in that lets `fp8` fail at first."""
    names = []

    def performed(name, out, tiny, seconds):
        names.append(name)
        return {"failed": "no such dtype"} if name == "fp8" and names.count("fp8") < 2 else {"result": {"a": 1.5}}

    monkeypatch.setattr(accelerator, "performed", lambda *given: performed(*given) | {"seconds": 1})
    return names


def test_a_step_that_fails_is_a_line_and_is_tried_again(out, ran, capsys):
    assert accelerator.main([f"--out={out}"]) == 1
    assert ran == NAMES
    said = capsys.readouterr().out
    assert "| fp8 | no such dtype |" in said
    assert "| bits | a 1.5 |" in said
    assert accelerator.main([f"--out={out}"]) == 0
    assert ran == [*NAMES, "fp8"]
    assert accelerator.main([f"--out={out}"]) == 0
    assert len(ran) == len(NAMES) + 1
    with pytest.raises(UserError, match=r"of a start without --tiny; allowed: one of the same kind; nearest: --out="):
        accelerator.main([f"--out={out}", "--tiny"])


def test_no_step_begins_when_the_time_is_up(out, ran, capsys):
    accelerator.main([f"--out={out}", "--minutes=0"])
    assert ran == []
    assert "0 minutes are up before 'versions'" in capsys.readouterr().out


def test_the_page_has_the_table_of_the_file():
    results = ROOT / "docs" / "results"
    found = json.loads((results / "accelerator.json").read_text(encoding="utf-8"))["steps"]
    page = (results / "accelerator.md").read_text(encoding="utf-8")
    assert "\n".join(accelerator.table(found)) + "\n\n" in page


def test_a_cell_has_bytes_numbers_and_parts():
    result = {"peak_bytes": 3 * 2**30, "whole": {"loss": 1.234e-6}, "tokens_per_second": 12345.6, "mfu": None, "n": 3}
    [*_, row] = [line for line in accelerator.table({"fp8": {"result": result}}) if line.startswith("| fp8")]
    assert row == "| fp8 | peak 3 GiB, whole: loss 1.23e-06, tokens per second 12,346, mfu -, n 3 |"


def test_what_a_process_said_last():
    assert accelerator_steps.last_line("Traceback\n  File\nRuntimeError: why\n\nstatus.cc:146") == "RuntimeError: why"
    assert accelerator_steps.last_line("killed\n") == "killed"
    assert accelerator_steps.last_line("") == ""


@pytest.mark.slow
def test_the_steps_run_on_a_cpu_with_small_sizes(out):
    """Those of a second size, or of the same function with another word, count as done."""
    others = (
        "gpt2_124m",
        accelerator_steps.LONG,
        accelerator_steps.MIXTURE,
        accelerator_steps.FP8,
        "attention xla",
        "attention triton",
        "attention splash",
        "fp8",
        "bits",
    )
    same = [name for name in NAMES if name.startswith(others)]
    done = {name: {"result": {"step_seconds": 1.0}} for name in same}
    out.write_text(json.dumps({"tiny": True, "steps": done}))
    accelerator.main([f"--out={out}", "--tiny"])
    found = json.loads(out.read_text())["steps"]
    assert found.keys() == {*NAMES}
    assert not {name: entry for name, entry in found.items() if "failed" in entry}
    results = {name: entry["result"] for name, entry in found.items()}
    assert results["attention cudnn"] == {"not_measured": "a kernel for GPUs"}
    assert 0 < results["attention blockwise"]["packed"]["gradients"] < 0.1
    ours, bare = results["llama_1b"], results["llama_1b in plain JAX"]
    assert ours["first_loss"] == pytest.approx(bare["first_loss"], rel=1e-3)
    assert ours["compiler_bytes"] > 0 < results["llama_1b planned"]["peak_bytes"]
    assert results["kill and resume"]["resumed_at"] >= accelerator_steps.SAVED_STEP
    assert results["kill and resume"]["difference"] <= 1e-5
