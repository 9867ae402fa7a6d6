"""The modules of a decoder-only transformer, configurable as GPT-2, Llama, Qwen, Gemma, DeepSeek and others.

b: sequences in a microbatch, T: tokens per sequence, D: embed dim, H: head dim, K: layers in a stack, v: the part of
the padded vocabulary on one shard of a manual axis (the complete vocabulary without a manual axis).
"""

import functools
import math
import operator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from meshtrain.models import vocabulary
from meshtrain.models.attention.latent import LatentAttention
from meshtrain.models.attention.multi_head import CACHE, NEW, MultiHead, Slots
from meshtrain.models.decoder_options import DecoderOptions as DecoderOptions
from meshtrain.models.decoder_options import TransformerShape
from meshtrain.models.layers import Mlp, Norm, dropout, gather_sequence, normal, weight
from meshtrain.models.metrics import PEAK, peaks
from meshtrain.models.moe.experts import Experts
from meshtrain.models.moe.routing import Tokens
from meshtrain.models.remat import MIDDLE, RESIDUAL, RematOptions
from meshtrain.models.rotary import rotary_angles
from meshtrain.models.split import with_policy
from meshtrain.models.task import Batch, LayerSums, Params
from meshtrain.models.transformer.cache import latest
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.saved import mark
from meshtrain.sharding.trees import Arrays

EMBEDDING_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2
# Name scope of the attention of a layer that is local or global depending on its index, see `Cost.shares`.
LOCAL_OR_GLOBAL = "local_or_global"

Given: TypeAlias = Arrays  # an argument of each layer, such as its angles: an array, a `ByKind`, or None


class ByKind(NamedTuple):
    """Two versions of an argument of layers, for a stack in which only some layers have a sliding window.

    The layers are scanned, so each layer gets both versions and selects one by its index.

    Attributes:
      local: the argument of layers with a window.
      everywhere: the argument of layers without a window.
    """

    local: Arrays
    everywhere: Arrays


class Embedding(nn.Module):
    """The embedding of tokens: int32 [b, T] -> [b, T, D]. The table's rows may be sharded over a manual axis.

    Attributes:
      options: options of the decoder.
      num_rows: rows of the table on one shard of the manual axis.
      num_positions: rows of the table of learned positions.
      placement: determines the shardings of tables and activations.
      dtype: compute dtype.
    """

    options: DecoderOptions
    num_rows: int
    num_positions: int
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, batch: Batch, keys: jax.Array, train: bool, axis: vocabulary.Axis) -> jax.Array:
        """Returns the embedding of the tokens, plus learned positions if the model has them, [b, T, D].

        Args:
          batch: `tokens`, and `positions` if positions are learned, int32 [b, T].
          keys: a random key for each sequence's dropout, [b].
          train: whether to apply dropout.
          axis: the manual mesh axis over which the table's rows are sharded, or None.
        """
        options, place, init = self.options, self.placement, normal(self.options.init_std)
        shape = (self.num_rows, options.embed_dim)
        table = weight(self, "table", shape, ("vocab", "embed"), init, place, self.dtype)
        row = batch["tokens"] - vocabulary.first_column(self.num_rows, axis)
        x = vocabulary.from_one_shard(vocabulary.look_up(table, row, place), axis)
        if options.scaled_embeddings:
            x = x * math.sqrt(options.embed_dim)
        if options.positions == "learned":
            shape = (self.num_positions, options.embed_dim)
            positions = weight(self, "positions", shape, ("positions", "embed"), init, place, self.dtype)
            x = x + jnp.take(positions, batch["positions"], axis=0, mode="clip")
        x = place.activation(x, ("batch", "residual_sequence", "embed"))
        return dropout(x, options.dropout_rate if train else 0.0, keys, EMBEDDING_SITE)


