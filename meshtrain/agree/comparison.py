"""Differences between two sides, and the bound of each difference.

A bound follows from the yardstick: the difference that rounding causes by itself. The yardstick of a figure is the same
figure, computed between the reference and the reference with nudged weights (`sides.nudged`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.agree.sides import Leaves, Side

Key = tuple[str, str]  # (kind of the compared quantity, an element of KINDS; its place: a path, a step or a name)

BATCH, INITIAL, COUNT, LOSS, METRIC, GRADIENT = "batches", "initial weights", "counts", "loss", "metrics", "gradient"
STEP_LOSS, NORM, CHANGE, EVALUATION = "loss of steps", "gradient norm", "change of weights", "evaluation"
KINDS = (BATCH, INITIAL, COUNT, LOSS, METRIC, GRADIENT, STEP_LOSS, NORM, CHANGE, EVALUATION)  # in the order of a run
EXACT = (BATCH, INITIAL)  # the same bits on every mesh

FACTOR = 16  # by which a difference may exceed its yardstick: reductions over devices round in another order
FLOOR = 1e-6  # smallest bound in float32: sums over a batch have rounding errors that nudged weights do not show
CHANGE_FLOOR = 1e-4  # Adam divides a gradient by its own size, which enlarges the rounding of small gradients
# A leaf with a larger yardstick has a gradient that is zero in exact arithmetic: its numbers are rounding errors.
ZERO_YARDSTICK = 1e-3
ZERO_BOUND = 5e-6  # largest difference of this leaf, relative to the gradient norm of its layer
_LARGEST_ZERO_YARDSTICK = 0.3  # in narrow dtypes, whose yardsticks are larger
STACKED = re.compile(r"(^|/)layers/(?!\d+(/|$))")  # not the layers of a list: layers/0/kernel


class Figure(NamedTuple):
    """A difference between two sides.

    Attributes:
      error: the norm of the difference, >= 0; inf for NaN. Quantities in EXACT with other bits have an error above 0.
      scale: the norm of the expected value.
      layer: the norm of all gradients of the leaf's layer; 0 for quantities other than gradients.
    """

    error: float
    scale: float
    layer: float = 0.0

    @property
    def relative(self) -> float:
        """The error relative to the scale; 0 for an error of 0, inf for a scale of 0."""
        return 0.0 if self.error == 0 else self.error / self.scale if self.scale else np.inf


class Excess(NamedTuple):
    """A difference above its bound: the place, the relative difference, the yardstick, and the bound."""

    key: Key
    value: float
    yardstick: float
    bound: float


def figures(got: Side, expected: Side) -> dict[Key, Figure]:
    """Returns the difference of each compared quantity, in the order of a run.

    Gradients and changes of stacked layers are compared layer by layer, because one layer's gradient may be small
    compared with another layer's.

    Args:
      got: a side.
      expected: the reference.
    """
    result = dict[Key, Figure]()
    for kind, here, there in ((BATCH, got.batches, expected.batches), (INITIAL, got.initial, expected.initial)):
        for path in sorted({*here, *there}):
            result[kind, path] = _of_bits(path, here, there)
            if path in got.unequal_shards:
                result[kind, path] = Figure(np.inf, 0.0)
    for name in sorted({*got.sums, *expected.sums}):
        result |= _of_sum(name, got.sums, expected.sums)
    norms = layer_norms(expected.gradients)
    for path, leaf in expected.gradients.items():
        for where, one, right in _paired(path, got.gradients, leaf):
            result[GRADIENT, where] = _figure(one, right, norms[_layer_of(where)])
    for kind, values, others in ((STEP_LOSS, got.losses, expected.losses), (NORM, got.norms, expected.norms)):
        for step, (value, other) in enumerate(zip(values, others, strict=True), 1):
            result[kind, f"step {step}"] = _figure(np.asarray(value), np.asarray(other))
    for path, leaf in expected.final.items():
        change = {path: got.final[path] - got.initial[path]} if path in got.final else {}
        for where, one, right in _paired(path, change, leaf - expected.initial[path]):
            result[CHANGE, where] = _figure(one, right)
        if path in got.unequal_replicas:
            result[CHANGE, f"{path}, other bits on some devices"] = Figure(np.inf, 0.0)
    return dict(sorted(result.items(), key=lambda item: KINDS.index(item[0][0])))


def beyond(
    found: Mapping[Key, Figure], rounding: Mapping[Key, Figure], unit: float = 1.0, *, exact: bool = True
) -> list[Excess]:
    """Returns the differences above their bounds, in the order of a run; [] if the sides agree.

    Args:
      found: the result of `figures` for a side and the reference.
      rounding: the result of `figures` for nudged weights and the reference.
      unit: the unit in the last place of the compute dtype, relative to float32; the bounds are multiplied by it.
      exact: whether initial weights must have the same bits. Another JAX or platform may round random numbers in
        another way.
    """
    result = []
    zeros = zero_gradients(rounding, unit)
    for key, figure in found.items():
        yardstick = rounding[key].relative if key in rounding else 0.0
        kind, where = key
        value, bound = figure.relative, max(FACTOR * yardstick, FLOOR * unit)
        if kind == BATCH or (kind == INITIAL and exact):
            value, bound = figure.error, 0.0
        elif kind == INITIAL:
            bound = FLOOR * unit
        elif kind == COUNT:
            bound = FACTOR * yardstick  # 0, unless rounding decides between two experts of a token
        elif kind == GRADIENT and (where in zeros or figure.scale == 0):
            value, bound = Figure(figure.error, figure.layer).relative, ZERO_BOUND * unit
        elif kind == CHANGE:
            if where in zeros:
                continue  # the optimizer makes steps of full size from rounding errors
            bound = max(FACTOR * yardstick, CHANGE_FLOOR * unit)
        if not value <= bound:
            result.append(Excess(key, value, yardstick, bound))
    return result


def zero_gradients(rounding: Mapping[Key, Figure], unit: float = 1.0) -> list[str]:
    """Returns the places of gradients that are zero in exact arithmetic, by their yardstick.

    Args:
      rounding: the result of `figures` for nudged weights and the reference.
      unit: the unit in the last place of the compute dtype, relative to float32.
    """
    limit = min(ZERO_YARDSTICK * unit, _LARGEST_ZERO_YARDSTICK)
    return [where for (kind, where), figure in rounding.items() if kind == GRADIENT and figure.relative > limit]


def worst(found: Mapping[Key, Figure], kind: str, without: Sequence[str]) -> Key | None:
    """Returns the key of the largest relative difference of a kind; None if nothing of this kind was compared.

    Args:
      found: the result of `figures`.
      kind: an element of KINDS.
      without: places to leave out, such as gradients that are zero in exact arithmetic.
    """
    keys = [key for key in found if key[0] == kind and key[1] not in without]
    return max(keys, key=lambda key: found[key].relative, default=None)


def layer_norms(gradients: Leaves) -> dict[str, float]:
    """Returns the gradient norm of each layer: index of the layer in brackets -> norm; '' for all other leaves."""
    squares = {"": 0.0}
    for path, leaf in gradients.items():
        for where, part in _slices(path, leaf):
            layer = _layer_of(where)
            total = squares[layer] if layer in squares else 0.0
            squares[layer] = total + float(np.sum(np.square(part)))
    return {layer: float(np.sqrt(total)) for layer, total in squares.items()}


def _of_bits(path: str, got: Leaves, expected: Leaves) -> Figure:
    """Returns the figure of an array that is compared bit by bit; other bits are an error above 0."""
    if path not in got or path not in expected or got[path].shape != expected[path].shape:
        return Figure(np.inf, 0.0)
    figure = _figure(got[path], expected[path])
    same = got[path].dtype == expected[path].dtype and got[path].tobytes() == expected[path].tobytes()
    return figure._replace(error=0.0 if same else max(figure.error, float(np.finfo(np.float32).tiny)))


def _of_sum(name: str, got: Leaves, expected: Leaves) -> dict[Key, Figure]:
    """Returns the figure of the loss, weight or a metric; a sum that only one side has differs."""
    kind, _, rest = name.partition("/")
    if name not in got or name not in expected or got[name].shape != expected[name].shape:
        return {(kind, rest): Figure(np.inf, 0.0)}
    figure = _figure(got[name], expected[name])
    is_count = kind != LOSS and np.array_equal(expected[name], np.round(expected[name]))
    if is_count:
        return {(COUNT, rest if kind == COUNT else f"{kind}: {rest}"): figure}
    return {(kind, rest): figure}


def _layer_of(where: str) -> str:
    return where[where.rindex("[") :] if STACKED.search(where) else ""


def _slices(path: str, leaf: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path with the layer's index, array) for each layer of a stacked leaf, else (path, array); float64."""
    if STACKED.search(path) and leaf.ndim:
        yield from ((f"{path}[{index}]", layer.astype(np.float64)) for index, layer in enumerate(leaf))
    else:
        yield path, leaf.astype(np.float64)


def _paired(path: str, got: Leaves, expected: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (path, array of the side, expected array) for each layer; NaN for an array that the side lacks."""
    fits = path in got and got[path].shape == expected.shape
    here = got[path] if fits else np.full(expected.shape, np.nan)
    for (where, one), (_, other) in zip(_slices(path, here), _slices(path, expected), strict=True):
        yield where, one, other


def _figure(got: np.ndarray, expected: np.ndarray, layer: float = 0.0) -> Figure:
    error = float(np.linalg.norm(np.asarray(got, np.float64) - np.asarray(expected, np.float64)))
    return Figure(error if np.isfinite(error) else np.inf, float(np.linalg.norm(expected)), layer)
