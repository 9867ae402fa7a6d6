"""The modules of a decoder-only transformer: GPT-2, Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 by configuration.

b: sequences in a microbatch, T: tokens a sequence, D: embed dim, H: head dim, K: layers in a stack, v: the part of the
padded vocabulary on one shard of a manual axis (all of it without one).
"""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from meshtrain.layout.placement import Placement
from meshtrain.models import head, losses
from meshtrain.models.attention import CACHE, NEW, Attention, Slots
from meshtrain.models.cache import latest
from meshtrain.models.layers import Mlp, Norm, dropout, gather_sequence, normal, rotary_angles, weight
from meshtrain.models.lookup import look_up
from meshtrain.models.remat import RESIDUAL, RematOptions, checkpoint_policy
from meshtrain.models.task import Batch
from meshtrain.words.options import option

EMBEDDING_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2


ROTARY = {"positions": ("rotary",)}


@dataclasses.dataclass(frozen=True)
class DecoderOptions:
    """The shape of the model."""

    num_layers: int = option(4, "transformer layers", minimum=1, maximum=100_000)
    embed_dim: int = option(128, "width of the residual stream", minimum=1, dim="embed")
    mlp_dim: int = option(512, "inner width of the mlp", minimum=1, dim="mlp")
    num_heads: int = option(4, "query heads", minimum=1, dim="heads")
    num_kv_heads: int = option(
        4, "key and value heads; fewer than num_heads is grouped-query attention", minimum=1, dim="kv_heads"
    )
    head_dim: int = option(0, "width of a head; 0 means embed_dim / num_heads", minimum=0)
    vocab_size: int = option(
        0, "tokens in the vocabulary, without padding; 0: as many as the data's tokenizer has (bytes: 257)", minimum=0
    )
    vocab_multiple: int = option(
        128, "the vocabulary is padded to a multiple of this; padding gets no probability", minimum=1, dim="vocab"
    )
    dropout_rate: float = option(
        0.0, "dropout probability, on embeddings and on the outputs of attention and mlp", minimum=0.0
    )
    positions: str = option("rotary", "encoding of positions", choices=("rotary", "learned"))
    max_positions: int = option(
        0, "rows of learned positions; 0 means sequence_length", minimum=0, only_for={"positions": ("learned",)}
    )
    rope_base: float = option(10000.0, "rotary base (theta)", minimum=1.0, only_for=ROTARY)
    rope_factor: float = option(1.0, "Llama-3 rope scaling factor; 1 means none", minimum=1.0, only_for=ROTARY)
    rope_low: float = option(1.0, "Llama-3 rope scaling: low frequency factor", only_for=ROTARY)
    rope_high: float = option(4.0, "Llama-3 rope scaling: high frequency factor", only_for=ROTARY)
    rope_original_length: int = option(
        8192, "Llama-3 rope scaling: sequence length before scaling, in tokens", minimum=1, only_for=ROTARY
    )
    norm: str = option("rmsnorm", "normalization", choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = option(1e-5, "added to the variance", minimum=0.0)
    centered_scales: bool = option(False, "norms multiply by 1 + scale, as in Gemma; scales start at 0")
    post_norms: bool = option(
        False, "norms of what attention and mlp add to the residual stream as well, as in Gemma 2 and 3"
    )
    activation: str = option(
        "swiglu",
        "activation function of the mlp: gelu, or gated with silu (swiglu) or gelu (geglu)",
        choices=("swiglu", "gelu", "geglu"),
    )
    tied_embeddings: bool = option(False, "the head uses the embedding table")
    scaled_embeddings: bool = option(False, "embeddings of tokens are multiplied by sqrt(embed_dim), as in Gemma")
    biases: bool = option(False, "biases in projections, mlp and LayerNorm")
    qkv_biases: bool = option(
        False, "biases on queries, keys and values alone, as in Qwen 2", only_for={"biases": (False,)}
    )
    qk_norm: bool = option(False, "RMSNorm of each head's queries and keys before rotary positions, as in Qwen 3")
    window: int = option(
        0, "how many tokens a token attends to, itself among them, as in Mistral; 0: all before it", minimum=0
    )
    global_every: int = option(
        0,
        "layers without the window: every second (2, as in Gemma 2), every sixth (6, as in Gemma 3), ...; 0: none",
        minimum=0,
    )
    rope_local_base: float = option(
        0.0, "rotary base of layers with a window, without scaling, as in Gemma 3; 0: that of all layers",
        minimum=0.0, only_for=ROTARY,
    )  # fmt: skip
    attention_scalar: int = option(
        0, "scores of attention are divided by its square root, as in Gemma 2 and 3; 0: by that of the head dim",
        minimum=0,
    )  # fmt: skip
    attention_cap: float = option(
        0.0, "scores of attention become cap tanh(score / cap), as in Gemma 2; 0: they stay", minimum=0.0
    )
    logit_cap: float = option(0.0, "logits become cap tanh(logit / cap), as in Gemma 2; 0: they stay", minimum=0.0)
    init_std: float = option(0.02, "standard deviation of initial weights", minimum=0.0)
    loss_chunk: int = option(
        0, "tokens on a device whose logits the loss computes at a time; 0: as many as fit in 512 MiB", minimum=0
    )
    attention: str = option(
        "auto",
        "implementation of attention: xla, blockwise (linear memory), cudnn (GPU), triton (GPU; takes documents), "
        "splash (TPU; both are interpreted elsewhere, slowly), auto",
        choices=("auto", "xla", "blockwise", "cudnn", "triton", "splash"),
    )
    within_documents: bool = option(True, "tokens of a packed sequence attend to their own document only")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def width_of_head(self) -> int:
        """The head dim: `head_dim`, or `embed_dim / num_heads` where that is 0."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def alternates(self) -> bool:
        """Whether some layers have a window and others may have none."""
        return self.window > 0 and self.global_every > 0

    @property
    def num_global(self) -> int:
        """How many layers have no window in a model where others have one."""
        return self.num_layers // self.global_every if self.alternates else 0

    @property
    def score_scale(self) -> float | None:
        """What scores of attention are multiplied by; None: H^-0.5."""
        return self.attention_scalar**-0.5 if self.attention_scalar else None


class ByKind(NamedTuple):
    """What differs between layers that have the window and those that have none, where a stack has both.

    The layers are scanned, so a layer selects its own by its index.
    """

    local: Any
    everywhere: Any


class Embedding(nn.Module):
    """Tokens to activations: int32 [b, T] -> [b, T, D]. The table's rows may be sharded over a manual axis."""

    options: DecoderOptions
    num_rows: int
    num_positions: int
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, batch: Batch, keys: jax.Array, train: bool, axis: losses.Axis) -> jax.Array:
        """Looks up the tokens, adds learned positions, applies dropout.

        Args:
          batch: `tokens`, and `positions` where positions are learned, int32 [b, T].
          keys: one key for each sequence, keys [b].
          train: whether to apply dropout.
          axis: the manual mesh axis over which the table's rows are sharded, or None.
        """
        options, place, init = self.options, self.placement, normal(self.options.init_std)
        shape = (self.num_rows, options.embed_dim)
        table = weight(self, "table", shape, ("vocab", "embed"), init, place, self.dtype)
        row = batch["tokens"] - losses.first_column(self.num_rows, axis)
        x = losses.sum_over_shards(look_up(table, row, place), axis)
        if options.scaled_embeddings:
            x = x * math.sqrt(options.embed_dim)
        if options.positions == "learned":
            shape = (self.num_positions, options.embed_dim)
            positions = weight(self, "positions", shape, ("positions", "embed"), init, place, self.dtype)
            x = x + jnp.take(positions, batch["positions"], axis=0, mode="clip")
        x = place.activation(x, ("batch", "residual_sequence", "embed"))
        return dropout(x, options.dropout_rate if train else 0.0, keys, EMBEDDING_SITE)


