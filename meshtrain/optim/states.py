"""Maps each array of an optimizer's state to the weight that it belongs to, and to its logical axes."""

import operator

import jax
import optax
from jax.tree_util import KeyPath

from meshtrain.sharding.param_sharding import Names, is_names
from meshtrain.sharding.trees import Arrays, NamesTree

# The field of `moments.StoredMoments` whose arrays have an element per block, not per element of a weight.
SCALES = jax.tree_util.GetAttrKey("scales")


def owners(state: Arrays, params: Arrays) -> list[KeyPath | None]:
    """Returns for each array of an optimizer's state the path of the weight that it belongs to, or None.

    An array belongs to the weight whose path is a suffix of the array's path.

    Args:
      state: the state of an optimizer.
      params: the weights that the optimizer updates.

    Returns:
      A path (a tuple of keys) or None for each array, in the order of `jax.tree.leaves(state)`.
    """
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    result = []
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        ends = (path[start:] for start in range(len(path) + 1))
        result.append(next((end for end in ends if end in paths), None))
    return result


def state_axes(
    transformation: optax.GradientTransformation, abstract_params: Arrays, logical_axes: NamesTree
) -> list[Names]:
    """Returns the logical axes of each array in an optimizer's state.

    If an array belongs to a parameter (`owners`), its dims are compared with the parameter's dims. A dim of the same
    size has the parameter's logical axis (moments). So has a dim of block scales (`moments.StoredMoments`), which has
    one element per block along the parameter's dim. Any other dim has None, such as the dims of size 1 in factored
    moments. All dims have None if an array belongs to no parameter (counts, constants) or differs from it in rank.

    Args:
      transformation: any optax optimizer.
      abstract_params: the parameters that the optimizer updates, or their `jax.ShapeDtypeStruct`s.
      logical_axes: a pytree with the structure of the parameters: a tuple of logical axes for each parameter.

    Returns:
      For each array a tuple with a logical axis or None per dim, in the order of
      `jax.tree.leaves(jax.eval_shape(transformation.init, abstract_params))`. The result is a list, not a pytree,
      because the containers of an optimizer's state are tuples like logical axes.
    """
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params)}
    axes = dict(jax.tree_util.tree_leaves_with_path(logical_axes, is_leaf=is_names))
    assert shapes.keys() == axes.keys(), "parameters and logical axes differ in structure"
    state = jax.eval_shape(transformation.init, abstract_params)
    of_arrays = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for owner, (path, leaf) in zip(owners(state, abstract_params), leaves, strict=True):
        if owner is None or len(shapes[owner]) != leaf.ndim:
            of_arrays.append((None,) * leaf.ndim)
        else:
            dims = zip(leaf.shape, shapes[owner], axes[owner], strict=True)
            counts = _counts if SCALES in path else operator.eq
            of_arrays.append(tuple(name if counts(size, full) else None for size, full, name in dims))
    return of_arrays


def _counts(size: int, full: int) -> bool:
    """Returns whether a state's dim may correspond to a parameter's dim: as a dim of moments or of block scales.

    Args:
      size: the size of the state's dim. Moments have the size `full`, block scales have a divisor of it above 1.
      full: the size of the parameter's dim.
    """
    return size == full or (size > 1 and full % size == 0)
