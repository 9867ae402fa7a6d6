"""Four steps of a small encoder-decoder on packed pairs: the same numbers on one device and on any mesh."""

import jax
import numpy as np
import pytest

from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from tests.examples.runs import stepped
from tests.parity.comparison import Trained, assert_same

MODEL = {
    "activation": "gelu",  # has a derivative everywhere; that of relu jumps where rounding moves an input across 0
    "num_encoder_layers": 2,
    "num_layers": 2,
    "embed_dim": 32,
    "mlp_dim": 64,
    "num_heads": 2,
    "source_length": 16,
    "vocab_multiple": 8,
    "dropout_rate": 0.1,
}
PLAIN = {"biases": False}  # half as many weights, which compile in half the time
OTHER = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "norm_placement": "post",
    "activation": "swiglu",
    "tied_embeddings": False,
    "biases": False,
}


def configured(model: dict[str, object], **changes: object) -> Config:
    given = {
        "task": "seq2seq",
        "num_steps": 4,
        "batch_size": 16,
        "sequence_length": 24,
        "model": MODEL | model,
        "optimizer": {"name": "adam", "clip_norm": 0.0},
        "learning_rate": {"name": "linear", "peak": 3e-3, "warmup_steps": 2},
        "data": {"source": "numbers", "spelling": "english", "num_threads": 0},
    }
    return resolve(given | changes)


def train(config: Config, evaluates: bool, **axes: int) -> tuple[Trained, list[float]]:
    """Returns four steps on a mesh; and for each token how many pairs end with it, as the last weights predict."""
    trained, assembly, state, batch = stepped(config, **axes)
    if not evaluates:
        return trained, []
    found = []
    evaluate = assembly.steps.evaluate.lower(state.params, batch).compile()
    weights = batch["weights"] * (batch["targets"] == 0)
    for token in range(config.model.vocab_size):
        targets = jax.device_put(np.full(weights.shape, token, np.int32), weights.sharding)
        right, pairs = evaluate(state.params, {**batch, "weights": weights, "targets": targets})["exact_match"]
        found.append(float(right))
    assert sum(found) == pairs == float(np.sum(weights)), "each pair ends with one token"
    return trained, found


@pytest.fixture(scope="module")
def on_one_device():
    """A function options -> what one device makes of them, remembered."""
    made = {}

    def of(model, evaluates):
        if (key := f"{model} {evaluates}") not in made:
            made[key] = train(configured(model), evaluates)
        return made[key]

    return of


@pytest.mark.parametrize(
    "model, mesh, changes",
    [
        (
            PLAIN,
            {"data": 2, "context": 2, "tensor": 2},
            {"zero": {"level": 2}, "remat": {"policy": "dots"}, "accumulation_steps": 2},
        ),
        pytest.param(
            {},
            {"data": 4, "tensor": 2},
            {"zero": {"level": 3}, "remat": {"policy": "full", "every": 2}, "layout": {"sequence_parallel": True}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"positions": "learned"}, {"data": 4, "context": 2}, {"zero": {"level": 1}}, marks=pytest.mark.slow
        ),
        pytest.param(
            OTHER,
            {"data": 2, "fsdp": 2, "tensor": 2},
            {"remat": {"policy": "save_attention"}, "accumulation_steps": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["level 2", "level 3", "level 1", "others"],
)
def test_the_mesh_changes_no_number(model, mesh, changes, on_one_device):
    evaluates = model is OTHER
    expected, right = on_one_device(model, evaluates)
    got, found = train(configured(model, **changes), evaluates, **mesh)
    assert_same(got, expected, zero_gradients=model is not OTHER and model is not PLAIN)
    assert expected.losses[-1] < expected.losses[0]
    assert found == right
