"""Modules of an encoder-decoder transformer (Vaswani et al. 2017), with options for the usual variants.

b: sequences in a microbatch, T: tokens of targets in a sequence, S: tokens of sources, L: T or S, D: embed dim, H: head
dim, V: padded vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from meshtrain.models import vocabulary
from meshtrain.models.attention.multi_head import Memory, MultiHead, Slots
from meshtrain.models.decoder_options import ROTARY, TransformerShape
from meshtrain.models.layers import Mlp, Norm, dropout, gather_sequence, normal, weight
from meshtrain.models.remat import MIDDLE, RESIDUAL
from meshtrain.models.rotary import rotary_angles
from meshtrain.models.task import Params
from meshtrain.models.transformer.decoder import ATTENTION_SITE, EMBEDDING_SITE, MLP_SITE
from meshtrain.options import option
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.saved import mark

CROSS_SITE = MLP_SITE + 1
SOURCE, TARGET = "source", "target"
SINUSOID_BASE = 10000.0  # Vaswani et al. 2017, section 3.5


@dataclasses.dataclass(frozen=True)
class Seq2SeqOptions(TransformerShape):
    """The options of the encoder-decoder: its sizes and its variants."""

    num_encoder_layers: int = option(4, "layers of the encoder", minimum=1, maximum=100_000)
    num_layers: int = option(4, "layers of the decoder", minimum=1, maximum=100_000)
    embed_dim: int = option(128, "width of the residual stream", minimum=1, dim="embed")
    mlp_dim: int = option(512, "inner width of the mlp", minimum=1, dim="mlp")
    num_heads: int = option(4, "attention heads", minimum=1, dim="heads")
    head_dim: int = option(0, "width of a head; 0 means embed_dim / num_heads", minimum=0)
    source_length: int = option(
        0, "source tokens in a sequence; 0: sequence_length, the number of target tokens", minimum=0
    )
    vocab_size: int = option(
        0, "tokens in the vocabulary of sources and targets, without padding; 0: the data's vocabulary", minimum=0
    )
    vocab_multiple: int = option(
        128,
        "the vocabulary is padded to a multiple of this number; padding gets no probability",
        minimum=1,
        dim="vocab",
    )
    begin_id: int = option(0, "the token that ends a source and starts a target", minimum=0)
    dropout_rate: float = option(
        0.1, "dropout probability, on embeddings and on the outputs of attention and mlp", minimum=0.0
    )
    positions: str = option("sinusoidal", "encoding of positions", choices=("sinusoidal", "learned", "rotary"))
    rope_base: float = option(10000.0, "rotary base (theta)", minimum=1.0, only_for=ROTARY)
    norm: str = option("layernorm", "normalization", choices=("layernorm", "rmsnorm"))
    norm_placement: str = option(
        "pre", "pre: normalize inputs of attention and mlp, and the last output; post: each residual sum",
        choices=("pre", "post"),
    )  # fmt: skip
    norm_epsilon: float = option(1e-5, "number added to the variance, for stability", minimum=0.0)
    activation: str = option("relu", "activation function of the mlp", choices=("relu", "gelu", "swiglu"))
    tied_embeddings: bool = option(True, "sources, targets and the head share one table; false: each has its own")
    biases: bool = option(True, "biases in projections, mlp and LayerNorm")
    init_std: float = option(
        0.0, "standard deviation of initial weights; 0 means embed_dim^-0.5, at which embeddings have a variance of 1",
        minimum=0.0,
    )  # fmt: skip
    loss_chunk: int = option(
        0, "tokens per device whose logits the loss computes at a time; 0: tokens with logits of 512 MiB", minimum=0
    )
    attention: str = option(
        "auto",
        "implementation of attention: xla, blockwise (linear memory), cudnn (GPU), splash (TPU; interpreted "
        "elsewhere, slowly), auto",
        choices=("auto", "xla", "blockwise", "cudnn", "splash"),
    )

    @property
    def weight_std(self) -> float:
        """The standard deviation of initial weights: `init_std`, or `embed_dim`^-0.5 if it is 0."""
        return self.init_std or self.embed_dim**-0.5


class Embedding(nn.Module):
    """The embedding of L source or target tokens, int32 [b, L] -> [b, L, D], scaled by sqrt(D), plus positions.

    Dropout is applied to the sum.

    The parameters are one `table` for sources and targets, or `source_table` and `target_table`. With learned positions
    there are also `source_positions` and `target_positions`.
    """

    options: Seq2SeqOptions
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, side: str, tokens: jax.Array, positions: jax.Array, num_positions: int, keys: jax.Array, train: bool
    ) -> jax.Array:
        """Returns the embedding of source or target tokens, [b, L, D].

        Args:
          side: `source` or `target`, which selects the tables.
          tokens: int32 [b, L].
          positions: position of each token, int32 [b, L].
          num_positions: number of rows in this side's table of learned positions.
          keys: a random key for each sequence's dropout, [b].
          train: whether to apply dropout.
        """
        o, place, init = self.options, self.placement, normal(self.options.weight_std)
        name, shape = "table" if o.tied_embeddings else f"{side}_table", (o.padded_vocab_size, o.embed_dim)
        x = vocabulary.look_up(weight(self, name, shape, ("vocab", "embed"), init, place, self.dtype), tokens, place)
        if o.positions == "learned":
            shape = (num_positions, o.embed_dim)
            table = weight(self, f"{side}_positions", shape, ("positions", "embed"), init, place, self.dtype)
            x = x + jnp.take(table, positions, axis=0, mode="clip")
        x = x * math.sqrt(o.embed_dim)
        if o.positions == "sinusoidal":
            x = x + sinusoids(positions, o.embed_dim).astype(x.dtype)
        x = place.activation(x, ("batch", "residual_sequence", "embed"))
        return dropout(x, o.dropout_rate if train else 0.0, keys, EMBEDDING_SITE)


class Layer(nn.Module):
    """A layer of the encoder or of the decoder, [b, L, D] -> [b, L, D] for L source or target tokens.

    A layer of the encoder has full self-attention and an mlp. A layer of the decoder has causal self-attention,
    cross-attention to the encoder's output (memory), and an mlp. The layer belongs to the decoder if it is called with
    a memory or with the memory's cache slots.
    """

    options: Seq2SeqOptions
    placement: Placement
    dtype: DTypeLike
    train: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        layer: jax.Array,
        keys: jax.Array,
        angles: jax.Array | None,
        documents: jax.Array | None,
        slots: Slots | None,
        memory: Memory | None = None,
        memory_slots: Slots | None = None,
    ) -> tuple[jax.Array, None]:
        """Returns the output of the layer, [b, L, D], and None, because `nn.scan` has no outputs to stack.

        Args:
          x: activations [b, L, D].
          layer: int32 scalar, the layer's index in encoder or decoder, for dropout.
          keys: a random key for each sequence's dropout, [b], different for encoder and decoder.
          angles: rotary angles float32 [b, L, H / 2]; None: no rotary positions.
          documents: int32 [b, L], the pair to which each token belongs; None: one pair.
          slots: cache slots of previous tokens in generation, for self-attention; None: no cache.
          memory: the encoder's output and the pair of each source token; None in the encoder, or if the memory is in
            the cache.
          memory_slots: cache slots of the memory in generation, for cross-attention; None: no cache.
        """
        o, in_decoder = self.options, memory is not None or memory_slots is not None
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, layer + 1)
        # As in the decoder, the initial output of a layer shrinks with the number of additions to the residual stream.
        num_added = 3 * o.num_layers if in_decoder else 2 * o.num_encoder_layers
        std = o.weight_std
        output_std = std / math.sqrt(num_added) if o.norm_placement == "pre" else std

        def attention(name: str, causal: bool) -> MultiHead:
            attends = dataclasses.replace(o.attends, causal=causal)
            return MultiHead(attends, std, output_std, self.placement, self.dtype, name=name)

        x = mark(x, RESIDUAL)
        own = attention("attention", in_decoder)
        x = self._added("attention", lambda y: own(y, angles, documents, slots=slots), x, keys, ATTENTION_SITE)
        if in_decoder:
            cross = attention("cross_attention", False)
            read = lambda y: cross(y, None, documents, memory, memory_slots)  # noqa: E731
            x = self._added("cross_attention", read, x, keys, CROSS_SITE)
        mlp = Mlp(o.mlp_dim, o.activation, o.biases, std, output_std, self.placement, self.dtype, name="mlp")
        return self._added("mlp", mlp, x, keys, MLP_SITE), None

    def _added(
        self, name: str, function: Callable[[jax.Array], jax.Array], x: jax.Array, keys: jax.Array, site: int
    ) -> jax.Array:
        """Returns x + dropout(function(norm(x))), or norm(x + dropout(function(x))) with post-norm; [b, L, D].

        Args:
          name: prefix of the norm's name.
          function: attention or mlp, [b, L, D] -> [b, L, D].
          x: activations [b, L, D].
          keys: a random key for each sequence's dropout, [b].
          site: number that distinguishes the dropouts of a layer.
        """
        o, place = self.options, self.placement
        norm = Norm(o.norm, o.norm_epsilon, o.biases, place, name=f"{name}_norm")
        y = norm(x) if o.norm_placement == "pre" else x
        y = self._residual(function(gather_sequence(y, place)))
        x = mark(x + dropout(y, o.dropout_rate if self.train else 0.0, keys, site), MIDDLE)
        return self._residual(norm(x) if o.norm_placement == "post" else x)

    def _residual(self, x: jax.Array) -> jax.Array:
        return self.placement.activation(x, ("batch", "residual_sequence", "embed"))


class End(nn.Module):
    """The norm after the last layer of encoder or decoder, [b, L, D] -> [b, L, D] for L source or target tokens.

    With post-norm each layer already ends with a norm, so `End` returns its input.
    """

    options: Seq2SeqOptions
    placement: Placement

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x` with each position normalized; with post-norm, returns `x` itself."""
        o = self.options
        if o.norm_placement == "pre":
            x = Norm(o.norm, o.norm_epsilon, o.biases, self.placement, name="norm")(x)
        return gather_sequence(x, self.placement)


