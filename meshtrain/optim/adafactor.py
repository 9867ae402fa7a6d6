"""Adafactor's direction (Shazeer and Stern 2018), computed for each stacked layer separately.

`optax.adafactor` factors over the two largest dims and takes root mean squares over complete arrays. If a weight stacks
layers, this would mix the layers. Here the logical axes determine which dims are factored and which are stacked.
"""

import functools
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshtrain.sharding.param_kinds import MatrixDims, matrix_dims, num_stacked
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.trees import Arrays, NamesTree, Tree

# Section 9 of the paper: epsilon_1, epsilon_2, d and the exponent c of the decay 1 - step^-c.
SQUARE_EPSILON = 1e-30
SMALLEST_SCALE = 1e-3
LARGEST_RMS = 1.0
DECAY_EXPONENT = 0.8
SMALLEST_FACTORED_DIM = 128

# A moment of one weight, float32; `MaskedNode` for a moment that the weight does not use.
Moment: TypeAlias = jax.Array | optax.MaskedNode


class FactoredState(NamedTuple):
    """The second moments: `row` and `column` of each factored matrix, `full` of each other weight.

    A field that a weight does not use has `MaskedNode` for this weight.

    Attributes:
      num_updates: int32 scalar, the number of updates done.
      row: a pytree of float32 moments, each a mean over the matrix's output dims, which have size 1.
      column: a pytree of float32 moments, each a mean over the matrix's reduction dims, which have size 1.
      full: a pytree of float32 moments in the shapes of the weights.
    """

    num_updates: jax.Array
    row: Arrays
    column: Arrays
    full: Arrays


class _Moments(NamedTuple):
    update: jax.Array | None
    row: Moment
    column: Moment
    full: Moment


def scale_by_adafactor(logical_axes: NamesTree) -> optax.GradientTransformation:
    """Returns an optimizer that computes Adafactor's direction, without momentum, from float32 gradients and weights.

    The direction of each weight is multiplied by the root mean square of the weight. Learning rate and sign are not
    applied.

    Args:
      logical_axes: a pytree with the structure of the parameters: a tuple of logical axes for each parameter.
    """

    def init(params: Arrays) -> FactoredState:
        moments = jax.tree.map(_zeros, params, logical_axes)
        return FactoredState(jnp.zeros((), jnp.int32), *(_part(moments, index) for index in (1, 2, 3)))

    def update(gradients: Arrays, state: FactoredState, params: Arrays = None) -> tuple[Arrays, FactoredState]:
        assert params is not None, "Adafactor scales by the parameters: pass them to update"
        decay = 1 - (state.num_updates + 1).astype(jnp.float32) ** -DECAY_EXPONENT

        direction = functools.partial(_direction, decay=decay)
        moments = jax.tree.map(direction, gradients, params, logical_axes, state.row, state.column, state.full)
        num_updates = optax.safe_increment(state.num_updates)
        return _part(moments, 0), FactoredState(num_updates, *(_part(moments, index) for index in (1, 2, 3)))

    return optax.GradientTransformation(init, update)


def _part(moments: Tree, index: int) -> Arrays:
    return jax.tree.map(lambda leaf: leaf[index], moments, is_leaf=lambda node: isinstance(node, _Moments))


def _factored_dims(shape: tuple[int, ...], axes: Names) -> MatrixDims | None:
    """Returns the row and column dims of a weight if it is a matrix large enough to be factored, else None."""
    dims = matrix_dims(axes)
    if dims is None or min(math.prod(shape[dim] for dim in part) for part in dims) < SMALLEST_FACTORED_DIM:
        return None
    return dims


def _zeros(weight: jax.Array, axes: Names) -> _Moments:
    nothing, dims = optax.MaskedNode(), _factored_dims(weight.shape, axes)
    if dims is None:
        return _Moments(None, nothing, nothing, jnp.zeros(weight.shape, jnp.float32))
    row, column = (
        jnp.zeros([1 if dim in gone else size for dim, size in enumerate(weight.shape)], jnp.float32)
        for gone in (dims.output, dims.reduction)
    )
    return _Moments(None, row, column, nothing)


def _direction(
    gradient: jax.Array, weight: jax.Array, axes: Names, row: Moment, column: Moment, full: Moment, *, decay: jax.Array
) -> _Moments:
    """Returns one weight's update and its new moments, float32.

    With g the gradient, R and C the row and column means of the moving average of g^2 + epsilon_1:

        v = R C / mean(R),  u = g / sqrt(v),  update = max(epsilon_2, rms(weight)) * u / max(1, rms(u) / d)

    A weight that is not factored has v = the moving average. epsilon_1, epsilon_2 and d are constants of this module.

    Args:
      gradient: the gradient of the weight.
      weight: the weight before the update.
      axes: the logical axes of the weight.
      row: the moment R; unused if the weight is not factored.
      column: the moment C; unused if the weight is not factored.
      full: the moving average in the weight's shape; unused if the weight is factored.
      decay: the decay of the moving average, a float32 scalar.
    """
    square = jnp.square(gradient) + SQUARE_EPSILON
    dims = _factored_dims(weight.shape, axes)
    if dims is None:
        full = decay * full + (1 - decay) * square
        update = gradient / jnp.sqrt(full)
    else:
        row = decay * row + (1 - decay) * jnp.mean(square, dims.output, keepdims=True)
        column = decay * column + (1 - decay) * jnp.mean(square, dims.reduction, keepdims=True)
        # Two roots: a product under one root could underflow if gradients are zero, and give 0 / 0.
        update = gradient / jnp.sqrt(row / jnp.mean(row, dims.reduction, keepdims=True)) / jnp.sqrt(column)
    own = tuple(range(num_stacked(axes), weight.ndim))
    update = update / jnp.maximum(1, _rms(update, own) / LARGEST_RMS)
    return _Moments(update * jnp.maximum(_rms(weight, own), SMALLEST_SCALE), row, column, full)


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), dims, keepdims=True))
