"""Mixture of experts: a layer has several mlps, and each token is processed by a few of them (Shazeer et al. 2017).

b: sequences in a microbatch, T: tokens per sequence, n: tokens of a turn, D: embed dim, E: experts, e: experts on one
device, F: expert dim, k: experts per token, P: parts of the worst load, N: devices with different tokens.

No token is dropped, whatever the load. One manual region contains everything that depends on the routing. In this
region each device

1. gathers its experts' weights over the axes that split weights for storage, and the tokens of the devices with which
it shares the experts;
2. sorts the tokens that chose its experts into blocks of one expert each (`grouped_matmul.py`), and multiplies these
rows in parts, one part after the other (`chunks.py`);
3. sums the results of each token, and sends each device the sums of the device's tokens.

If there are enough rows, tokens are processed in two turns of half of the tokens (`chunks.num_turns`), so that
communication of one turn overlaps with products of the other turn.

All gathers and sums have exact transposes, so the backward pass needs no separate code.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.hardware.accelerators import Capability
from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.models.layers import A, B, Mlp, X, factor_axes, normal, reduce_rows, sums_spec, weight
from meshtrain.models.metrics import EXPERT_PARTS, Largest, Load, Metric, Metrics
from meshtrain.models.moe import chunks, routing
from meshtrain.models.moe.chunks import Parts, Stacks
from meshtrain.models.moe.grouped_matmul import Stack
from meshtrain.models.moe.routing import Routing, Tokens
from meshtrain.models.remat import PRODUCT
from meshtrain.models.task import LayerSums, Params
from meshtrain.sharding.param_sharding import Names, axes_in, axes_of_dims
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.saved import GATHERED, mark
from meshtrain.sharding.trees import Arrays

UP, DOWN = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_mlp", "expert_embed")
MATRICES: Mapping[str, Names] = {"up": UP, "gate": UP, "down": DOWN}
BIASES: Mapping[str, Names] = {f"{name}_bias": (axes[0], axes[2]) for name, axes in MATRICES.items()}
STACK, PLACE = "_stack", "place"  # added by `with_stacks`: a suffix of names, and a name
LOAD, BIAS = "expert_load", "router_bias"  # the metric that determines the bias updates
DOWN_BIAS = "down_bias"
ROUTER_SHIFT = "router_shift"  # a learned bias of the logits


class Experts(nn.Module):
    """The mixture of experts of a layer, [b, T, D] -> [b, T, D]: a router, and experts with gated mlps.

    Shared experts, if the model has them, process every token.

    Attributes:
      options: options of the decoder.
      output_std: standard deviation of the initial weights of `down`, the last matrix of each expert.
      placement: determines the shardings of weights and activations.
      dtype: compute dtype of the experts; the router computes in float32.
    """

    options: DecoderOptions
    output_std: float
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, layer: jax.Array, tokens: Tokens | None) -> tuple[jax.Array, LayerSums]:
        """Returns the gated sum of the results of each token's experts, [b, T, D], and the router's losses and metrics.

        Args:
          x: activations [b, T, D].
          layer: int32 scalar, the layer's index in the model.
          tokens: the targets' weights and the padding mask, for losses and metrics; None: the second result is None, as
            in evaluation and generation.

        Returns:
          (results, (auxiliary loss, metrics) as for `Stages.repeated`, or None).
        """
        o, moe = self.options, self.options.moe
        place, zeros = self.placement, nn.initializers.zeros
        router = weight(
            self, "router", (x.shape[-1], moe.num_experts), ("embed", "router"), normal(o.init_std), place, jnp.float32
        )
        bias = None
        if moe.router == "sigmoid":
            bias = weight(self, BIAS, (moe.num_experts,), ("router",), zeros, place, jnp.float32)
        logits = mark(routing.logits(x, router), PRODUCT)
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
        """Returns the gated sum of the experts' results for each token, [b, T, D], and a histogram of computed parts.

        A device processes its tokens in 1 or 2 turns, and the experts' rows of a turn in up to P parts of a fixed size
        (`chunks.py`). Element i of the histogram, float32 [P + 1], is the number of turns on all devices that computed
        i parts.

        Args:
          x: activations [b, T, D].
          to: experts and gates of each token.
        """
        place = self.placement
        matrices = self._matrices(x.shape[-1])
        # Shapes of initial weights are computed before JAX may query devices.
        device = ("cpu", None) if self.is_initializing() else (place.platform, place.compute_capability)
        plan = _Plan.of(place, x, matrices, self.options, *device)
        stacks = self._stacks(plan)
        of_stacks = {name: Stack._make([PartitionSpec(None, *plan.stored[name]), PartitionSpec()]) for name in stacks}
        inputs = plan.x, plan.x, plan.x, dict(plan.stored), of_stacks
        of_seen = PartitionSpec(axes_in(plan.x) or None)
        run = place.on_shards(plan.on_device, inputs, (plan.result, of_seen), is_opaque=True)
        result, seen = run(x, to.chosen, to.gates, {name: array for name, (array, _) in matrices.items()}, stacks)
        return result, jnp.sum(seen, axis=0)

    def _stacks(self, plan: "_Plan") -> Stacks:
        """Returns the `Stack` of each matrix of the experts by name: its weights in all layers, and this layer's index.

        The result is {} if `with_stacks` has not added the stacks to the parameters. A matrix that must be gathered
        before a product has no stack. `plan` states which matrices are gathered.
        """
        if not self.has_variable("params", PLACE):
            return {}
        layer: Arrays = self.get_variable("params", PLACE)
        # A matrix that must be gathered first cannot be read from the stack.
        names = [name for name in MATRICES if plan.stored[name] == plan.whole[name]]
        return {name: Stack(self.get_variable("params", name + STACK), layer) for name in names}

    def _matrices(self, embed_dim: int) -> dict[str, tuple[jax.Array, Names]]:
        """Returns name -> (array in the compute dtype, logical axes) of the experts' matrices, biases and adapters."""
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
    """Returns the auxiliary loss of one layer's router, a float32 scalar, and the layer's metrics.

    The option `balance_weight` has the meaning of `router_aux_loss_coef` in transformers, whose balance loss
    (`load_balancing_loss_func`) is k (experts per token) for an even load. `routing.balance` is 1 for an even load, so
    this function multiplies it by k. The auxiliary loss contains the mean of the balance losses over layers, and the
    sum of the z losses over layers. The metrics `balance_loss` and `z_loss` are means over layers.

    Args:
      options: options of the decoder, with the weights of the losses.
      to: routing of the tokens.
      counts: float32 [b, experts], how many tokens of each sequence chose each expert.
      tokens: weights of targets, and which tokens are padding.
      layer: int32 scalar, the layer's index in the model.
      seen: float32 [P + 1]; element i is the number of turns (groups of a device's tokens) on all devices that computed
        i parts (fixed numbers of rows).
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
    expert that more tokens chose than the mean decreases by the rate. The bias of an expert that fewer tokens chose
    increases by the rate.

    Args:
      rate: absolute change of a bias in a step.
      params: updated parameters of the decoder, trained parameters in float32; see `Task.after_update`.
      metrics: metrics summed over the batch; `LOAD` has the number of tokens of each expert in each layer.
    """
    load: Arrays = metrics[LOAD]
    experts = params["layers"]["experts"]
    moved = experts | {BIAS: experts[BIAS] + rate * routing.direction(load.counts)}
    return {**params, "layers": {**params["layers"], "experts": moved}}