class Layer(nn.Module):
    """A layer of the decoder, [b, T, D] -> [b, T, D]: y = x + attention(norm(x)), then y + mlp(norm(y)).

    With the option `norm.post` it is y = x + norm(attention(norm(x))), then y + norm(mlp(norm(y))); the inner norms
    exist only with `norm.pre`. With `moe.num_experts` above 0 the mlp is a mixture of experts.

    Attributes:
      options: options of the decoder.
      placement: determines the shardings of weights and activations.
      dtype: compute dtype.
      train: whether to apply dropout.
    """

    options: DecoderOptions
    placement: Placement
    dtype: DTypeLike
    train: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        layer: jax.Array,
        keys: jax.Array,
        angles: jax.Array | ByKind | None,
        documents: jax.Array | None,
        slots: Slots | ByKind | None,
        tokens: Tokens | None = None,
    ) -> tuple[jax.Array, LayerSums]:
        """Returns the output of the layer, [b, T, D], and its auxiliary loss and metrics.

        Args:
          x: activations [b, T, D].
          layer: int32 scalar, the layer's index in the model, for dropout and for properties of every n-th layer.
          keys: a random key for each sequence's dropout, [b].
          angles: rotary angles float32 [b, T, H / 2], in two versions if only some layers have a window; None: no
            rotary positions.
          documents: int32 [b, T], the document of each token; None: each sequence is one document.
          slots: for generation, the cache slots that a token attends to; None: no cache.
          tokens: the targets' weights and the padding mask, for the losses and metrics of experts; None: not computed.

        Returns:
          (activations, (auxiliary loss, metrics) as for `Stages.repeated`, or None).
        """
        o, place = self.options, self.placement
        output_std = o.init_std / math.sqrt(2 * o.num_layers)
        rate = o.dropout_rate if self.train else 0.0
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, layer + 1)
        is_global = (layer + 1) % o.global_every == 0 if o.alternates else None
        own_angles, own_slots = _of_layer(angles, is_global), _of_layer(slots, is_global)
        norm = functools.partial(Norm, o.norm.name, o.norm.epsilon, o.biases, place, o.norm.centered_scales)
        how = (o.attends, o.init_std, output_std, place, self.dtype)
        widths = o.latent_widths
        attention = LatentAttention(*how, widths, name="attention") if widths else MultiHead(*how, name="attention")
        x = mark(x, RESIDUAL)
        before = o.norm.pre or not o.norm.post
        normed = gather_sequence(norm(name="attention_norm")(x) if before else x, place)
        attend = jax.named_scope(LOCAL_OR_GLOBAL)(attention) if o.alternates else attention
        stretch = self._stretch(is_global)
        if o.rope.unrotated_every and own_angles is not None:
            is_rotated = (layer + 1) % o.rope.unrotated_every != 0
            own_angles = jnp.where(is_rotated, own_angles, 0.0)
            stretch = None if stretch is None else jnp.where(is_rotated, stretch, 1.0)
        added = attend(normed, own_angles, documents, slots=own_slots, is_global=is_global, stretch=stretch)
        added = self._residual(added)
        added = norm(name="attention_post_norm")(mark(added, MIDDLE)) if o.norm.post else added
        x = mark(x + dropout(added, rate, keys, ATTENTION_SITE), MIDDLE)
        normed = gather_sequence(norm(name="mlp_norm")(x) if before else x, place)
        sums = None
        if o.moe.num_experts:
            added, sums = Experts(o, output_std, place, self.dtype, name="experts")(normed, layer, tokens)
        else:
            biases, stds = o.biases or o.mlp_biases, (o.init_std, output_std)
            mlp = Mlp(o.mlp_dim, o.activation, biases, *stds, place, self.dtype, o.mlp_biases, name="mlp")
            added = mlp(normed)
        added = self._residual(added)
        added = norm(name="mlp_post_norm")(mark(added, MIDDLE)) if o.norm.post else added
        x = x + dropout(added, rate, keys, MLP_SITE)
        return self._residual(x), sums

    def _residual(self, x: jax.Array) -> jax.Array:
        return self.placement.activation(x, ("batch", "residual_sequence", "embed"))

    def _stretch(self, is_global: jax.Array | None) -> jax.Array | float | None:
        """Returns the YaRN factor of this layer's rotated queries and keys, a number or float32 scalar; None: 1.

        If layers with a window have a separate rotary base (`rope.local_base`), only layers without a window have the
        factor. For layers with a window, the result is then None or 1.

        Args:
          is_global: bool scalar, whether this layer has no window; None: all layers have a window, or none has.
        """
        o = self.options
        if o.rope.stretch is None or not (o.window and o.rope.local_base):
            return o.rope.stretch
        return None if is_global is None else jnp.where(is_global, o.rope.stretch, 1.0)


