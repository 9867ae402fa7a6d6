"""Determines from the logical axes of each weight whether it decays and whether it is a matrix.

Logical axes are a tuple for each weight, a name or None for each dim, such as ("layers", "embed", "heads", "head_dim").
Leading dims whose names are in `STACKED` stack complete weights, so each expert has separate matrices; all other dims
belong to one weight. The last column tells which weights Muon updates by default.

    weight                           logical axes                               matrix   decays   muon
    query, key, value                layers, embed, heads, head_dim             yes      yes      yes
    attention's output               layers, heads, head_dim, embed             yes      yes      yes
    latents of attention             layers, embed, latent                      yes      yes      yes
    query, key, value of latents     layers, from_latent, heads, head_dim       yes      yes      yes
    mlp                              layers, embed, mlp                         yes      yes      yes
    token table, head                vocab, embed                               yes      yes      no
    learned positions                positions, embed                           yes      yes      no
    biases                           layers, heads, head_dim / layers, mlp      no       no       no
    norms                            layers, norm                               no       no       no
    experts                          layers, experts, expert_embed, expert_mlp  yes      yes      yes, one each
    router                           layers, embed, router                      yes      yes      no
    router's bias                    layers, router                             no       no       no

Weight decay applies to tables (embeddings) as in GPT-2 and GPT-3: Brown et al. 2020 mention no exception. With tied
embeddings the token table is also the head.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from meshtrain.sharding import param_sharding
from meshtrain.sharding.param_sharding import ROUTER, Names, is_names
from meshtrain.sharding.rules import ADAPTER_HEAD_DIM
from meshtrain.sharding.trees import Masks, NamesTree, Tree

STACKED = (*param_sharding.STACKED, "experts")
NORM = "norm"
# Each row belongs to one token, position or expert: updates with equal singular values would mix independent rows.
TABLES = ("vocab", "positions", "router")
EMBEDS = ("embed", "expert_embed", "from_latent")
HEAD_DIMS = ("head_dim", ADAPTER_HEAD_DIM)


class MatrixDims(NamedTuple):
    """The dims of a weight as the matrix W in x W = y. Dims in neither field stack several matrices.

    Attributes:
      reduction: dims that the product sums over, the rows of W.
      output: dims of y, the columns of W.
    """

    reduction: tuple[int, ...]
    output: tuple[int, ...]


def map_axes(function: Callable[[Names], Tree], logical_axes: NamesTree) -> Tree:
    """Applies a function to the logical axes of each weight; returns a pytree with its results."""
    return jax.tree.map(function, logical_axes, is_leaf=is_names)


def num_stacked(axes: Names) -> int:
    """Returns the number of leading dims that stack complete weights.

    >>> num_stacked(("layers", "embed", "mlp"))
    1
    """
    for dim, name in enumerate(axes):
        if name not in STACKED:
            return dim
    return len(axes)


def matrix_dims(axes: Names) -> MatrixDims | None:
    """Returns which dims of a weight are rows and columns of a matrix, or None for a norm, a bias or a scalar.

    Heads and a head_dim directly after them count as one feature dim, so a bias of (heads, head_dim) is no matrix. With
    more than two feature dims, a leading `embed` is the only reduced dim (a fused query, key and value). Otherwise the
    last dim is the output and all others are reduced (a convolution: height, width, in, out).

    >>> matrix_dims(("layers", "embed", "heads", "head_dim"))
    MatrixDims(reduction=(1,), output=(2, 3))
    """
    features: list[tuple[int, ...]] = []
    for dim in range(num_stacked(axes), len(axes)):
        if axes[dim] in HEAD_DIMS and features:
            features[-1] += (dim,)
        else:
            features.append((dim,))
    if len(features) < 2 or NORM in axes:
        return None
    split = 1 if axes[features[0][0]] in EMBEDS else len(features) - 1
    return MatrixDims(sum(features[:split], ()), sum(features[split:], ()))


def decays(logical_axes: NamesTree) -> Masks:
    """Returns a pytree of bool: True for each weight that weight decay applies to, which are the matrices.

    >>> decays({"kernel": ("embed", "mlp"), "bias": ("mlp",)})
    {'bias': False, 'kernel': True}
    """
    return map_axes(lambda axes: matrix_dims(axes) is not None, logical_axes)


def is_router_bias(axes: Names) -> bool:
    """Returns whether a weight is a router's bias, which has no gradient because `Task.after_update` changes it.

    >>> is_router_bias(("layers", "router")), is_router_bias(("layers", "embed", "router"))
    (True, False)
    """
    return axes[num_stacked(axes) :] == (ROUTER,)


def is_hidden_matrix(axes: Names) -> bool:
    """Returns whether a weight is a matrix other than a table (tokens, positions), the head or a router."""
    return matrix_dims(axes) is not None and not any(name in TABLES for name in axes)