class Layer(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)). [b, T, D] -> [b, T, D].

    With `post_norms` it is x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).
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
    ) -> tuple[jax.Array, None]:
        """Applies one layer.

        Args:
          x: [b, T, D].
          layer: int32 scalar, the layer's index in the whole model, for dropout and for what alternates.
          keys: one key for each sequence, keys [b].
          angles: see `Attention`.
          documents: see `Attention`.
          slots: see `Attention`.

        Returns:
          The activations, and None: `nn.scan` has no outputs to stack.
        """
        o, place = self.options, self.placement
        output_std = o.init_std / math.sqrt(2 * o.num_layers)
        rate = o.dropout_rate if self.train else 0.0
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, layer + 1)
        is_global = (layer + 1) % o.global_every == 0 if o.alternates else None
        own_angles, own_slots = _own(angles, is_global), _own(slots, is_global)
        norm = functools.partial(Norm, o.norm, o.norm_epsilon, o.biases, place, o.centered_scales)
        attention = Attention(
            o.num_heads, o.num_kv_heads, o.width_of_head, o.biases, o.attention, o.init_std, output_std, place,
            self.dtype, qkv_biases=o.qkv_biases, qk_epsilon=o.norm_epsilon if o.qk_norm else None, window=o.window,
            centered_scales=o.centered_scales, scale=o.score_scale, cap=o.attention_cap, name="attention",
        )  # fmt: skip
        mlp = Mlp(o.mlp_dim, o.activation, o.biases, o.init_std, output_std, place, self.dtype, name="mlp")
        x = checkpoint_name(x, RESIDUAL)
        normed = gather_sequence(norm(name="attention_norm")(x), place)
        # The planner reads in this name how many layers take which branch.
        attend = jax.named_scope(f"global_{o.num_global}_of_{o.num_layers}")(attention) if o.alternates else attention
        added = self._residual(attend(normed, own_angles, documents, slots=own_slots, is_global=is_global))
        added = norm(name="attention_post_norm")(added) if o.post_norms else added
        x = x + dropout(added, rate, keys, ATTENTION_SITE)
        normed = gather_sequence(norm(name="mlp_norm")(x), place)
        added = self._residual(mlp(normed))
        added = norm(name="mlp_post_norm")(added) if o.post_norms else added
        x = x + dropout(added, rate, keys, MLP_SITE)
        return self._residual(x), None

    def _residual(self, x: jax.Array) -> jax.Array:
        return self.placement.activation(x, ("batch", "residual_sequence", "embed"))


