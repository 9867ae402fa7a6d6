"""Parity that could not fail would say nothing: the comparison notices any single leaf that is wrong, and any step."""

import dataclasses

import numpy as np
import pytest

from tests.parity import comparison, runs
from tests.parity.comparison import GRADIENT_BOUND, Trained, assert_same

IN_LLAMA = pytest.mark.xdist_group("parity-llama")
IN_GPT = pytest.mark.xdist_group("parity-gpt")
MODELS = {"llama": runs.LLAMA, "gpt": runs.GPT}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(f"parity-{name}")) for name in MODELS])
def right(request, reference) -> Trained:
    return reference(dataclasses.replace(runs.CONFIG, model=MODELS[request.param]))


def is_zero(right, path):
    """Whether the comparison is told that this leaf's gradient is zero: of GPT's leaves, those with the name."""
    return "embedding/positions" in right.gradients and comparison.is_zero_gradient(path)


def check_same(got, right):
    assert_same(got, right, zero_gradients="embedding/positions" in right.gradients)


def with_leaf(tree, path, leaf):
    return {**tree, path: np.asarray(leaf, np.float32)}


def swapped(leaf):
    """Two layers interchanged, or the two halves of what is not stacked: the same numbers elsewhere."""
    return np.roll(leaf, leaf.shape[0] // 2, axis=0)


TAMPERING = {"doubled": lambda leaf: 2 * leaf, "zero": np.zeros_like, "swapped": swapped, "negated": np.negative}


def test_a_run_is_the_same_as_itself(right):
    check_same(right, right)


@pytest.mark.parametrize("how", TAMPERING)
def test_a_wrong_gradient_of_any_single_leaf_is_noticed(right, how):
    paths = [path for path in right.gradients if not is_zero(right, path)]
    assert len(paths) == len(right.initial) - ("embedding/positions" in right.gradients)
    for path in paths:
        wrong = with_leaf(right.gradients, path, TAMPERING[how](right.gradients[path]))
        with pytest.raises(AssertionError, match=rf"^gradient: {path}"):
            check_same(dataclasses.replace(right, gradients=wrong), right)


def test_a_wrong_gradient_of_any_single_layer_is_noticed(right):
    for path, leaf in right.gradients.items():
        if not comparison.STACKED.search(path) or is_zero(right, path):
            continue
        for layer in range(leaf.shape[0]):
            wrong = leaf.copy()
            wrong[layer] *= 1 + 4 * GRADIENT_BOUND
            with pytest.raises(AssertionError, match=rf"^gradient: {path}\[{layer}\]: differs by [^\n]*$"):
                check_same(dataclasses.replace(right, gradients=with_leaf(right.gradients, path, wrong)), right)


@IN_GPT
def test_a_gradient_that_is_not_zero_where_it_has_to_be_is_noticed(reference):
    right = reference(dataclasses.replace(runs.CONFIG, model=runs.GPT))
    [path] = [path for path in right.gradients if comparison.is_zero_gradient(path)]
    norms, leaf = comparison.layer_norms(right.gradients), right.gradients[path]
    for factor, is_noticed in ((0.5, False), (2.0, True)):
        wrong = leaf.copy()
        wrong[3, 0, 0] += factor * GRADIENT_BOUND * norms[3]
        got = dataclasses.replace(right, gradients=with_leaf(right.gradients, path, wrong))
        if is_noticed:
            with pytest.raises(AssertionError, match=r"^gradient: layers/attention/key_bias\[3\]"):
                check_same(got, right)
        else:
            check_same(got, right)


def test_a_wrong_change_of_any_single_leaf_is_noticed(right):
    for path in (path for path in right.initial if not is_zero(right, path)):
        change = right.final[path] - right.initial[path]
        for wrong in (right.final[path] + 0.01 * change, right.initial[path]):
            with pytest.raises(AssertionError, match=rf"^change: {path}"):
                check_same(dataclasses.replace(right, final=with_leaf(right.final, path, wrong)), right)


def test_one_bit_of_an_initial_weight_is_noticed(right):
    for path, leaf in right.initial.items():
        wrong = leaf.copy()
        wrong.flat[-1] = np.nextafter(wrong.flat[-1], np.float32(1e9))
        with pytest.raises(AssertionError, match=rf"initial weights: {path}: not the same bits"):
            check_same(dataclasses.replace(right, initial=with_leaf(right.initial, path, wrong)), right)


@IN_LLAMA
@pytest.mark.parametrize("step", range(runs.NUM_STEPS))
@pytest.mark.parametrize("name", ["losses", "grad_norms"])
@pytest.mark.parametrize("factor", [1 + 2e-5, np.nan])
def test_a_wrong_loss_or_norm_of_any_step_is_noticed(reference, name, step, factor):
    right = reference(runs.CONFIG)
    wrong = getattr(right, name).copy()
    wrong[step] *= factor
    with pytest.raises(AssertionError, match=rf"^{name}: step {step + 1}: "):
        check_same(dataclasses.replace(right, **{name: wrong}), right)


@IN_LLAMA
def test_what_is_missing_is_noticed(reference):
    right = reference(runs.CONFIG)
    [path, *_] = right.gradients
    for name in ("gradients", "initial", "final"):
        fewer = {key: leaf for key, leaf in getattr(right, name).items() if key != path}
        with pytest.raises(AssertionError, match=path):
            check_same(dataclasses.replace(right, **{name: fewer}), right)
    with pytest.raises(AssertionError, match="losses: 3 steps, expected 4"):
        check_same(dataclasses.replace(right, losses=right.losses[:3]), right)


def test_nothing_that_is_no_number_passes(right):
    for path, leaf in right.gradients.items():
        wrong = with_leaf(right.gradients, path, np.full_like(leaf, np.nan))
        with pytest.raises(AssertionError, match=rf"gradient: {path}"):
            check_same(dataclasses.replace(right, gradients=wrong), right)
