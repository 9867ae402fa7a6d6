"""Mixture of experts: a layer has several mlps, and each token is processed by a few of them (Shazeer et al. 2017).

b: sequences in a microbatch, T: tokens per sequence, n: tokens of a turn, D: embed dim, E: experts, e: experts on one
device, F: expert dim, k: experts per token, P: parts of the worst load, N: devices with different tokens.

No token is dropped, whatever the load. One manual region contains everything that depends on the routing. In it each
device

1. gathers its weights over the axes that store them, and the tokens of the devices with which it shares the experts;
2. sorts the choices of its own experts into blocks of one expert each (`grouped_matmul.py`), and multiplies these rows,
one part of them at a time (`chunks.py`);
3. sums the results of each token, and sends each device the sums of its own tokens.

If there are enough rows, tokens are processed in two halves (`chunks.num_turns`), so that communication of one half
overlaps products of the other.

All gathers and sums have exact transposes, so the backward pass needs no separate code.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.models.layers import A, B, Mlp, X, factor_axes, normal, reduce_rows, sums_spec, weight
from meshtrain.models.metrics import EXPERT_PARTS, Largest, Load, Metric, Metrics
from meshtrain.models.moe import chunks, routing
from meshtrain.models.moe.chunks import Parts, Stacks
from meshtrain.models.moe.grouped_matmul import Stack
from meshtrain.models.moe.routing import Routing, Tokens
from meshtrain.models.task import LayerSums, Params
from meshtrain.sharding.param_sharding import Names, axes_in, axes_of_dims
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import Arrays

UP, DOWN = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_mlp", "expert_embed")
MATRICES: Mapping[str, Names] = {"up": UP, "gate": UP, "down": DOWN}
BIASES: Mapping[str, Names] = {f"{name}_bias": (axes[0], axes[2]) for name, axes in MATRICES.items()}
STACK, PLACE = "_stack", "place"  # added by `with_stacks`: a suffix of names, and a name
LOAD, BIAS = "expert_load", "router_bias"  # the metric that determines the bias updates
DOWN_BIAS = "down_bias"
ROUTER_SHIFT = "router_shift"  # a learned bias of the logits


class Experts(nn.Module):
    """A router, experts with gated mlps, and shared experts that process every token: [b, T, D] -> [b, T, D].

    Attributes:
      output_std: of the initial weights of the last product.
    """

    options: DecoderOptions
    output_std: float
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, layer: jax.Array, tokens: Tokens | None) -> tuple[jax.Array, LayerSums]:
        """Applies the experts of each token.

        Args:
          x: [b, T, D].
          layer: int32 scalar, the layer's index in the model.
          tokens: for losses and counts; None: there are none, as in evaluation and generation.

        Returns:
          The results, and the router's additions to the loss and to metrics, see `Stages.repeated`.
        """
        o, moe = self.options, self.options.moe
        place, zeros = self.placement, nn.initializers.zeros
        router = weight(
            self, "router", (x.shape[-1], moe.num_experts), ("embed", "router"), normal(o.init_std), place, jnp.float32
        )
        bias = None
        if moe.router == "sigmoid":
            bias = weight(self, BIAS, (moe.num_experts,), ("router",), zeros, place, jnp.float32)
        logits = routing.logits(x, router)
        if moe.biases:
            logits = logits + weight(self, ROUTER_SHIFT, (moe.num_experts,), ("norm",), zeros, place, jnp.float32)
        groups = moe.router_groups, min(moe.groups_per_token, moe.router_groups)
        to = routing.route(logits, bias, moe.experts_per_token, moe.router, moe.router_scale, groups)
        result, seen = self._of_experts(x, to)
        sums = None
        if tokens is not None:
            counts = routing.counts(to.chosen, tokens, moe.num_experts)
            sums = _sums(o, to, counts, tokens, layer, seen)
        if moe.shared_experts:
            width = moe.shared_experts * moe.expert_dim
            shared = Mlp(width, o.activation, False, o.init_std, self.output_std, place, self.dtype, name="shared")
            result = result + shared(x)
        return result, sums

    def _of_experts(self, x: jax.Array, to: Routing) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of the experts' results for each token, [b, T, D], and counts of parts.

        The counts, float32 [P + 1], are the numbers of turns that took 0, 1, ... P parts.
        """
        place = self.placement
        matrices = self._matrices(x.shape[-1])
        # Shapes of initial weights are computed before JAX may query devices.
        platform = "cpu" if self.is_initializing() else place.platform
        plan = _Plan.of(place, x, matrices, self.options, platform)
        stacks = self._stacks(plan)
        of_stacks = {name: Stack._make([PartitionSpec(None, *plan.stored[name]), PartitionSpec()]) for name in stacks}
        inputs = plan.x, plan.x, plan.x, dict(plan.stored), of_stacks
        of_seen = PartitionSpec(axes_in(plan.x) or None)
        run = place.on_shards(plan.on_device, inputs, (plan.result, of_seen), is_opaque=True)
        result, seen = run(x, to.chosen, to.gates, {name: array for name, (array, _) in matrices.items()}, stacks)
        return result, jnp.sum(seen, axis=0)

    def _stacks(self, plan: "_Plan") -> Stacks:
        """Returns the stacks of matrices of all layers, with this layer's index, if the module got them; else {}."""
        if not self.has_variable("params", PLACE):
            return {}
        layer: Arrays = self.get_variable("params", PLACE)
        # A matrix that must be gathered first cannot be read from the stack.
        names = [name for name in MATRICES if plan.stored[name] == plan.whole[name]]
        return {name: Stack(self.get_variable("params", name + STACK), layer) for name in names}

    def _matrices(self, embed_dim: int) -> dict[str, tuple[jax.Array, Names]]:
        """Returns the experts' matrices and the factors of their adapters, cast, with their logical axes."""
        o = self.options
        sizes = {"experts": o.moe.num_experts, "expert_embed": embed_dim, "expert_mlp": o.moe.expert_dim}
        result: dict[str, tuple[jax.Array, Names]] = {}
        for name, axes in {**(BIASES if o.moe.biases else {}), **MATRICES}.items():
            std = self.output_std if name == "down" else o.init_std
            start = nn.initializers.zeros if name in BIASES else normal(std)
            shape = tuple(sizes[str(axis)] for axis in axes)
            result[name] = weight(self, name, shape, axes, start, Placement.single_device(), self.dtype), axes
            if self.has_variable("params", name + A):
                for end, of_factor in zip((A, B), factor_axes(axes), strict=True):
                    factor: Arrays = self.get_variable("params", name + end)
                    result[name + end] = factor.astype(self.dtype), of_factor
        return result