class Head(nn.Module):
    """The last norm and the logits: [b, T, D] -> [b, T, v]. The columns may be sharded over a manual axis."""

    options: DecoderOptions
    num_columns: int
    placement: Placement
    dtype: DTypeLike
    output_dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: jax.Array, table: jax.Array | None, axis: losses.Axis, loss: head.Loss = head.logits
    ) -> jax.Array:
        """Returns the logits, or what `loss` computes of them.

        Args:
          x: [b, T, D].
          table: the embedding table [v, D] (tied), or None for the head's own kernel.
          axis: the manual mesh axis over which the columns are sharded, or None.
          loss: (product, its activations, its weight) -> the result.
        """
        o, place = self.options, self.placement
        x = Norm(o.norm, o.norm_epsilon, o.biases, place, o.centered_scales, name="norm")(x)
        # Before the sequence is gathered: cotangents are summed over the manual axis while it is sharded, and the
        # gather moves the compute dtype, not the norm's float32.
        x = place.activation(losses.copy_to_shards(x, axis), ("batch", "residual_sequence", "embed"))
        product = head.Product(place, head.KERNEL if table is None else head.TABLE, self.output_dtype, o.logit_cap)
        if table is None:
            shape, init = (o.embed_dim, self.num_columns), normal(o.init_std)
            stored = weight(self, "kernel", shape, head.KERNEL, init, Placement.nowhere(), self.dtype)
        else:
            stored = table.astype(self.dtype)
        return loss(product, x, stored)