class Head(nn.Module):
    """The head of the decoder, which computes logits: [b, T, D] -> [b, T, padded vocabulary]."""

    options: Seq2SeqOptions
    placement: Placement
    dtype: DTypeLike
    output_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array | None, loss: vocabulary.Loss = vocabulary.logits) -> jax.Array:
        """Returns the result of `loss`: by default logits [b, T, padded vocabulary] in the output dtype.

        Args:
          x: activations after the last layer, [b, T, D].
          table: embedding table [V, D], which is the head's weight if embeddings are tied; None: a separate weight.
          loss: (settings of the matmul, x, weight) -> logits, or a loss that computes the logits in chunks.
        """
        o = self.options
        product = vocabulary.Product(
            self.placement, vocabulary.KERNEL if table is None else vocabulary.TABLE, self.output_dtype
        )
        if table is None:
            shape, init = (o.embed_dim, o.padded_vocab_size), normal(o.weight_std)
            stored = weight(self, "kernel", shape, vocabulary.KERNEL, init, Placement.single_device(), self.dtype)
        else:
            stored = table.astype(self.dtype)
        return loss(product, x, stored)


def sinusoids(positions: jax.Array, embed_dim: int) -> jax.Array:
    """Returns the sinusoidal encoding of positions, float32 [b, L, D] (Vaswani et al. 2017, section 3.5).

    Channel 2i is sin(position / 10000^(2i / D)), and channel 2i + 1 is the cosine of the same angle.

    Args:
      positions: int32 [b, L].
      embed_dim: D, even.
    """
    angles = rotary_angles(positions, embed_dim, SINUSOID_BASE, None)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, embed_dim)


def angles_of(options: Seq2SeqOptions, positions: jax.Array) -> jax.Array | None:
    """Returns the rotary angles of positions int32 [b, L], float32 [b, L, H / 2]; None without rotary positions."""
    if options.positions != "rotary":
        return None
    return rotary_angles(positions, options.width_of_head, options.rope_base, None)


def side_keys(keys: jax.Array, side: str) -> jax.Array:
    """Returns random keys for one side, [b], derived from the keys of the sequences, [b].

    `side` is `source` for the encoder or `target` for the decoder, which thus get different random numbers.
    """
    return jax.vmap(functools.partial(jax.random.fold_in, data=(SOURCE, TARGET).index(side)))(keys)


def params_of(params: Params, name: str) -> dict[str, Params]:
    """Returns the variables with which `apply` runs the module `name`: {"params": params[name]}.

    The result is {} if the module has no parameters.
    """
    return {"params": params[name]} if name in params else {}