def _sums(
    options: DecoderOptions, to: Routing, counts: jax.Array, tokens: Tokens, layer: jax.Array, seen: jax.Array
) -> LayerSums:
    """Returns the addition of one layer to the loss sum, and its metrics; logged losses are means over layers.

    `balance_weight` has the meaning of `router_aux_loss_coef` in transformers (`load_balancing_loss_func`): a mean over
    the layers with experts and a sum over the k choices of a token, which is k for an even load. `routing.balance` is 1
    for an even load, so it is multiplied by k. The z loss is a sum over layers.

    Args:
      options: the weights of the losses.
      to: the routing of the tokens.
      counts: float32 [b, E], the tokens of each sequence that chose each expert.
      tokens: their weights.
      layer: the layer's index.
      seen: float32 [P + 1], how many turns of devices took 0, 1, ... P parts.
    """
    balance, z, num_layers = routing.balance(to, counts, tokens), routing.z_loss(to, tokens), options.num_repeated
    row = jnp.zeros((num_layers, options.moe.num_experts), jnp.float32)
    row = row.at[layer - options.num_dense].set(jnp.sum(counts, axis=0))
    metrics: dict[str, Metric] = {
        "balance_loss": balance / num_layers,
        "z_loss": z / num_layers,
        "router_entropy": routing.entropy(to, tokens) / num_layers,
        LOAD: Load(jax.lax.stop_gradient(row)),
        EXPERT_PARTS: Largest(seen),
    }
    weight = options.moe.balance_weight * options.moe.experts_per_token / num_layers
    return weight * balance + options.moe.z_weight * z, metrics


def with_moved_biases(rate: float, params: Params, metrics: Metrics) -> Params:
    """Returns a decoder's parameters with each router's bias updated against the load of its experts.

    This balances the load without an auxiliary loss (Wang et al. 2024; DeepSeek-V3, section 2.1.2). The bias of an
    expert chosen by more tokens than the mean decreases by the rate; the bias of an expert chosen by fewer increases by
    it.

    Args:
      rate: change of a bias in a step.
      params: float32, see `Task.after_update`.
      metrics: sums over the batch, with the load of each layer's experts.
    """
    load: Arrays = metrics[LOAD]
    experts = params["layers"]["experts"]
    moved = experts | {BIAS: experts[BIAS] + rate * routing.direction(load.counts)}
    return {**params, "layers": {**params["layers"], "experts": moved}}


