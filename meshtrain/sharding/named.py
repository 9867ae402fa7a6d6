"""Weights with logical axes: the box `Named`, and the reader of this box and of Flax's boxes.

Flax is not imported: a box of Linen (`nn.Partitioned`, `nn.LogicallyPartitioned`) has the method `unbox`, and a
variable of NNX has the method `get_metadata`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshtrain.sharding.trees import Arrays, Leaf, Tree

# Keys of an NNX variable's metadata that may contain logical axes. Flax's own function `nnx.with_partitioning` writes
# the second key.
_METADATA_KEYS = ("axes", "out_sharding")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Named:
    """A weight with a logical axis for each dim, as `Task.init` returns it; a pytree with the weight as its only leaf.

    >>> import jax.numpy as jnp
    >>> Named(jnp.zeros((64, 256)), ("embed", "mlp")).names
    ('embed', 'mlp')

    Attributes:
      value: the weight, an array or a `jax.ShapeDtypeStruct`.
      names: a logical axis for each dim of `value`, which the rules map to mesh axes; None: the dim is not split. A
        list or a `PartitionSpec` is converted to a tuple. The reader of the parameters checks the number of names and
        the names, because its error lines state the weight's path.
    """

    value: Any
    names: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

    def __init__(self, value: Any, names: Sequence[str | None]) -> None:
        """Boxes `value` with the logical axes `names`."""
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "names", _as_tuple(names))


def is_boxed(leaf: Tree) -> bool:
    """Returns whether a node of a pytree is a box: a `Named`, a box of Linen, or a variable of NNX."""
    return isinstance(leaf, Named) or hasattr(leaf, "unbox") or hasattr(leaf, "get_metadata")


def value_and_names(box: Leaf) -> tuple[Leaf, Any]:
    """Returns the array in a box, and the logical axes of the array as the box states them.

    The logical axes are not checked: they are None if the box states none, and may be any other value by mistake. A
    list or a `PartitionSpec` is converted to a tuple.

    Args:
      box: a leaf for which `is_boxed` is true.
    """
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        stated = [metadata[key] for key in _METADATA_KEYS if key in metadata]
        return box.get_value(), _as_tuple(next((names for names in stated if names is not None), None))
    # The method `unbox` of Linen's boxes may constrain the value by rules or by a mesh of its own.
    value = box.value if hasattr(box, "value") else box.unbox()
    return value, _as_tuple(getattr(box, "names", None))


def unbox(params: Arrays) -> Arrays:
    """Returns parameters with each box replaced by its array; arrays without a box stay unchanged."""
    return jax.tree.map(lambda leaf: value_and_names(leaf)[0] if is_boxed(leaf) else leaf, params, is_leaf=is_boxed)


def _as_tuple(names: Any) -> Any:
    return tuple(names) if isinstance(names, list | PartitionSpec) else names