class Watched(Layer):
    """A layer of the decoder that also returns the metric `largest_activation`, the largest magnitude of its output."""

    def __call__(self, x: jax.Array, layer: jax.Array, *given: Given) -> tuple[jax.Array, LayerSums]:
        """Returns the output of `Layer`, its auxiliary loss, and its metrics including `largest_activation`.

        `given` are the further arguments of `Layer.__call__`.
        """
        x, sums = super().__call__(x, layer, *given)
        loss, found = sums or (jnp.float32(0), {})
        return x, (loss, {**found, PEAK: peaks(x, layer, self.options.num_layers)})


class Head(nn.Module):
    """The last norm and the head, [b, T, D] -> logits [b, T, v]. The v columns may be a shard of all columns.

    Attributes:
      options: options of the decoder.
      num_columns: columns of logits on one shard of the manual axis.
      placement: determines the shardings of the weight and of activations.
      dtype: compute dtype of the weight.
      output_dtype: dtype of the logits.
    """

    options: DecoderOptions
    num_columns: int
    placement: Placement
    dtype: DTypeLike
    output_dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: jax.Array, table: jax.Array | None, axis: vocabulary.Axis, loss: vocabulary.Loss = vocabulary.logits
    ) -> jax.Array:
        """Returns the result of `loss`: by default logits in the output dtype, including columns of padding.

        Logits are [b, T, v] for the v columns on one shard of `axis`.

        Args:
          x: activations after the last layer, [b, T, D].
          table: embedding table [v, D], which is the head's weight if embeddings are tied; None: a separate weight.
          axis: the manual mesh axis over which the columns are sharded, or None.
          loss: (settings of the matmul, activations, weight) -> logits, or a loss that computes logits in chunks.
        """
        o, place = self.options, self.placement
        x = Norm(o.norm.name, o.norm.epsilon, o.biases, place, o.norm.centered_scales, name="norm")(x)
        # Before the sequence is gathered: cotangents are summed over the manual axis while it is sharded, and the
        # gather moves the compute dtype, not the norm's float32.
        x = place.activation(vocabulary.copy_to_shards(x, axis), ("batch", "residual_sequence", "embed"))
        product = vocabulary.Product(
            place, vocabulary.KERNEL if table is None else vocabulary.TABLE, self.output_dtype, o.logit_cap
        )
        if table is None:
            shape, init = (o.embed_dim, self.num_columns), normal(o.init_std)
            stored = weight(self, "kernel", shape, vocabulary.KERNEL, init, Placement.single_device(), self.dtype)
        else:
            stored = table.astype(self.dtype)
        return loss(product, x, stored)


def layer_stack(
    options: TransformerShape,
    num_layers: int,
    placement: Placement,
    dtype: DTypeLike,
    layer: type[nn.Module] = Layer,
    num_given: int = 5,
    stacked_by: str = "layers",
) -> nn.Module:
    """Returns a stack of `num_layers` layers as one scanned Linen module, for initialization and for generation.

    Args:
      options: options of the model, for `layer`.
      num_layers: number of layers.
      placement: determines the shardings of activations and gathered weights.
      dtype: compute dtype.
      layer: class of a layer, with the fields and arguments of `Layer`.
      num_given: number of arguments of a layer after `x` and its index. All layers get the same values of these
        arguments.
      stacked_by: logical axis of the dim of weights that stacks the layers.
    """
    stack = nn.scan(
        layer,
        variable_axes={"params": 0, CACHE: 0, NEW: 0},
        split_rngs={"params": True},
        in_axes=(0, *(nn.broadcast,) * num_given),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: stacked_by},
    )
    return stack(options, placement, dtype, False)


