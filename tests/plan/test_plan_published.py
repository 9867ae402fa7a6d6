"""The planner's time against published runs, from stored figures of their compiled programs."""

import json
import pathlib

import pytest

from meshtrain.plan.hlo import parse
from meshtrain.plan.timing import streams
from scripts.benchmarks import published_runs
from scripts.benchmarks.published_runs import RUNS
from tests.plan import recorded
from tests.plan.conftest import H100

ROOT = pathlib.Path(__file__).parents[2]
STORED = json.loads(published_runs.STORED.read_text(encoding="utf-8"))
# Of a run whose program and card match ours, and of another. The cards of 500 W are none of those that we know.
MATCHING, OTHER = 0.15, 0.2


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.is_calibrating])
def test_a_published_step_is_predicted_by_its_card_and_from_the_other_runs_of_its_card(name):
    run = RUNS[name]
    bound = OTHER if run.differs else MATCHING
    assert abs(published_runs.compared(name, STORED, run.card.product_share).error) <= bound
    assert abs(published_runs.compared(name, STORED, published_runs.left_out_share(name, STORED)).error) <= bound


def test_a_run_is_no_part_of_what_predicts_it():
    changed = STORED | {"gpt_22b": STORED["gpt_22b"] | {"other_bytes": 0, "products": []}}
    share = published_runs.left_out_share
    assert share("gpt_22b", changed) == share("gpt_22b", STORED)
    assert share("gpt_175b_full", changed) != share("gpt_175b_full", STORED)


def test_runs_in_8_bits_are_marked_and_no_share_is_fitted_to_them():
    assert [name for name, run in RUNS.items() if run.is_fp8] == ["qwen3_30b_25.09", "qwen3_30b_25.11"]
    assert not any(run.is_calibrating for run in RUNS.values() if run.is_fp8)
    assert published_runs.table(STORED).count(" 8-bit ") == 2


def test_a_published_rate_is_of_the_model_s_flops_with_full_attention():
    run, stored = RUNS["mixtral_8x7b"], STORED["mixtral_8x7b"]
    # Megatron-Core 0.9 counts 12 b s L h^2 (1 + 8 / 32 + s / h + 2 x 14,336 / h x 3 / 2 + V / (2 L h)).
    hidden, layers, length, vocabulary = 4096, 32, 4096, 32_000
    factor = 1 + 8 / 32 + length / hidden + 2 * 14_336 / hidden * 3 / 2 + vocabulary / (2 * layers * hidden)
    flops = 12 * 256 * length * layers * hidden**2 * factor / 64
    assert stored["model_flops"] == pytest.approx(flops, rel=1e-3)
    assert run.seconds(stored) == pytest.approx(flops / 468e12, rel=1e-3)


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "results" / "plans.md").read_text(encoding="utf-8")
    assert published_runs.table(STORED) in page


@pytest.mark.parametrize("name", RUNS)
def test_stored_figures_give_the_time_of_the_program(name):
    stored = STORED[name]
    made = published_runs.seconds(stored, RUNS[name].card, stored["with_share"])
    assert made == pytest.approx(stored["modelled_seconds"], rel=5e-3)


def test_figures_of_a_program_give_its_time_at_other_shares_too():
    program = parse.read(recorded.GPU_LOOPS.replace("f32[", "bf16["))
    stored = published_runs.figures(program, H100, {}, {})
    whole = streams.Streams(program, H100, {}, streams.Assumptions()).step()[0]
    assert stored["modelled_seconds"] == whole
    assert published_runs.seconds(stored, H100, H100.product_share) == pytest.approx(whole)
    assert published_runs.seconds(stored, H100, 0.05) > whole
    ends = streams._ends(program, H100, {}, streams.Assumptions())
    assert published_runs.ends(stored, H100, H100.product_share) == pytest.approx(ends)
