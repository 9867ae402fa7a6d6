"""A model's weights as shapes and logical axes, before any array and any mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax.core import meta

from meshtrain.sharding.stored import Names
from meshtrain.sharding.trees import Arrays, NamesTree


def named_params(init: Callable[[jax.Array], Arrays], *, on_one_device: bool = False) -> tuple[Arrays, NamesTree]:
    """Returns abstract parameters in layer order, and their logical axes; touches no device.

    JAX caches what it traces by the function: for the same `init` the model is traced once.

    Args:
      init: rng -> parameters; a leaf may be boxed with its logical axes.
      on_one_device: a leaf without a box then has a None for each dim; otherwise it has no axes (None).
    """
    boxed = jax.eval_shape(init, _abstract_key())
    is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)  # noqa: E731

    def names(leaf: Any) -> Names | None:
        if is_box(leaf):
            return tuple(leaf.names)
        return (None,) * leaf.ndim if on_one_device else None

    return meta.unbox(boxed), jax.tree.map(names, boxed, is_leaf=is_box)


def num_parameters(init: Callable[[jax.Array], Arrays], sizes: dict[str, int]) -> int:
    """Returns the number of parameters of a model whose leaves are all boxed; touches no device.

    Args:
      init: rng -> parameters, each boxed with its logical axes.
      sizes: logical axis -> the size to count with, for dims that are stored with padding (`vocab`).
    """
    params, axes = named_params(init)

    def count(leaf: jax.ShapeDtypeStruct, names: Names) -> int:
        dims = zip(leaf.shape, names, strict=True)
        return math.prod(sizes[name] if name in sizes else size for size, name in dims)

    return sum(jax.tree.leaves(jax.tree.map(count, params, axes)))


@functools.cache
def _abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))