def with_stacks(layers: Params, stack: Params, first: jax.Array) -> Params:
    """Returns the parameters of K layers, with the experts' matrices of all N layers of the stage added to each layer.

    Each layer then has its matrices twice: as separate matrices, and within the added arrays. Kernels read the added
    arrays. A kernel that got a layer's separate matrices would make XLA copy them from the stack first. Gradients are
    computed for the separate matrices. See `Stages.with_stack`.

    Args:
      layers: parameters of K layers, each leaf [K, ...], in the compute dtypes.
      stack: parameters of the stage's N layers, each leaf [N, ...], in the compute dtypes.
      first: int32 scalar, the index of the first of the K layers among the N layers.
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
      x: partition spec of activations, of chosen experts and of gates.
      result: partition spec of the results after they are summed over `summed`.
      stored: name -> partition spec of each stored matrix.
      whole: name -> partition spec of each matrix after the gather over axes that split it for storage only.
      shared: mesh axes over which experts are split. The devices along them have different tokens.
      summed: mesh axes over which the inner dim of experts is split, so that results are summed over them.
      options: options of the decoder, with the number of experts and the activation function.
      platform: platform of the devices as JAX names it, which determines the kernel for products.
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """

    x: PartitionSpec
    result: PartitionSpec
    stored: Mapping[str, PartitionSpec]
    whole: Mapping[str, PartitionSpec]
    shared: tuple[str, ...]
    summed: tuple[str, ...]
    options: DecoderOptions
    platform: str
    capability: Capability | None

    @classmethod
    def of(
        cls,
        place: Placement,
        x: jax.Array,
        matrices: Mapping[str, tuple[jax.Array, Names]],
        o: DecoderOptions,
        platform: str,
        capability: Capability | None,
    ) -> "_Plan":
        """Returns the shardings of one layer's activations and experts, as a `_Plan`.

        The partition specs omit mesh axes that are already manual.

        Args:
          place: determines the shardings.
          x: activations [b, T, D].
          matrices: name -> (matrix, its logical axes).
          o: options of the decoder.
          platform: platform of the devices as JAX names it.
          capability: compute capability of the GPUs; None: unknown, or no GPUs.
        """
        of_x = place.activation_spec(x.shape, X)
        whole = {name: place.weight_spec(array.shape, axes) for name, (array, axes) in matrices.items()}
        experts, _, inner = axes_of_dims(whole["up"], len(UP))
        assert set(experts) <= set(axes_in(of_x)), "axes that split experts also split the batch"
        stored = {name: place.stored_spec(array.shape, axes) for name, (array, axes) in matrices.items()}
        return cls(of_x, sums_spec(place, x.shape, inner), stored, whole, experts, inner, o, platform, capability)

    def on_device(
        self, x: jax.Array, chosen: jax.Array, gates: jax.Array, matrices: Mapping[str, jax.Array], stacks: Stacks
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the results for one device's tokens, and how many turns computed i parts, for each i from 0 to P.

        The results are [b, T, D], or [b, T / m, D] if they are scattered over the m devices along `summed`. A turn is a
        group of tokens that are processed together; a part is a fixed number of the experts' rows. The numbers of turns
        are float32 [1, P + 1], with one element for each i.

        Args:
          x: activations of one device's tokens, [b, T, D].
          chosen: the k experts of each token, int32 [b, T, k].
          gates: factors of the experts' results, float32 [b, T, k].
          matrices: name -> one device's shard of each stored matrix.
          stacks: name -> one device's shards of the matrices of all layers.
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
        """Returns the results for one turn (n of one device's tokens), [n, D], and the number of computed parts.

        A part is a fixed number of the experts' rows. The number of computed parts, 1 to P, is returned as a one-hot
        vector, float32 [P + 1].

        Args:
          x: activations of the turn's tokens, [n, D].
          chosen: the k experts of each token, int32 [n, k].
          gates: factors of the experts' results, float32 [n, k].
          matrices: gathered matrices of this device's experts.
          stacks: stacks of some of these matrices, see `chunks.results`.
        """
        o, num_here = self.options, matrices["up"].shape[0]
        chosen, gates = self._from_all(chosen), self._from_all(gates)
        first = jax.lax.axis_index(self.shared) * num_here if self.shared else 0
        local = chosen - first
        local = jnp.where((local >= 0) & (local < num_here), local, num_here)
        num_tokens, num_chosen = chosen.shape
        cut = Parts.of(num_tokens, num_chosen, num_here, o.moe.num_experts)
        index = chunks.arrange_rows(cut, local, num_here)
        how = chunks.How(cut, o.activation, self.platform, self.capability)
        y = chunks.results(how, self._from_all(x), gates.reshape(-1), matrices, index, stacks)
        if self.shared:
            y = jax.lax.psum_scatter(y, self.shared, scatter_dimension=0, tiled=True)
        return y, jax.nn.one_hot(jnp.maximum(1, chunks.num_used(cut, index, num_here)), cut.num_parts + 1)

    def _gather(self, name: str, matrix: jax.Array) -> jax.Array:
        dims = zip(*(axes_of_dims(specs[name], matrix.ndim) for specs in (self.stored, self.whole)), strict=True)
        for dim, (stored, whole) in enumerate(dims):
            assert stored[: len(whole)] == whole, (
                "the axes that split a weight only in storage are the last axes of a dim"
            )
            if over := stored[len(whole) :]:
                matrix = mark(jax.lax.all_gather(matrix, over, axis=dim, tiled=True), GATHERED)
        return matrix

    def _from_all(self, array: jax.Array) -> jax.Array:
        return jax.lax.all_gather(array, self.shared, axis=0, tiled=True) if self.shared else array
