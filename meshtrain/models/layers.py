"""The parts of a transformer layer. Each weight is declared with its name, shape, logical axes and initializer.

b: sequences in a microbatch, T: tokens per sequence, D: embed dim, F: mlp dim, H: head dim.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.models.fp8 import product
from meshtrain.models.remat import PRODUCT, UP
from meshtrain.sharding.param_kinds import EMBEDS, matrix_dims, num_stacked
from meshtrain.sharding.param_sharding import Names, axes_of_dims
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import ADAPTER_EXPERT_MLP, ADAPTER_HEAD_DIM, ADAPTER_MLP
from meshtrain.sharding.saved import mark
from meshtrain.sharding.trainable import ADAPTER_ENDS
from meshtrain.sharding.trees import Arrays

Initializer = Callable[..., jax.Array]

A, B = ADAPTER_ENDS
X, RESIDUAL = ("batch", "sequence", None), ("batch", "residual_sequence", None)
# A matrix is stored in shards of its dim `embed`, which only one factor of its adapter has. The other factor is stored
# in shards of its last dim.
STORED_BY = {
    "head_dim": ADAPTER_HEAD_DIM, "mlp": ADAPTER_MLP, "expert_mlp": ADAPTER_EXPERT_MLP, "latent": "from_latent",
}  # fmt: skip


def weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    initializer: Initializer,
    placement: Placement,
    dtype: DTypeLike,
) -> jax.Array:
    """Declares a float32 parameter and returns it cast to `dtype` and gathered.

    The cast comes first so that the all-gather of a sharded weight moves the smaller dtype.

    Args:
      module: the Linen module that owns the parameter.
      name: name of the parameter in its module.
      shape: global shape of the weight.
      axes: a logical axis or None for each dim.
      initializer: (key, shape, dtype) -> array.
      placement: determines the sharding of the gathered weight.
      dtype: compute dtype, the dtype of the result.
    """
    value: Arrays = module.param(name, nn.with_logical_partitioning(initializer, axes), shape, jnp.float32)
    return placement.weight(value.astype(dtype), axes)


def multiply(
    module: nn.Module, name: str, x: jax.Array, matrix: jax.Array, axes: Names, placement: Placement
) -> jax.Array:
    """Returns the product of `x` with a matrix, [b, T, ...], plus (x A) B if the module has an adapter for the matrix.

    A and B are the factors of the low-rank adapter (Hu et al. 2021). B already includes the factor alpha / r, see
    `lora.scale_adapters`. The sum of the matrix and A B is not computed, because the sum and its gradient would each
    take the memory of the matrix.

    Args:
      module: the Linen module that owns the matrix.
      name: name of the matrix in its module; the names of A and B start with it.
      x: activations [b, T, ...]; the product sums over all dims after T.
      matrix: the gathered matrix in the dtype of `x`; its first dims are the summed dims.
      axes: logical axes of the matrix.
      placement: determines the shardings of the gathered A and B.
    """
    result, dtype = mark(product(x, matrix, placement), PRODUCT), matrix.dtype
    if not module.has_variable("params", name + A):
        return result
    of_a, of_b = factor_axes(axes)
    a = placement.weight(module.get_variable("params", name + A).astype(dtype), of_a)
    b = placement.weight(module.get_variable("params", name + B).astype(dtype), of_b)
    low = mark(placement.activation(jnp.tensordot(x, a, axes=a.ndim - 1), X), PRODUCT)
    return result + mark(jnp.tensordot(low, b, axes=1), PRODUCT)


def with_adapter(module: nn.Module, name: str, matrix: jax.Array) -> jax.Array:
    """Returns the matrix plus the product A B of its adapter, or the unchanged matrix if it has no adapter.

    Products that do not call `multiply` need this sum.

    Args:
      module: the Linen module that owns the matrix.
      name: name of the matrix in its module; the names of A and B start with it.
      matrix: the gathered matrix in its compute dtype.
    """
    if not module.has_variable("params", name + A):
        return matrix
    a: jax.Array = module.get_variable("params", name + A)
    b: jax.Array = module.get_variable("params", name + B)
    return matrix + jnp.tensordot(a, b, axes=1).astype(matrix.dtype)


def factor_axes(axes: Names) -> tuple[Names, Names]:
    """Returns the logical axes of the adapter factors A and B of a matrix with the logical axes `axes`.

    The rank dim (last dim of A, first dim of B after stacked dims) has no logical axis.

    >>> factor_axes(("layers", "embed", "mlp"))
    (('layers', 'embed', None), ('layers', None, 'adapter_mlp'))
    >>> factor_axes(("experts", "expert_mlp", "expert_embed"))
    (('experts', 'adapter_expert_mlp', None), ('experts', None, 'expert_embed'))
    """
    dims, stack = matrix_dims(axes), axes[: num_stacked(axes)]
    assert dims is not None, "only matrices have adapters"

    def of_factor(part: tuple[int, ...]) -> Names:
        *others, last = (axes[dim] for dim in part)
        assert last is not None, "a dim of a matrix without a logical axis"
        return (*others, last if {*others, last} & {*EMBEDS} else STORED_BY[last])

    return (*stack, *of_factor(dims.reduction), None), (*stack, None, *of_factor(dims.output))


def _gelu(x: jax.Array) -> jax.Array:
    """Returns GELU(x), computed by the tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gpt-oss's gated product (OpenAI 2025): gate sigmoid(s gate) (up + 1), after both arguments are clamped.

    `gate` is at most `CLAMP`, `up` is between -`CLAMP` and `CLAMP`, and s is `CLAMPED_SLOPE`.
    """
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)


CLAMP, CLAMPED_SLOPE = 7.0, 1.702
# Gated products of mlps (Shazeer 2020): functions of the gate and the gated values.
GATES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: _gelu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}


def gather_sequence(x: jax.Array, placement: Placement) -> jax.Array:
    """Returns `x`, [b, T, D], gathered along the sequence dim, which sequence parallelism shards between matmuls.

    The first constraint keeps `x` sharded until the gather. Otherwise the partitioner may gather the array from which
    `x` was cast, which has more bytes.
    """
    return placement.activation(
        placement.activation(x, ("batch", "residual_sequence", "embed")), ("batch", "sequence", "embed")
    )


def sums_spec(place: Placement, shape: tuple[int, ...], over: tuple[str, ...]) -> PartitionSpec:
    """Returns the partition spec of activations [b, T, D] after they are summed over mesh axes.

    With sequence parallelism the sum is scattered: the sequence dim of the result is split over these axes.

    Args:
      place: determines the shardings of activations.
      shape: global shape [b, T, D].
      over: the mesh axes of the sum; empty: no sum.
    """
    tokens, residual = place.activation_spec(shape, X), place.activation_spec(shape, RESIDUAL)
    scatters = bool(over) and axes_of_dims(residual, 3)[1] == (*axes_of_dims(tokens, 3)[1], *over)
    return residual if scatters else tokens


def reduce_rows(x: jax.Array, over: tuple[str, ...], scatters: bool) -> jax.Array:
    """Returns `x`, [b, T, D], summed over the manual mesh axes `over`; unchanged if `over` is empty.

    If `scatters` is true, the sum is a reduce-scatter: each of the n devices along these axes gets a part of the
    sequence, [b, T / n, D].
    """
    if scatters:
        return jax.lax.psum_scatter(x, over, scatter_dimension=1, tiled=True)
    return jax.lax.psum(x, over) if over else x


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dim or dims, in float32.

    [b, T, D] -> [b, T, D], or [b, T, heads, H] -> [b, T, heads, H], in the dtype of the input.

    Attributes:
      kind: `rmsnorm` or `layernorm`.
      epsilon: number that is added to the mean square before the root.
      bias: whether a learned bias is added.
      placement: determines the sharding of the scale and the bias.
      centered: whether to multiply by 1 + scale instead of the scale; scales then start at 0.
      axes: logical axes of the scale, one for each normalized dim.
    """

    kind: str
    epsilon: float
    bias: bool
    placement: Placement
    centered: bool = False
    axes: tuple[str, ...] = ("norm",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x` with each position, or each head of each position, normalized."""
        dims = tuple(range(-len(self.axes), 0))
        shape, y = x.shape[dims[0] :], x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - jnp.mean(y, axis=dims, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=dims, keepdims=True) + self.epsilon)
        start = nn.initializers.zeros if self.centered else nn.initializers.ones
        scale = weight(self, "scale", shape, self.axes, start, self.placement, jnp.float32)
        y = y * (1.0 + scale if self.centered else scale)
        if self.bias:
            y = y + weight(self, "bias", shape, self.axes, nn.initializers.zeros, self.placement, jnp.float32)
        return y.astype(x.dtype)


class Mlp(nn.Module):
    """The mlp of a layer: up-projection, activation function, down-projection; [b, T, D] -> [b, T, D].

    The inner activations [b, T, F] are sharded over the tensor axis along F: the up-projection is column parallel, the
    down-projection row parallel. The activation function is ReLU, GELU (Hendrycks and Gimpel 2016), or gated (SwiGLU
    and GEGLU of Shazeer 2020).

    Attributes:
      mlp_dim: inner width F.
      activation: `relu`, `gelu`, or a gated function in `GATES`.
      bias: whether the up- and down-projection have biases.
      init_std: standard deviation of initial up and gate weights.
      output_std: standard deviation of initial down weights.
      placement: determines the shardings of weights and activations.
      dtype: compute dtype of weights.
      gate_bias: whether the gate projection has a bias.
    """

    mlp_dim: int
    activation: str
    bias: bool
    init_std: float
    output_std: float
    placement: Placement
    dtype: DTypeLike
    gate_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the mlp's output for each position of `x`, [b, T, D]."""
        embed_dim = x.shape[-1]
        inner, outer = normal(self.init_std), normal(self.output_std)
        zeros, place, dtype = nn.initializers.zeros, self.placement, self.dtype
        up = weight(self, "up", (embed_dim, self.mlp_dim), ("embed", "mlp"), inner, place, dtype)
        down = weight(self, "down", (self.mlp_dim, embed_dim), ("mlp", "embed"), outer, place, dtype)
        hidden = multiply(self, "up", x, up, ("embed", "mlp"), place)
        if self.bias:
            hidden = hidden + weight(self, "up_bias", (self.mlp_dim,), ("mlp",), zeros, place, dtype)
        hidden = mark(hidden, UP)
        if self.activation in GATES:
            gate = weight(self, "gate", (embed_dim, self.mlp_dim), ("embed", "mlp"), inner, place, dtype)
            opened = multiply(self, "gate", x, gate, ("embed", "mlp"), place)
            if self.gate_bias:
                opened = opened + weight(self, "gate_bias", (self.mlp_dim,), ("mlp",), zeros, place, dtype)
            hidden = GATES[self.activation](mark(opened, UP), hidden)
        elif self.activation == "relu":
            hidden = jax.nn.relu(hidden)
        else:
            hidden = _gelu(hidden)
        hidden = place.activation(hidden, ("batch", "sequence", "mlp"))
        result = multiply(self, "down", hidden, down, ("mlp", "embed"), place)
        result = place.cotangent(result, ("batch", "sequence", "embed"))
        if self.bias:
            result = result + weight(self, "down_bias", (embed_dim,), ("norm",), zeros, place, dtype)
        return result


def cap_values(x: jax.Array, cap: float) -> jax.Array:
    """Returns cap tanh(x / cap), computed in float32, in the dtype of `x`; returns `x` if the cap is 0."""
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype) if cap else x


def normal(std: float) -> Initializer:
    """Returns an initializer that draws from a normal distribution with mean 0 and standard deviation `std`."""
    return nn.initializers.normal(std)


def dropout(x: jax.Array, rate: float, keys: jax.Array, site: int) -> jax.Array:
    """Returns `x` with elements set to zero with probability `rate`, and other elements divided by 1 - rate.

    Args:
      x: activations [b, ...].
      rate: probability of zero, below 1; at 0 `x` is returned unchanged.
      keys: a random key for each sequence, [b], with step, sequence and layer already folded in.
      site: number that distinguishes the dropouts of one layer, folded into the keys.
    """
    if rate == 0.0:
        return x

    def mask(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x.shape[1:])

    return jnp.where(jax.vmap(mask)(keys), x / (1.0 - rate), 0.0).astype(x.dtype)
