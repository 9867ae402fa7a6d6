"""The modules of a decoder-only transformer, of the GPT-2 or the Llama family by configuration.

b: sequences in a microbatch, T: tokens a sequence, D: embed dim, v: rows of the padded vocabulary that are held here,
K: layers in a stack.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from meshtrain.layout.placement import Placement
from meshtrain.models import losses
from meshtrain.models.attention import Attention
from meshtrain.models.layers import Mlp, Norm, dropout, normal, rotary_angles, weight
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
        128, "the vocabulary is padded to a multiple of this, without probability", minimum=1, dim="vocab"
    )
    dropout_rate: float = option(0.0, "probability of zero, on embeddings and on what each block adds", minimum=0.0)
    positions: str = option("rotary", "how positions are told", choices=("rotary", "learned"))
    max_positions: int = option(
        0, "rows of learned positions; 0 means sequence_length", minimum=0, only_for={"positions": ("learned",)}
    )
    rope_base: float = option(10000.0, "rotary base (theta)", minimum=1.0, only_for=ROTARY)
    rope_factor: float = option(1.0, "Llama-3 rope scaling factor; 1 means none", minimum=1.0, only_for=ROTARY)
    rope_low: float = option(1.0, "Llama-3 rope scaling: low frequency factor", only_for=ROTARY)
    rope_high: float = option(4.0, "Llama-3 rope scaling: high frequency factor", only_for=ROTARY)
    rope_original_length: int = option(
        8192, "Llama-3 rope scaling: tokens a sequence had before", minimum=1, only_for=ROTARY
    )
    norm: str = option("rmsnorm", "normalization", choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = option(1e-5, "added to the variance", minimum=0.0)
    activation: str = option("swiglu", "of the mlp", choices=("swiglu", "gelu"))
    tied_embeddings: bool = option(False, "the head uses the embedding table")
    biases: bool = option(False, "biases in projections, mlp and LayerNorm")
    init_std: float = option(0.02, "standard deviation of initial weights", minimum=0.0)
    attention: str = option(
        "auto",
        "implementation of attention: xla, cudnn (GPU), splash (TPU; interpreted elsewhere, slowly), auto",
        choices=("auto", "xla", "cudnn", "splash"),
    )
    within_documents: bool = option(True, "attention sees only its own document of a packed sequence")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def width_of_head(self) -> int:
        """The head dim in force."""
        return self.head_dim or self.embed_dim // self.num_heads


class Embedding(nn.Module):
    """Tokens to activations: int32 [b, T] -> [b, T, D]. The table's rows may be split over a manual axis."""

    options: DecoderOptions
    num_rows: int
    num_positions: int
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, batch: Batch, keys: jax.Array, train: bool, axis: losses.Axis) -> jax.Array:
        """Looks tokens up, adds learned positions, drops."""
        options, place, init = self.options, self.placement, normal(self.options.init_std)
        shape = (self.num_rows, options.embed_dim)
        table = weight(self, "table", shape, ("vocab", "embed"), init, place, self.dtype)
        row = batch["tokens"] - losses.first_column(self.num_rows, axis)
        x = losses.sum_over_shards(look_up(table, row, place), axis)
        if options.positions == "learned":
            shape = (self.num_positions, options.embed_dim)
            positions = weight(self, "positions", shape, ("positions", "embed"), init, place, self.dtype)
            x = x + jnp.take(positions, batch["positions"], axis=0, mode="clip")
        x = place.activation(x, ("batch", "residual_sequence", "embed"))
        return dropout(x, options.dropout_rate if train else 0.0, keys, EMBEDDING_SITE)