def run_layers(
    options: TransformerShape,
    layers: Params,
    x: jax.Array,
    indices: jax.Array,
    given: tuple[Given, ...],
    placement: Placement,
    dtype: DTypeLike,
    train: bool,
    remat: RematOptions,
    layer: type[nn.Module] = Layer,
) -> tuple[jax.Array, LayerSums]:
    """Returns the activations after K layers, [b, T, D], and the layers' auxiliary losses and metrics, summed.

    The second result is (loss, metrics) as for `Stages.repeated`, or None.

    Args:
      options: options of the model.
      layers: parameters of the layers, each leaf [K, ...].
      x: activations that enter the first of the K layers, [b, T, D].
      indices: int32 [K], the index of each layer in the model.
      given: further arguments of each layer; for the decoder: keys, angles, documents, slots, tokens.
      placement: determines the shardings of activations and gathered weights.
      dtype: compute dtype.
      train: whether to apply dropout and `remat`.
      remat: activations that the backward pass recomputes; `every` must divide K.
      layer: class of a layer, with the fields and arguments of `Layer`.
    """
    policy, every = (remat.policy, remat.every) if train else ("none", 1)
    module = layer(options, placement, dtype, train)

    def apply(weights: Params, x: jax.Array, others: Arrays) -> Arrays:
        index, arguments = others
        return module.apply({"params": weights}, x, index, *arguments)

    def run(x: jax.Array, some: tuple[Params, jax.Array], policy: str) -> tuple[jax.Array, LayerSums]:
        one = with_policy(apply, policy, placement) if train else apply
        unroll = len(some[1]) if train and remat.unrolls else 1
        y, sums = jax.lax.scan(lambda x, each: one(each[0], x, (each[1], given)), x, some, unroll=unroll)
        return y, _total(sums)

    def group(x: jax.Array, some: tuple[Params, jax.Array]) -> tuple[jax.Array, LayerSums]:
        parts = []
        # Unrolled, because residuals of an inner scan would be copied out of it, which takes the memory of another
        # group.
        for i in range(every):
            one = jax.tree.map(operator.itemgetter(slice(i, i + 1)), some)
            x, sums = run(x, one, "none" if i else policy)
            parts.append(sums)
        return x, jax.tree.map(lambda *of_layers: sum(of_layers), *parts)

    if every == 1 or policy == "none":
        return run(x, (layers, indices), policy)
    in_groups = lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:])  # noqa: E731
    y, sums = jax.lax.scan(group, x, jax.tree.map(in_groups, (layers, indices)))
    return y, _total(sums)


def _total(sums: Arrays) -> LayerSums:
    return jax.tree.map(lambda of_layers: jnp.sum(of_layers, axis=0), sums)


def angles_of(options: DecoderOptions, positions: jax.Array) -> jax.Array | ByKind | None:
    """Returns the rotary angles of positions int32 [b, T], float32 [b, T, H / 2]; None with learned positions.

    H is the number of rotary channels of a head. If only some layers have a window and these have another rotary base,
    the result has two versions.
    """
    if options.positions != "rotary":
        return None
    angles = rotary_angles(positions, options.width_of_rotary, options.rope.base, options.rope.frequency_scaling)
    if not options.window or not options.rope.local_base:
        return angles
    local = rotary_angles(positions, options.width_of_rotary, options.rope.local_base, None)
    return ByKind(local, angles) if options.alternates else local


def slots_of(options: DecoderOptions, filled: jax.Array, own: jax.Array) -> Slots | ByKind:
    """Returns the slots of a cache that the new token of each row attends to.

    If only some layers have a window, the result has two versions.

    Args:
      options: options of the decoder, with the window.
      filled: int32 [b, slots], 1 if a slot has a token of the row, including the new token.
      own: int32 scalar, the slot of the new token.
    """
    if not options.window:
        return Slots(filled, own)
    local = Slots(latest(filled, options.window), own)
    return ByKind(local, Slots(filled, own)) if options.alternates else local


def _of_layer(given: Given, is_global: jax.Array | None) -> Given:
    """Returns an argument of one layer: `given`, or the version for this layer if `given` is a `ByKind`.

    `is_global` is a bool scalar, whether this layer has no window.
    """
    if not isinstance(given, ByKind):
        return given
    assert is_global is not None, "the layers alternate between two kinds"
    return jax.tree.map(lambda local, everywhere: jnp.where(is_global, everywhere, local), *given)
