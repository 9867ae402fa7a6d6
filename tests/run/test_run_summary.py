"""What a run says at its end, piece by piece."""

import dataclasses

import jax
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.assembly.facts import parameters_text
from meshtrain.config.schema import Config
from meshtrain.run import summary
from meshtrain.run.summary import sample_tokens
from meshtrain.step.precision import PrecisionOptions
from tests.parity import runs


@pytest.mark.parametrize(
    ("asked", "num_parameters", "drawn"),
    [(-1, 10_000_000, 160), (-1, 10_000_001, 0), (0, 1000, 0), (7, 10**12, 7)],
)
def test_only_small_models_draw_a_sample_by_themselves(asked, num_parameters, drawn):
    assert sample_tokens(Config(sample_tokens=asked), num_parameters) == drawn


def test_it_names_what_is_there(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert summary.places(tmp_path) == ["metrics.jsonl", "checkpoints/"]


def test_the_speed_is_that_of_all_timed_steps():
    values = {"useful_seconds": 4.0, "timed_steps": 8, "tokens_per_second": 9.0}
    assert summary.rate_of_the_run(values, 100) == 200.0
    assert summary.rate_of_the_run({"eval_loss": 3.0}, 100) is None


def test_metrics_of_the_last_evaluation_are_shown():
    values = {"loss": 1.0, "accuracy": 0.5, "eval_loss": 2.0, "eval_accuracy": 0.75, "eval_lost": None}
    assert summary.metrics_of_evaluation(values) == {"accuracy": 0.75}


def test_the_start_states_that_weights_are_bfloat16():
    for dtype, is_stated in (("bfloat16", True), ("auto", False)):
        config = dataclasses.replace(runs.CONFIG, precision=PrecisionOptions(param_dtype=dtype))
        text = parameters_text(assemble(config, runs.sizes(), jax.devices()[:1]))
        assert ("weights are bfloat16 without a float32 copy" in text) == is_stated