def layer_stack(
    options: Any,
    num_layers: int,
    placement: Placement,
    dtype: DTypeLike,
    train: bool,
    remat: str,
    layer: Any = Layer,
    num_given: int = 4,
) -> Any:
    """Returns a stack of `num_layers` layers as one scanned Linen module.

    Args:
      options: the model's shape, for `layer`.
      num_layers: how many.
      placement: where activations and gathered weights live.
      dtype: of the activations.
      train: whether to apply dropout.
      remat: one of the choices of `RematOptions.policy`.
      layer: the class of a layer, with the fields and arguments of `Layer`.
      num_given: how many arguments a layer takes after its index; all layers get the same.
    """
    policy = checkpoint_policy(remat, placement)
    layer = nn.remat(layer, policy=policy, prevent_cse=False) if policy is not None else layer
    stack = nn.scan(
        layer,
        variable_axes={"params": 0, CACHE: 0, NEW: 0},
        split_rngs={"params": True},
        in_axes=(0, *(nn.broadcast,) * num_given),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return stack(options, placement, dtype, train)


def run_layers(
    options: Any,
    layers: Any,
    x: jax.Array,
    indices: jax.Array,
    given: tuple[Any, ...],
    placement: Placement,
    dtype: DTypeLike,
    train: bool,
    remat: RematOptions,
    layer: Any = Layer,
) -> jax.Array:
    """Returns the activations after K layers, [b, T, D].

    Args:
      options: the model's shape, for `layer`.
      layers: parameters, each leaf [K, ...].
      x: [b, T, D].
      indices: int32 [K], of the layers in the whole model.
      given: further arguments of each layer, for the decoder's: keys, angles, documents, slots.
      placement: where activations and gathered weights live.
      dtype: of the activations.
      train: whether to apply dropout and `remat`.
      remat: what the backward pass recomputes. `every` has to divide K.
      layer: the class of a layer, with the fields and arguments of `Layer`.
    """
    policy, every = (remat.policy, remat.every) if train else ("none", 1)

    def run(x: jax.Array, some: tuple[Any, jax.Array], policy: str) -> jax.Array:
        layers, indices = some
        stack = layer_stack(options, indices.shape[0], placement, dtype, train, policy, layer, len(given))
        y: jax.Array = stack.apply({"params": layers}, x, indices, *given)[0]
        return y

    def group(x: jax.Array, some: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        # Unrolled: residuals of an inner scan would be copied out of it, which takes memory for another group.
        for i in range(every):
            one = jax.tree.map(operator.itemgetter(slice(i, i + 1)), some)
            x = run(x, one, "none" if i else policy)
        return x, None

    if every == 1 or policy == "none":
        return run(x, (layers, indices), policy)
    in_groups = lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:])  # noqa: E731
    return jax.lax.scan(group, x, jax.tree.map(in_groups, (layers, indices)))[0]


def angles_of(options: DecoderOptions, positions: jax.Array) -> jax.Array | ByKind | None:
    """Returns the rotary angles of int32 positions [b, T], float32 [b, T, H / 2]; None with learned positions."""
    if options.positions != "rotary":
        return None
    scaling = (options.rope_factor, options.rope_low, options.rope_high, options.rope_original_length)
    angles = rotary_angles(
        positions, options.width_of_head, options.rope_base, scaling if options.rope_factor != 1.0 else None
    )
    if not options.window or not options.rope_local_base:
        return angles
    local = rotary_angles(positions, options.width_of_head, options.rope_local_base, None)
    return ByKind(local, angles) if options.alternates else local


def slots_of(options: DecoderOptions, filled: jax.Array, own: jax.Array) -> Slots | ByKind:
    """Returns which slots of a cache the new token of each row attends to.

    Args:
      options: the model's shape.
      filled: int32 [b, C], 1 where a slot holds a token of the row, the new one included.
      own: int32 scalar, the slot of the new token.
    """
    if not options.window:
        return Slots(filled, own)
    local = Slots(latest(filled, options.window), own)
    return ByKind(local, Slots(filled, own)) if options.alternates else local


def _own(given: Any, is_global: jax.Array | None) -> Any:
    """Returns `given`, or the part of a `ByKind` that is for this layer."""
    if not isinstance(given, ByKind):
        return given
    assert is_global is not None, "all layers are of one kind"
    return jax.tree.map(lambda local, everywhere: jnp.where(is_global, everywhere, local), *given)