class Layer(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)). [b, T, D] -> [b, T, D]."""

    options: DecoderOptions
    placement: Placement
    dtype: DTypeLike
    train: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, layer: jax.Array, keys: jax.Array, angles: jax.Array | None, documents: jax.Array | None
    ) -> tuple[jax.Array, None]:
        """Applies the layer with this index; the second result is what `nn.scan` would stack."""
        o, place = self.options, self.placement
        output_std = o.init_std / math.sqrt(2 * o.num_layers)
        rate = o.dropout_rate if self.train else 0.0
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, layer + 1)
        norm = functools.partial(Norm, o.norm, o.norm_epsilon, o.biases, place)
        attention = Attention(
            o.num_heads, o.num_kv_heads, o.width_of_head, o.biases, o.attention, o.init_std, output_std, place,
            self.dtype, name="attention",
        )  # fmt: skip
        mlp = Mlp(o.mlp_dim, o.activation, o.biases, o.init_std, output_std, place, self.dtype, name="mlp")
        x = checkpoint_name(x, RESIDUAL)
        normed = place.activation(norm(name="attention_norm")(x), ("batch", "sequence", "embed"))
        x = x + dropout(self._residual(attention(normed, angles, documents)), rate, keys, ATTENTION_SITE)
        normed = place.activation(norm(name="mlp_norm")(x), ("batch", "sequence", "embed"))
        x = x + dropout(self._residual(mlp(normed)), rate, keys, MLP_SITE)
        return self._residual(x), None

    def _residual(self, x: jax.Array) -> jax.Array:
        return self.placement.activation(x, ("batch", "residual_sequence", "embed"))


class Head(nn.Module):
    """The last norm and the logits: [b, T, D] -> [b, T, v]. The columns may be split over a manual axis."""

    options: DecoderOptions
    num_columns: int
    placement: Placement
    dtype: DTypeLike
    output_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array | None, axis: losses.Axis) -> jax.Array:
        """Returns logits with the embedding `table` [v, D] (tied), or with a kernel of its own where it is None."""
        o, place = self.options, self.placement
        x = Norm(o.norm, o.norm_epsilon, o.biases, place, name="norm")(x)
        # In this order the cotangents of the shards are summed where positions are still split.
        x = place.activation(losses.copy_to_shards(x, axis), ("batch", "sequence", "embed"))
        if table is None:
            shape = (o.embed_dim, self.num_columns)
            kernel = weight(self, "kernel", shape, ("embed", "vocab"), normal(o.init_std), place, self.dtype)
        else:
            kernel = place.weight(table.astype(self.dtype), ("vocab", "embed")).T
        logits = jnp.matmul(x, kernel, preferred_element_type=self.output_dtype)
        return place.activation(logits, ("batch", "sequence", "vocab"))


def layer_stack(
    options: DecoderOptions, num_layers: int, placement: Placement, dtype: DTypeLike, train: bool, remat: str
) -> Any:
    """Returns a stack of `num_layers` layers as one scanned Linen module."""
    policy = checkpoint_policy(remat, placement)
    layer: Any = nn.remat(Layer, policy=policy, prevent_cse=False) if policy is not None else Layer
    stack = nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return stack(options, placement, dtype, train)


def run_layers(
    options: DecoderOptions,
    layers: Any,
    x: jax.Array,
    indices: jax.Array,
    given: tuple[Any, ...],
    placement: Placement,
    dtype: DTypeLike,
    train: bool,
    remat: RematOptions,
) -> jax.Array:
    """Returns the activations after K layers, [b, T, D].

    Args:
      options: the model's shape.
      layers: parameters, each leaf [K, ...].
      x: [b, T, D].
      indices: int32 [K], of the layers in the whole model.
      given: what each layer is given besides: keys, angles, documents.
      placement: where activations and gathered weights live.
      dtype: of the activations.
      train: whether to drop, and to keep anything for a backward pass.
      remat: what that computes again. `every` has to divide K.
    """
    policy, every = (remat.policy, remat.every) if train else ("none", 1)

    def run(x: jax.Array, some: tuple[Any, jax.Array], policy: str) -> jax.Array:
        layers, indices = some
        stack = layer_stack(options, indices.shape[0], placement, dtype, train, policy)
        y: jax.Array = stack.apply({"params": layers}, x, indices, *given)[0]
        return y

    def group(x: jax.Array, some: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        # One by one: what a loop inside the loop keeps would be copied out of it, memory for another group.
        for i in range(every):
            one = jax.tree.map(operator.itemgetter(slice(i, i + 1)), some)
            x = run(x, one, "none" if i else policy)
        return x, None

    if every == 1 or policy == "none":
        return run(x, (layers, indices), policy)
    in_groups = lambda leaf: leaf.reshape(-1, every, *leaf.shape[1:])  # noqa: E731
    return jax.lax.scan(group, x, jax.tree.map(in_groups, (layers, indices)))[0]


def angles_of(options: DecoderOptions, positions: jax.Array) -> jax.Array | None:
    """Returns the rotary angles of int32 positions [b, T], float32 [b, T, H / 2]; None with learned positions."""
    if options.positions != "rotary":
        return None
    scaling = (options.rope_factor, options.rope_low, options.rope_high, options.rope_original_length)
    return rotary_angles(
        positions, options.width_of_head, options.rope_base, scaling if options.rope_factor != 1.0 else None
    )
