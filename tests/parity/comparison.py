"""Whether two runs made the same numbers: leaf by leaf, relative to what is compared, in float32.

Gradients are tiny beside weights, and those of attention's queries and keys are tiny beside all others: only a bound
that is relative to the norm of each leaf sees them. Stacked weights are compared layer by layer, since one layer's
gradient may be small beside another's.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np

Leaves = Mapping[str, np.ndarray]

GRADIENT_BOUND = 5e-6  # of the norm of the leaf; right runs differ by at most 1e-6
SCALAR_BOUND = 1e-5  # of losses and of norms of all gradients
CHANGE_BOUND = 1e-3  # of the norm of the leaf's change: Adam divides what is all but zero by its own size
STACKED = re.compile(r"(^|/)layers/")

# Leaves whose gradient is zero in exact arithmetic, so that what is computed is rounding: {regular expression: reason}.
# They are held to the bound times the norm of all gradients of their layer. Adam makes steps of full size of rounding,
# so that their change says nothing.
ZERO_GRADIENTS = {
    r"(^|/)key_bias$": "softmax over the keys does not change when one number is added to all scores of a query",
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run of a few steps leaves: host arrays by path, layers in layer order.

    Attributes:
      initial: float32 weights before the first step.
      final: float32 weights after the last.
      gradients: of the first step's mean loss, after clipping, as the optimizer's first moments hold them: each times
        a constant of the optimizer.
      losses: of each step.
      grad_norms: of each step, before clipping.
      loads: in each step that of experts and of each of them, which come from counts of tokens; empty without experts.
      cross_entropies: of each step, the loss without those of routers; empty without experts.
      expert_parts: the most parts in which a device computed the rows of its experts; 1 without experts.
    """

    initial: Leaves
    final: Leaves
    gradients: Leaves
    losses: np.ndarray
    grad_norms: np.ndarray
    loads: tuple[float | list[float], ...] = ()
    cross_entropies: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    expert_parts: float = 1


def assert_same(got: Trained, expected: Trained, *, zero_gradients: bool = False) -> None:
    """Raises AssertionError with a line for each leaf and each step that differs by more than its bound.

    Initial weights, loads of experts and the biases that follow them are compared bit by bit.

    Args:
      got: a run on some mesh.
      expected: the reference.
      zero_gradients: the model has the leaves of `ZERO_GRADIENTS` (learned positions and biases; rotary positions turn
        a key's bias by the position, which gives it a gradient).
    """
    for name in ("initial", "final", "gradients"):
        odd = sorted(getattr(got, name).keys() ^ getattr(expected, name).keys())
        assert not odd, f"{name}: leaves that only one of the two has: {odd}"
    problems = _initial(got, expected)
    for name in ("losses", "grad_norms", "cross_entropies"):
        problems += _scalars(name, getattr(got, name), getattr(expected, name))
    problems += _gradients(got.gradients, expected.gradients, zero_gradients)
    biases = {path for path in expected.final if path.endswith("router_bias")}
    problems += [f"{path}: not the same bits" for path in biases if (got.final[path] != expected.final[path]).any()]
    problems += [f"loads: got {got.loads}, expected {expected.loads}"] if got.loads != expected.loads else []
    problems += _changes(got, expected, zero_gradients)
    assert not problems, "\n".join(problems)


def assert_gradients(got: Leaves, expected: Leaves) -> None:
    """Raises AssertionError with a line for each leaf, or layer of it, that differs by more than `GRADIENT_BOUND`."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    problems = _gradients(got, expected, zero_gradients=False)
    assert not problems, "\n".join(problems)


def slices(path: str, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, array) of each layer of a stacked leaf, or of the leaf as it is; float64."""
    if STACKED.search(path):
        yield from ((f"{path}[{index}]", layer) for index, layer in enumerate(leaf.astype(np.float64)))
    else:
        yield path, leaf.astype(np.float64)


def within(what: str, where: str, error: float, limit: float) -> bool:
    """Returns whether an error is at most its limit; False for NaN. `scripts/bench margins` records every call.

    Args:
      what: the compared quantity: losses, grad_norms, gradient or change.
      where: the step, or the path of the leaf with the layer's index.
      error: absolute or relative difference, >= 0.
      limit: the largest error that passes, in the same unit.
    """
    return bool(error <= limit)


def is_zero_gradient(path: str) -> bool:
    """Whether a leaf is named in `ZERO_GRADIENTS`."""
    return any(re.search(pattern, path) for pattern in ZERO_GRADIENTS)


def layer_norms(gradients: Leaves) -> np.ndarray:
    """Returns the norm of all stacked gradients of each layer, float64 [layers]."""
    stacked = [leaf for path, leaf in gradients.items() if STACKED.search(path)]
    squares = [np.sum(np.square(leaf, dtype=np.float64), axis=tuple(range(1, leaf.ndim))) for leaf in stacked]
    return np.sqrt(np.sum(squares, axis=0))


def _initial(got: Trained, expected: Trained) -> list[str]:
    differ = [path for path, leaf in expected.initial.items() if not np.array_equal(got.initial[path], leaf)]
    return [f"initial weights: {path}: not the same bits" for path in differ]


def _scalars(name: str, got: np.ndarray, expected: np.ndarray) -> list[str]:
    if got.shape != expected.shape:
        return [f"{name}: {got.shape[0]} steps, expected {expected.shape[0]}"]
    errors = np.abs(got - expected) / np.abs(expected)
    return [
        f"{name}: step {step + 1}: got {got[step]:.8g}, expected {expected[step]:.8g}, relative error {error:.1e}"
        for step, error in enumerate(errors)
        if not within(name, f"step {step + 1}", error, SCALAR_BOUND)
    ]


def _gradients(got: Leaves, expected: Leaves, zero_gradients: bool) -> list[str]:
    problems = []
    for path, leaf in expected.items():
        is_zero = zero_gradients and is_zero_gradient(path)
        scales = layer_norms(expected) if is_zero else [np.linalg.norm(part) for _, part in slices(path, leaf)]
        pairs = zip(slices(path, got[path]), slices(path, leaf), scales, strict=True)
        problems += [_line("gradient", where, a, b, scale, GRADIENT_BOUND) for (where, a), (_, b), scale in pairs]
    return [line for line in problems if line]


def _changes(got: Trained, expected: Trained, zero_gradients: bool) -> list[str]:
    problems = []
    for path, start in expected.initial.items():
        if zero_gradients and is_zero_gradient(path):
            continue
        change, right = got.final[path] - start, expected.final[path] - start
        for (where, a), (_, b) in zip(slices(path, change), slices(path, right), strict=True):
            problems.append(_line("change", where, a, b, np.linalg.norm(b), CHANGE_BOUND))
    return [line for line in problems if line]


def _line(what: str, where: str, got: np.ndarray, expected: np.ndarray, scale: float, bound: float) -> str:
    """Returns a line if the norm of the difference is over the bound; of zeros, equality is asked for."""
    if got.shape != expected.shape:
        return f"{what}: {where}: shape {got.shape}, expected {expected.shape}"
    error = float(np.linalg.norm(got - expected))
    if within(what, where, error, bound * scale):
        return ""
    return f"{what}: {where}: differs by {error:.1e}, which is {error / scale if scale else np.inf:.1e} of {scale:.1e}"