def with_stacks(layers: Params, stack: Params, first: jax.Array) -> Params:
    """Adds the experts' matrices of all layers to each layer of a decoder, see `Stages.with_stack`.

    Each matrix is then present twice. The gradient is computed for the layer's own matrix, while kernels read the copy
    in the stack.

    Args:
      layers: each leaf [K, ...], in the compute dtypes.
      stack: each leaf [N, ...], in the compute dtypes.
      first: int32 scalar, the index of the first of the K layers among the N.
    """
    experts, of_all = layers["experts"], stack["experts"]
    num_layers = experts["up"].shape[0]
    # A scan over layers gives each layer the complete stack.
    each = {name + STACK: jnp.broadcast_to(of_all[name], (num_layers, *of_all[name].shape)) for name in MATRICES}
    return {**layers, "experts": {**experts, **each, PLACE: first + jnp.arange(num_layers)}}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The shardings of one layer's experts, and the computation of one device on its shards.

    Attributes:
      x: the spec of tokens, of their choices and gates, and of the results before they are summed over `summed`.
      result: the spec of the results.
      stored: name -> spec of each stored matrix.
      whole: name -> spec of each matrix during the computation.
      shared: the mesh axes over which experts are split: their devices have different tokens and share the experts.
      summed: the axes over which the inner dim of experts is split.
      options: the number of experts and the activation function.
      platform: of the devices, which determines the kernel of products.
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
        matrices: Mapping[str, tuple[jax.Array, Names]],
        o: DecoderOptions,
        platform: str,
    ) -> "_Plan":
        """Returns the plan for these tokens and matrices, without the axes that are already manual."""
        of_x = place.activation_spec(x.shape, X)
        whole = {name: place.weight_spec(array.shape, axes) for name, (array, axes) in matrices.items()}
        experts, _, inner = axes_of_dims(whole["up"], len(UP))
        assert set(experts) <= set(axes_in(of_x)), "experts are split over axes that split the batch"
        stored = {name: place.stored_spec(array.shape, axes) for name, (array, axes) in matrices.items()}
        return cls(of_x, sums_spec(place, x.shape, inner), stored, whole, experts, inner, o, platform)

    def on_device(
        self, x: jax.Array, chosen: jax.Array, gates: jax.Array, matrices: Mapping[str, jax.Array], stacks: Stacks
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the results for one device's tokens, and how many turns took 0, 1, ... P parts, float32 [1, P + 1].

        Args:
          x: [b, T, D], one device's tokens.
          chosen: int32 [b, T, k].
          gates: float32 [b, T, k].
          matrices: one device's shards.
          stacks: one device's shards of the matrices of all layers.
        """
        matrices = {name: self._gather(name, matrix) for name, matrix in matrices.items()}
        if DOWN_BIAS in matrices and self.summed:  # each device adds its part of the sum
            matrices[DOWN_BIAS] = matrices[DOWN_BIAS] / jax.lax.axis_size(self.summed)
        flat = [array.reshape(-1, array.shape[-1]) for array in (x, chosen, gates)]
        num_sharing = jax.lax.axis_size(self.shared) if self.shared else 1
        num = chunks.num_turns(flat[0].shape[0], num_sharing, chosen.shape[-1], self.options.moe.num_experts)
        turns = zip(*(jnp.split(array, num) for array in flat), strict=True)
        results, seen = zip(*(self._turn(some, to, gate, matrices, stacks) for some, to, gate in turns), strict=True)
        y = reduce_rows(jnp.concatenate(results).reshape(x.shape), self.summed, self.result != self.x)
        return y, jnp.stack(seen).sum(axis=0, keepdims=True)

    def _turn(
        self, x: jax.Array, chosen: jax.Array, gates: jax.Array, matrices: Mapping[str, jax.Array], stacks: Stacks
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the results for some of one device's tokens, and a one-hot count of the parts they take, [P + 1].

        Args:
          x: [n, D].
          chosen: int32 [n, k].
          gates: float32 [n, k].
          matrices: complete matrices of this device's experts.
          stacks: for some of them, see `chunks.results`.
        """
        o, num_here = self.options, matrices["up"].shape[0]
        chosen, gates = self._from_all(chosen), self._from_all(gates)
        first = jax.lax.axis_index(self.shared) * num_here if self.shared else 0
        local = chosen - first
        local = jnp.where((local >= 0) & (local < num_here), local, num_here)
        num_tokens, num_chosen = chosen.shape
        cut = Parts.of(num_tokens, num_chosen, num_here, o.moe.num_experts)
        index = chunks.arrange_rows(cut, local, num_here)
        how = chunks.How(cut, o.activation, self.platform)
        y = chunks.results(how, self._from_all(x), gates.reshape(-1), matrices, index, stacks)
        if self.shared:
            y = jax.lax.psum_scatter(y, self.shared, scatter_dimension=0, tiled=True)
        return y, jax.nn.one_hot(jnp.maximum(1, chunks.num_used(cut, index, num_here)), cut.num_parts + 1)

    def _gather(self, name: str, matrix: jax.Array) -> jax.Array:
        dims = zip(*(axes_of_dims(specs[name], matrix.ndim) for specs in (self.stored, self.whole)), strict=True)
        for dim, (stored, whole) in enumerate(dims):
            assert stored[: len(whole)] == whole, "axes that split a weight for storage only are the inner ones"
            if over := stored[len(whole) :]:
                matrix = jax.lax.all_gather(matrix, over, axis=dim, tiled=True)
        return matrix

    def _from_all(self, array: jax.Array) -> jax.Array:
        return jax.lax.all_gather(array, self.shared, axis=0, tiled=True) if self.shared else array
