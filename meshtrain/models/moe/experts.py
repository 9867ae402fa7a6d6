"""Mixture of experts: a layer's mlp as several, of which each token goes through a few (Shazeer et al. 2017).

b: sequences in a microbatch, T: tokens a sequence, D: embed dim, E: experts, e: those on one device, F: expert dim,
k: experts a token, t: tokens of the devices that share the experts, m: rows a block, R: rows of all blocks.

No token is left out, whatever the load: shapes are those of the worst case. One manual region holds what depends on
where tokens go. In it each device

1. gathers its weights over the axes that store them, and the tokens of the devices with which it shares the experts;
2. sorts the choices of its own experts into blocks of one expert each (`grouped_matmul.py`), and multiplies these rows;
3. adds up the results of each token, and sends each device the sums of its own tokens.

All gathers and sums have exact transposes, so that the backward pass needs no code of its own. Rows are read in another
order, with transposes that read as well: kernels would add rows up in any order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.models.layers import GATES, A, B, Mlp, X, factor_axes, normal, reduced, sums_spec, weight
from meshtrain.models.metrics import LEFT_OUT, Count, Load, Metric, Metrics
from meshtrain.models.moe import grouped_matmul, routing
from meshtrain.models.moe.routing import Routing, Tokens
from meshtrain.models.remat import EXPERT_DOWN, EXPERT_UP
from meshtrain.models.task import LayerSums, Params
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.stored import Names, axes_in, axes_of_dims
from meshtrain.sharding.trees import Arrays

UP, DOWN = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_mlp", "expert_embed")
MATRICES: Mapping[str, Names] = {"up": UP, "gate": UP, "down": DOWN}
LEAST_ROWS, MOST_ROWS = 16, 128  # of a block
LOAD, BIAS = "expert_load", "router_bias"  # the metric by which the bias moves


class Experts(nn.Module):
    """A router, experts with gated mlps, and shared experts that every token goes through: [b, T, D] -> [b, T, D].

    Attributes:
      output_std: of the initial weights of the last product.
    """

    options: DecoderOptions
    output_std: float
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, layer: jax.Array, tokens: Tokens | None) -> tuple[jax.Array, LayerSums]:
        """Sends each token through its experts.

        Args:
          x: [b, T, D].
          layer: int32 scalar, the layer's index in the whole model.
          tokens: for losses and counts; None: there are none, as in evaluation and generation, and no choice is left
            out: a result would depend on the mesh, and there is no step to skip.

        Returns:
          The results, and what the router adds to the loss and to metrics, see `Stages.repeated`.
        """
        o, place = self.options, self.placement
        router = weight(
            self, "router", (x.shape[-1], o.num_experts), ("embed", "router"), normal(o.init_std), place, jnp.float32
        )
        bias = None
        if o.router == "sigmoid":
            zeros = nn.initializers.zeros_init()
            bias = weight(self, BIAS, (o.num_experts,), ("router",), zeros, place, jnp.float32)
        logits = routing.logits(x, router)
        to = routing.routed(logits, bias, o.experts_per_token, o.router, o.router_scale)
        options = o if tokens is not None else dataclasses.replace(o, expert_room=0.0)
        result, left_out = self._of_experts(x, to, options)
        sums = None
        if tokens is not None:
            counts = routing.counts(to.chosen, tokens, o.num_experts)
            sums = _sums(o, to, counts, tokens, layer, left_out)
        if o.shared_experts:
            width = o.shared_experts * o.expert_dim
            shared = Mlp(width, o.activation, False, o.init_std, self.output_std, place, self.dtype, name="shared")
            result = result + shared(x)
        return result, sums

    def _of_experts(self, x: jax.Array, to: Routing, o: DecoderOptions) -> tuple[jax.Array, jax.Array | None]:
        """Returns what the experts add for each token [b, T, D], and how many choices found no room."""
        place = self.placement
        matrices = self._matrices(x.shape[-1])
        axes = {name: axes for name, (_, axes) in matrices.items()}
        arrays = {name: array for name, (array, _) in matrices.items()}
        # Shapes of initial weights are computed before JAX may query devices.
        platform = "cpu" if self.is_initializing() else place.platform
        plan = _Plan.of(place, x, arrays, axes, o, platform)
        inputs, outputs = (plan.x, plan.x, plan.x, dict(plan.stored)), (plan.result, PartitionSpec())
        run = place.on_shards(plan.on_device, inputs, outputs, is_opaque=True)
        result, left_out = run(x, to.chosen, to.gates, arrays)
        return result, left_out if o.expert_room else None

    def _matrices(self, embed_dim: int) -> dict[str, tuple[jax.Array, Names]]:
        """Returns the matrices of the experts and the factors of their adapters, cast, with their logical axes."""
        o = self.options
        sizes = {"experts": o.num_experts, "expert_embed": embed_dim, "expert_mlp": o.expert_dim}
        result: dict[str, tuple[jax.Array, Names]] = {}
        for name, axes in MATRICES.items():
            start = nn.with_logical_partitioning(normal(self.output_std if name == "down" else o.init_std), axes)
            shape = tuple(sizes[str(axis)] for axis in axes)
            value: Arrays = self.param(name, start, shape, jnp.float32)
            result[name] = value.astype(self.dtype), axes
            if self.has_variable("params", name + A):
                for end, of_factor in zip((A, B), factor_axes(axes), strict=True):
                    factor: Arrays = self.get_variable("params", name + end)
                    result[name + end] = factor.astype(self.dtype), of_factor
        return result


def _sums(
    options: DecoderOptions,
    to: Routing,
    counts: jax.Array,
    tokens: Tokens,
    layer: jax.Array,
    left_out: jax.Array | None,
) -> LayerSums:
    """Returns what one layer adds to the loss sum, and its metrics; losses are means over layers where logged.

    Args:
      options: the weights of the losses.
      to: where the tokens go.
      counts: float32 [b, E], the tokens of each sequence that chose each expert.
      tokens: their weights.
      layer: the layer's index.
      left_out: how many choices found no room; None: there is room for all.
    """
    balance, z = routing.balance(to, counts, tokens), routing.z_loss(to, tokens)
    row = jnp.zeros((options.num_layers, options.num_experts), jnp.float32).at[layer].set(jnp.sum(counts, axis=0))
    metrics: dict[str, Metric] = {
        "balance_loss": balance / options.num_layers,
        "z_loss": z / options.num_layers,
        "router_entropy": routing.entropy(to, tokens) / options.num_layers,
        LOAD: Load(jax.lax.stop_gradient(row)),
    }
    if left_out is not None:
        metrics[LEFT_OUT] = Count(left_out)
    return options.balance_weight * balance + options.z_weight * z, metrics


def with_moved_biases(rate: float, params: Params, metrics: Metrics) -> Params:
    """Returns a decoder's parameters with each router's bias moved against the load of its experts.

    It is the balance without an auxiliary loss (Wang et al. 2024; DeepSeek-V3, section 2.1.2): the bias of an expert
    that more tokens than the mean chose falls by the rate, and that of one that fewer chose rises by it.

    Args:
      rate: by which a bias moves in a step.
      params: float32, see `Task.after_update`.
      metrics: sums over the batch, with the load of each layer's experts.
    """
    load: Arrays = metrics[LOAD]
    experts = params["layers"]["experts"]
    moved = experts | {BIAS: experts[BIAS] + rate * routing.direction(load.counts)}
    return {**params, "layers": {**params["layers"], "experts": moved}}


def block_rows(num_choices: int, num_experts: int) -> int:
    """Returns m: about half of an expert's mean rows, so that padding stays below a half, within the kernels' bounds.

    >>> block_rows(64, 8), block_rows(1024, 8), block_rows(2**20, 64)
    (16, 64, 128)
    """
    mean = max(1, num_choices // num_experts)
    return min(MOST_ROWS, max(LEAST_ROWS, 2 ** (mean.bit_length() - 2) if mean > 1 else 1))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where the arrays of one layer's experts live, and what one device does with its shards.

    Attributes:
      x: the spec of tokens, of their choices and gates, and of the results before they are added up over `summed`.
      result: the spec of the results.
      stored: name -> spec of each matrix as it is stored, and `whole` as it computes.
      shared: the mesh axes over which experts are split: their devices have different tokens and share the experts.
      summed: the axes over which the inner dim of experts is split.
      options: the number of experts, the room and the activation function.
      platform: of the devices, which decides on the kernel of products.
    """

    x: PartitionSpec
    result: PartitionSpec
    stored: Mapping[str, PartitionSpec]
    whole: Mapping[str, PartitionSpec]
    shared: tuple[str, ...]
    summed: tuple[str, ...]
    options: DecoderOptions
    platform: str

    @classmethod
    def of(
        cls,
        place: Placement,
        x: jax.Array,
        matrices: Mapping[str, jax.Array],
        axes: Mapping[str, Names],
        o: DecoderOptions,
        platform: str,
    ) -> "_Plan":
        """Returns the plan for these tokens and matrices, without the axes that are manual here."""
        of_x = place.activation_spec(x.shape, X)
        shapes = {name: array.shape for name, array in matrices.items()}
        whole = {name: place.weight_spec(shape, axes[name]) for name, shape in shapes.items()}
        experts, _, inner = axes_of_dims(whole["up"], len(UP))
        assert set(experts) <= set(axes_in(of_x)), "experts are split over axes that split the batch"
        stored = {name: place.stored_spec(shape, axes[name]) for name, shape in shapes.items()}
        return cls(of_x, sums_spec(place, x.shape, inner), stored, whole, experts, inner, o, platform)

    def on_device(
        self, x: jax.Array, chosen: jax.Array, gates: jax.Array, matrices: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the results for one device's tokens, and how many choices of all devices found no room.

        Args:
          x: [b, T, D], one device's tokens.
          chosen: int32 [b, T, k].
          gates: float32 [b, T, k].
          matrices: one device's shards.
        """
        shape, o = x.shape, self.options
        matrices = {name: self._gathered(name, matrix) for name, matrix in matrices.items()}
        x, chosen, gates = (array.reshape(-1, array.shape[-1]) for array in (x, chosen, gates))
        chosen, gates = self._from_all(chosen), self._from_all(gates)
        num_here = matrices["up"].shape[0]
        first = jax.lax.axis_index(self.shared) * num_here if self.shared else 0
        local = chosen.reshape(-1) - first
        local = jnp.where((local >= 0) & (local < num_here), local, num_here)
        num_tokens, num_chosen = chosen.shape
        most, even = (f(num_tokens, num_chosen, num_here, o) for f in (room, even_load))
        found = placed(local.reshape(chosen.shape), num_here, int(most), block_rows(round(even), num_here))
        rows = spread(self._from_all(x), found.tokens, found.places)
        times = functools.partial(grouped_matmul.product, owners=found.owners, platform=self.platform)
        results = of_rows(o.activation, rows, matrices, times)
        gate = jnp.take(gates.reshape(-1), found.choices, mode="fill", fill_value=0)
        results = (results.astype(jnp.float32) * gate[:, None]).astype(rows.dtype)
        y = collected(results, found.tokens, found.places)
        if self.shared:
            y = jax.lax.psum_scatter(y, self.shared, scatter_dimension=0, tiled=True)
        y = reduced(y.reshape(shape), self.summed, self.result != self.x)
        over = axes_in(self.x)
        return y, jax.lax.psum(found.left_out, over) if over else found.left_out

    def _gathered(self, name: str, matrix: jax.Array) -> jax.Array:
        dims = zip(axes_of_dims(self.stored[name], 3), axes_of_dims(self.whole[name], 3), strict=True)
        for dim, (stored, whole) in enumerate(dims):
            assert stored[: len(whole)] == whole, "axes that split a weight for storage only are the inner ones"
            if over := stored[len(whole) :]:
                matrix = jax.lax.all_gather(matrix, over, axis=dim, tiled=True)
        return matrix

    def _from_all(self, array: jax.Array) -> jax.Array:
        return jax.lax.all_gather(array, self.shared, axis=0, tiled=True) if self.shared else array


def room(num_tokens: int, num_chosen: int, num_here: int, options: DecoderOptions) -> int:
    """Returns how many choices one device has room for: as many as there may be, or fewer with `expert_room`.

    Args:
      num_tokens: t.
      num_chosen: k.
      num_here: e.
      options: of the model.
    """
    most, even = num_tokens * min(num_chosen, num_here), even_load(num_tokens, num_chosen, num_here, options)
    return min(most, math.ceil(options.expert_room * even)) if options.expert_room else most


def even_load(num_tokens: int, num_chosen: int, num_here: int, options: DecoderOptions) -> float:
    """Returns how many choices one device has if each expert of the model is chosen as often; arguments as `room`."""
    return num_tokens * num_chosen * num_here / options.num_experts


class Placed(NamedTuple):
    """Which token stands in which row.

    Attributes:
      choices: int32 [R], the choice in each row, t k for padding.
      tokens: int32 [R], its token, t for padding.
      places: int32 [t, k], the row of each choice; R: it has none here.
      owners: int32 [R / m], see `grouped_matmul.Blocks`.
      left_out: float32 scalar, how many choices of the experts here found no room.
    """

    choices: jax.Array
    tokens: jax.Array
    places: jax.Array
    owners: jax.Array
    left_out: jax.Array


def placed(chosen: jax.Array, num_here: int, room: int, block_rows: int) -> Placed:
    """Returns the rows of the choices of the experts on one device.

    Args:
      chosen: int32 [t, k], from 0 to e; e is an expert of another device.
      num_here: e.
      room: how many choices there are rows for; the first ones get them.
      block_rows: m.
    """
    flat, num_choices = chosen.reshape(-1), chosen.size
    kept, left_out = jnp.arange(num_choices, dtype=jnp.int32), jnp.float32(0)
    if room < num_choices:
        elsewhere = flat == num_here
        kept = jnp.argsort(elsewhere, stable=True)[:room].astype(jnp.int32)
        left_out = jnp.maximum(jnp.sum(~elsewhere) - room, 0).astype(jnp.float32)
    arranged = grouped_matmul.arranged(flat[kept], num_here, block_rows)
    choices = jnp.take(kept, arranged.rows, mode="fill", fill_value=num_choices)
    num_rows = choices.size
    # Rows of padding write behind the choices.
    places = jnp.full(num_choices + 1, num_rows, jnp.int32).at[choices].set(jnp.arange(num_rows, dtype=jnp.int32))
    places = places[:-1].reshape(chosen.shape)
    return Placed(choices, choices // chosen.shape[1], places, arranged.owners, left_out)


def of_rows(
    activation: str, rows: jax.Array, matrices: Mapping[str, jax.Array], product: Callable[..., jax.Array]
) -> jax.Array:
    """Returns what the gated mlp of each row's expert makes of it, [R, D].

    Args:
      activation: one of `layers.GATES`.
      rows: [R, D].
      matrices: `up` and `gate` [e, D, F], `down` [e, F, D], and the factors of their adapters.
      product: (rows, a matrix of each expert) -> their products, see `grouped_matmul.product`.
    """

    def times(rows: jax.Array, name: str) -> jax.Array:
        result = product(rows, matrices[name])
        if name + A in matrices:
            result = result + product(product(rows, matrices[name + A]), matrices[name + B])
        return result

    up, gate = (checkpoint_name(times(rows, name), EXPERT_UP) for name in ("up", "gate"))
    return checkpoint_name(times(GATES[activation](gate) * up, "down"), EXPERT_DOWN)


# The next two are each other's transposes.
@jax.custom_vjp
def spread(x: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the activations of each row's token, [R, D], zeros for padding.

    Args:
      x: [t, D].
      tokens: int32 [R], the token of each row, t for padding.
      places: int32 [t, k], the row of each choice; R: it has none.
    """
    return jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collected(rows: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of each token's rows, [t, D], added up in float32.

    Args:
      rows: [R, D].
      tokens: as in `spread`.
      places: as in `spread`.
    """
    of_choices = jnp.take(rows, places, axis=0, mode="fill", fill_value=0)
    return jnp.sum(of_choices, axis=1, dtype=jnp.float32).astype(rows.dtype)


def _of_spread(indices: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return collected(cotangent, *indices), None, None


def _of_collected(indices: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return spread(cotangent, *indices), None, None


spread.defvjp(lambda x, *indices: (spread(x, *indices), indices), _of_spread)
collected.defvjp(lambda rows, *indices: (collected(rows, *indices), indices), _of_collected)
