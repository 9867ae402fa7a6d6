"""Which differences are above their bounds: one planted difference of each kind."""

import dataclasses

import numpy as np
import pytest

from meshtrain.agree import comparison
from meshtrain.agree.comparison import CHANGE, COUNT, GRADIENT, Figure
from meshtrain.agree.sides import Side, nudged

pytestmark = pytest.mark.quick
GENERATOR = np.random.default_rng(0)
WEIGHTS = {
    "layers/up": GENERATOR.normal(size=(2, 3, 4)).astype(np.float32),
    "table": GENERATOR.normal(size=(5, 3)).astype(np.float32),
}
SIDE = Side(
    batches={"1/tokens": np.arange(6)},
    initial=WEIGHTS,
    sums={
        "loss/first batch": np.float32(3.5),
        "counts/weight": np.float32(8),
        "metrics/load/counts": np.float32([[1, 2], [3, 4]]),
        "metrics/accuracy": np.float32(0.25),
        "evaluation/loss": np.float32(3.5),
    },
    gradients={path: leaf**2 for path, leaf in WEIGHTS.items()},
    losses=[3.5, 3.25],
    norms=[1.5, 1.25],
    final={path: leaf + leaf**3 for path, leaf in WEIGHTS.items()},
)


def excess(side, rounding=None):
    """The places above their bounds."""
    return [one.key for one in comparison.beyond(comparison.figures(side, SIDE), rounding or {})]


def with_leaf(field, path, at, factor):
    leaf = getattr(SIDE, field)[path].copy()
    leaf[at] *= np.float32(factor)
    return dataclasses.replace(SIDE, **{field: {**getattr(SIDE, field), path: leaf}})


def test_a_side_agrees_with_itself():
    figures = comparison.figures(SIDE, SIDE)
    assert not any(figure.error for figure in figures.values())
    assert {kind for kind, _ in figures} == set(comparison.KINDS)
    assert not excess(SIDE)


@pytest.mark.parametrize(
    "side, expected",
    [
        (with_leaf("batches", "1/tokens", 3, 2), [("batches", "1/tokens")]),
        (with_leaf("gradients", "layers/up", 1, 1 + 3e-6), [(GRADIENT, "layers/up[1]")]),
        (with_leaf("gradients", "table", ..., np.nan), [(GRADIENT, "table")]),
        (with_leaf("final", "layers/up", 0, 1.01), [(CHANGE, "layers/up[0]")]),
        (with_leaf("sums", "metrics/load/counts", (0, 0), 2), [(COUNT, "metrics: load/counts")]),
        (dataclasses.replace(SIDE, unequal_shards=frozenset({"table"})), [("initial weights", "table")]),
        (
            dataclasses.replace(SIDE, unequal_replicas=frozenset({"table"})),
            [(CHANGE, "table, other bits on some devices")],
        ),
        (dataclasses.replace(SIDE, losses=[3.5, 3.25 * (1 + 2e-6)]), [("loss of steps", "step 2")]),
        (dataclasses.replace(SIDE, norms=[1.5 * (1 + 2e-6), 1.25]), [("gradient norm", "step 1")]),
        (
            dataclasses.replace(SIDE, sums={**SIDE.sums, "counts/weight": np.float32(9)}),
            [(COUNT, "weight")],
        ),
        (
            dataclasses.replace(SIDE, sums={**SIDE.sums, "evaluation/loss": np.float32(3.6)}),
            [("evaluation", "loss")],
        ),
        (
            dataclasses.replace(SIDE, sums={**SIDE.sums, "metrics/accuracy": np.float32(0.26)}),
            [("metrics", "accuracy")],
        ),
        (dataclasses.replace(SIDE, gradients={"table": SIDE.gradients["table"]}), [
            (GRADIENT, "layers/up[0]"), (GRADIENT, "layers/up[1]")
        ]),
    ],
)  # fmt: skip
def test_each_kind_of_difference_is_found_in_its_place(side, expected):
    assert excess(side) == expected


def test_one_bit_of_a_weight_is_a_difference():
    other = {**WEIGHTS, "table": np.nextafter(WEIGHTS["table"], np.float32(np.inf))}
    found = comparison.figures(dataclasses.replace(SIDE, initial=other), SIDE)
    assert ("initial weights", "table") in [one.key for one in comparison.beyond(found, {})]
    inexact = [one.key for one in comparison.beyond(found, {}, exact=False)]
    assert ("initial weights", "table") not in inexact, "another JAX rounds random numbers in another way"


def test_a_difference_within_sixteen_yardsticks_agrees():
    side = with_leaf("gradients", "table", ..., 1 + 1e-5)
    for yardstick, expected in ((1e-6, []), (5e-7, [(GRADIENT, "table")])):
        assert excess(side, {(GRADIENT, "table"): Figure(yardstick, 1.0)}) == expected


def test_an_exact_gradient_of_zero_is_compared_with_its_layer():
    """With a yardstick of its own size, a bound of 16 yardsticks could not fail."""
    rounding = {(GRADIENT, "layers/up[1]"): Figure(1.0, 1.0)}
    tiny = with_leaf("gradients", "layers/up", 1, 1e-7)
    base = dataclasses.replace(SIDE, gradients={**tiny.gradients, "layers/down": np.ones((2, 3), np.float32)})

    def found(factor):
        leaf = base.gradients["layers/up"].copy()
        leaf[1] *= np.float32(factor)
        side = dataclasses.replace(base, gradients={**base.gradients, "layers/up": leaf})
        side = dataclasses.replace(side, final=with_leaf("final", "layers/up", 1, 2).final)  # its change says nothing
        return [one.key for one in comparison.beyond(comparison.figures(side, base), rounding)]

    assert found(2) == []
    assert found(1000) == [(GRADIENT, "layers/up[1]")]


def test_layers_in_a_list_are_leaves_of_their_own():
    norms = comparison.layer_norms({"layers/0/kernel": np.float32([3, 4])})
    assert norms == {"": 5.0}


@pytest.mark.parametrize("unit, relative", [("float32", 2.0**-23), ("bfloat16", 2.0**-7)])
def test_nudged_weights_differ_by_one_unit(unit, relative):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, unit) if unit != "float32" else unit)
    leaf = np.float32([0.0, 1.0, -3.0, 0.125] * 50)
    other = nudged(leaf, "path", dtype)
    moved = np.abs(other - leaf)
    assert other.dtype == leaf.dtype
    assert (moved[leaf == 0] == 0).all()
    assert (moved[leaf != 0] > 0).all()
    assert (moved <= relative * np.abs(leaf)).all()
    assert len({*(other - leaf)[1::4]}) == 2, "up and down"
