"""Decoder-only transformers of the GPT-2 and Llama families, by configuration.

B: sequences in the global batch, b: in a microbatch, T: tokens a sequence, D: embed dim, V: padded vocabulary,
v: columns of it held by one stage, K: layers in a stack.

params = {"embedding": {table [V, D], positions [T, D]}, "layers": {... each leaf [layers, ...]},
          "head": {"norm": ..., kernel [D, V]}}
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from meshtrain.layout.partition import Placement
from meshtrain.models import losses
from meshtrain.models.attention import Attention, same_document
from meshtrain.models.layers import Mlp, Norm, dropout, normal, rotary_angles, weight
from meshtrain.models.remat import RESIDUAL, checkpoint_policy
from meshtrain.models.task import Batch, Loss, Params, Stages, Task, sequence_keys
from meshtrain.options import option

EMBEDDING_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class DecoderOptions:
    """The shape of the model."""

    num_layers: int = option(4, "transformer layers", minimum=1)
    embed_dim: int = option(128, "width of the residual stream", minimum=1)
    mlp_dim: int = option(512, "inner width of the mlp", minimum=1)
    num_heads: int = option(4, "query heads", minimum=1)
    num_kv_heads: int = option(4, "key and value heads; fewer than num_heads is grouped-query attention", minimum=1)
    head_dim: int = option(0, "width of a head; 0 means embed_dim / num_heads", minimum=0)
    vocab_size: int = option(257, "tokens in the vocabulary, without padding", minimum=1)
    vocab_multiple: int = option(128, "the vocabulary is padded to a multiple of this; padding has no probability", minimum=1)
    dropout_rate: float = option(0.0, "probability of zero, on embeddings and on what each block adds", minimum=0.0)
    positions: str = option("rotary", "how positions are told", choices=("rotary", "learned"))
    max_positions: int = option(0, "rows of learned positions; 0 means sequence_length", minimum=0)
    rope_base: float = option(10000.0, "rotary base (theta)", minimum=1.0)
    rope_factor: float = option(1.0, "Llama-3 rope scaling factor; 1 means none", minimum=1.0)
    rope_low: float = option(1.0, "Llama-3 rope scaling: low frequency factor")
    rope_high: float = option(4.0, "Llama-3 rope scaling: high frequency factor")
    rope_original_length: int = option(8192, "Llama-3 rope scaling: sequence length before scaling, in tokens", minimum=1)
    norm: str = option("rmsnorm", "normalization", choices=("rmsnorm", "layernorm"))
    norm_epsilon: float = option(1e-5, "added to the variance", minimum=0.0)
    activation: str = option("swiglu", "of the mlp", choices=("swiglu", "gelu"))
    tied_embeddings: bool = option(False, "the head uses the embedding table")
    biases: bool = option(False, "biases in projections, mlp and LayerNorm")
    init_std: float = option(0.02, "standard deviation of initial weights", minimum=0.0)
    attention: str = option("auto", "implementation of attention", choices=("auto", "xla", "cudnn"))
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
        here = (row >= 0) & (row < self.num_rows)
        x = jnp.take(table, jnp.where(here, row, 0), axis=0, mode="clip")
        x = losses.sum_over_shards(jnp.where(here[..., None], x, 0), axis)
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
        self, x: jax.Array, layer: jax.Array, keys: jax.Array, angles: jax.Array | None, mask: jax.Array | None
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
        x = x + dropout(self._residual(attention(normed, angles, mask)), rate, keys, ATTENTION_SITE)
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

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array | None, axis: losses.Axis) -> jax.Array:
        """Returns logits with the embedding `table` [v, D] (tied), or with a kernel of its own where it is None."""
        o, place = self.options, self.placement
        x = Norm(o.norm, o.norm_epsilon, o.biases, place, name="norm")(x)
        x = losses.copy_to_shards(place.activation(x, ("batch", "sequence", "embed")), axis)
        if table is None:
            shape = (o.embed_dim, self.num_columns)
            kernel = weight(self, "kernel", shape, ("embed", "vocab"), normal(o.init_std), place, self.dtype)
        else:
            kernel = place.weight(table.astype(self.dtype), ("vocab", "embed")).T
        return place.activation(x @ kernel, ("batch", "sequence", "vocab"))


def _layers(
    options: DecoderOptions, num_layers: int, placement: Placement, dtype: DTypeLike, train: bool, remat: str
) -> Any:
    """Returns a stack of `num_layers` layers as one scanned Linen module."""
    layer: Any = Layer
    if remat != "none":
        layer = nn.remat(Layer, policy=checkpoint_policy(remat), prevent_cse=False)
    stack = nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return stack(options, placement, dtype, train)


def decoder(
    options: DecoderOptions,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    placement: Placement | None = None,
) -> Task:
    """Returns the task of a decoder: next-token cross-entropy on packed sequences.

    Args:
      options: the model's shape.
      batch_size: B, sequences in the global batch.
      sequence_length: T, tokens.
      dtype: of activations and of the weights that meet them; parameters are float32.
      remat: the policy's name (`remat.py`). In a pipeline the backward pass computes each stage again from its input, so
        `full` adds nothing there.
      placement: where activations and gathered weights live; None means wherever their inputs are.
    """
    place = placement or Placement.nowhere()
    num_positions = options.max_positions or sequence_length

    def embedding(num_rows: int, placement: Placement = place) -> Embedding:
        return Embedding(options, num_rows, num_positions, placement, dtype)

    def first(params: Params, batch: Batch, rng: jax.Array, train: bool, axis: losses.Axis = None) -> jax.Array:
        num_rows = params["embedding"]["table"].shape[0]
        variables = {"params": params["embedding"]}
        return embedding(num_rows).apply(variables, batch, sequence_keys(rng, batch), train, axis)

    def repeated(
        layers: Params, x: jax.Array, batch: Batch, rng: jax.Array, start: jax.Array | int, train: bool, policy: str
    ) -> jax.Array:
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        stack = _layers(options, num_layers, place, dtype, train, policy if train else "none")
        indices = start + jnp.arange(num_layers)
        angles = _angles(options, batch["positions"])
        mask = same_document(batch["segment_ids"]) if options.within_documents else None
        x, _ = stack.apply({"params": layers}, x, indices, sequence_keys(rng, batch), angles, mask)
        return x

    def head(params: Params, x: jax.Array, axis: losses.Axis = None) -> jax.Array:
        table = params["embedding"]["table"] if options.tied_embeddings else None
        num_columns = table.shape[0] if table is not None else params["head"]["kernel"].shape[1]
        return Head(options, num_columns, place, dtype).apply({"params": params["head"]}, x, table, axis)

    def logits(params: Params, x: jax.Array, axis: losses.Axis = None) -> jax.Array:
        return losses.without_padding(head(params, x, axis), options.vocab_size, axis)

    def last(params: Params, x: jax.Array, batch: Batch, axis: losses.Axis = None) -> Loss:
        columns = head(params, x, axis)
        total = losses.cross_entropy(columns, batch["targets"], batch["weights"], options.vocab_size, axis)
        return total, jnp.sum(batch["weights"]), {}

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        x = first(params, batch, rng, train)
        return last(params, repeated(params["layers"], x, batch, rng, 0, train, remat), batch)

    def all_logits(params: Params, batch: Batch) -> jax.Array:
        rng = jax.random.key(0)
        x = repeated(params["layers"], first(params, batch, rng, False), batch, rng, 0, False, "none")
        return logits(params, x)

    ints = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    batch = {name: ints for name in ("tokens", "targets", "segment_ids", "positions")}
    batch["weights"] = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.float32)
    inner = "none" if remat == "full" else remat
    num_parameters = count_parameters(options, num_positions)
    return Task(
        init=functools.partial(_init, options, num_positions),
        loss=loss,
        batch=batch,
        logits=all_logits,
        stages=Stages(options.num_layers, first, functools.partial(repeated, policy=inner), last, logits),
        flops_per_token=flops_per_token(options, num_parameters, num_positions, sequence_length),
        num_parameters=num_parameters,
    )


def _angles(options: DecoderOptions, positions: jax.Array) -> jax.Array | None:
    if options.positions != "rotary":
        return None
    scaling = (options.rope_factor, options.rope_low, options.rope_high, options.rope_original_length)
    return rotary_angles(
        positions, options.width_of_head, options.rope_base, scaling if options.rope_factor != 1.0 else None
    )


def _init(options: DecoderOptions, num_positions: int, rng: jax.Array) -> Params:
    """Returns initial float32 parameters, each boxed with its logical axes. The values depend on `rng` alone."""
    nowhere = Placement.nowhere()
    keys = jax.random.split(rng, 3)
    ints = jnp.zeros((1, 1), jnp.int32)
    batch = {"tokens": ints, "positions": ints}
    sequence = jax.random.split(rng, 1)
    rows = options.padded_vocab_size
    x = jnp.zeros((1, 1, options.embed_dim))
    embedding = Embedding(options, rows, num_positions, nowhere, jnp.float32)
    layers = _layers(options, options.num_layers, nowhere, jnp.float32, False, "none")
    head = Head(options, rows, nowhere, jnp.float32)
    table = jnp.zeros((rows, options.embed_dim)) if options.tied_embeddings else None
    arguments = (jnp.arange(options.num_layers), sequence, _angles(options, ints), None)
    return {
        "embedding": embedding.init(keys[0], batch, sequence, False, None)["params"],
        "layers": layers.init(keys[1], x, *arguments)["params"],
        "head": head.init(keys[2], x, table, None)["params"],
    }


def count_parameters(options: DecoderOptions, num_positions: int) -> int:
    """Returns the number of parameters from shapes alone, without the padding of the vocabulary."""
    unpadded = dataclasses.replace(options, vocab_multiple=1)
    shapes = jax.eval_shape(functools.partial(_init, unpadded, num_positions), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nn.unbox(shapes)))


def flops_per_token(
    options: DecoderOptions, num_parameters: int, num_positions: int, sequence_length: int
) -> float:
    """Returns model FLOPs of a forward and backward pass for one token: 6 N + 12 L T N_heads H (full attention).

    N counts the weights that take part in a matmul: the lookup table only where it is also the head, positions never
    (PaLM, Chowdhery et al. 2022, appendix B).
    """
    lookups = 0 if options.tied_embeddings else options.vocab_size * options.embed_dim
    if options.positions == "learned":
        lookups += num_positions * options.embed_dim
    attention = 12 * options.num_layers * sequence_length * options.num_heads * options.width_of_head
    return 6.0 * (num_parameters - lookups) + attention
