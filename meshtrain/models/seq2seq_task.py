"""The task of an encoder-decoder: cross-entropy of the targets of packed pairs, and the share of pairs all right.

B: sequences in the global batch, b: sequences in a microbatch, T: tokens of targets in a sequence, S: tokens of
sources, D: embed dim, V: padded vocabulary.

A sequence holds several pairs. Tokens of sources and targets with the same segment id belong together.

params = {"embedding": {table [V, D], ...}, "encoder": {"layers": {... each leaf [layers, ...]}, "end": {"norm": ...}},
          "decoder": like "encoder", "head": {kernel [D, V]}}
Post-norm has no "end", and tied embeddings have no "head".
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.layout.placement import Placement
from meshtrain.layout.trees import leaves_with_paths
from meshtrain.models import abstract, losses
from meshtrain.models.attention import Memory
from meshtrain.models.decoder import layer_stack, run_layers
from meshtrain.models.entry import Entry
from meshtrain.models.remat import RematOptions
from meshtrain.models.seq2seq import (
    SOURCE,
    TARGET,
    Embedding,
    End,
    Head,
    Layer,
    Seq2SeqOptions,
    angles_of,
    params_of,
    side_keys,
)
from meshtrain.models.task import Batch, Loss, Params, Ratio, Task, sequence_keys, token_batch

NOTHING_AGAIN = RematOptions("none")


def seq2seq(
    options: Seq2SeqOptions,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: DTypeLike = jnp.float32,
    output_dtype: DTypeLike | None = None,
    remat: RematOptions = NOTHING_AGAIN,
    placement: Placement | None = None,
) -> Task:
    """Returns the task of an encoder-decoder. It has no stages: it does not run in a pipeline.

    Args:
      options: the model's shape.
      batch_size: B, sequences in the global batch.
      sequence_length: T, tokens of targets.
      dtype: of activations, and of weights when they are multiplied with them; parameters are float32.
      output_dtype: of the head's logits; None: `dtype`.
      remat: what the backward pass recomputes; `every` divides both stacks.
      placement: the shardings of activations and of gathered weights; None: one device, without shardings.
    """
    assert options.vocab_size, "resolve() replaces a vocab_size of 0 by that of the data"
    lengths = (options.source_length or sequence_length, sequence_length)
    model = Seq2Seq(options, *lengths, dtype, output_dtype or dtype, placement or Placement.nowhere())
    of_init = initializer(options, *lengths)
    return Task(
        init=of_init,
        loss=functools.partial(model.loss, remat=remat),
        batch=pair_batch(batch_size, *lengths, options.vocab_size),
        logits=model.all_logits,
        flops_per_token=flops_per_token(options, *lengths),
        attention_flops_per_token=attention_flops_per_token(options, *lengths),
        num_parameters=abstract.num_parameters(of_init, {"vocab": options.vocab_size}),
        takes_manual_axes=True,
        width=options.embed_dim,
        num_layers=options.num_encoder_layers + options.num_layers,
        vocab_size=options.vocab_size,
    )


def pair_batch(batch_size: int, source_length: int, target_length: int, vocab_size: int) -> dict[str, Entry]:
    """Returns `Task.batch`: the entries of `token_batch` for the targets, and three more for the sources.

    `tokens` are the decoder's inputs: a begin token and the target; `targets` the target and an end token.
    `source_tokens`, `source_segment_ids` (0 is padding) and `source_positions` are int32 [B, S].
    """
    ints = Entry((batch_size, source_length), jnp.int32, ("batch", "sequence"))
    tokens = dataclasses.replace(ints, below=vocab_size)
    source = {"source_tokens": tokens, "source_segment_ids": ints, "source_positions": ints}
    return {**token_batch(batch_size, target_length), **source}


@dataclasses.dataclass(frozen=True)
class Seq2Seq:
    """The functions of an encoder-decoder."""

    options: Seq2SeqOptions
    source_length: int
    target_length: int
    dtype: DTypeLike
    output_dtype: DTypeLike
    placement: Placement

    def encode(self, params: Params, batch: Batch, keys: jax.Array, train: bool, remat: RematOptions) -> Memory:
        """Returns what cross-attention reads: the encoder's output [b, S, D], and the pair of each token [b, S]."""
        tokens, positions = batch["source_tokens"], batch["source_positions"]
        segment_ids, keys = batch["source_segment_ids"], side_keys(keys, SOURCE)
        x = self.embed(params, SOURCE, tokens, positions, keys, train)
        given = (keys, angles_of(self.options, positions), segment_ids, None)
        return Memory(self.stack(params["encoder"], x, given, train, remat), segment_ids)

    def decode(
        self, params: Params, memory: Memory, batch: Batch, keys: jax.Array, train: bool, remat: RematOptions
    ) -> jax.Array:
        """Returns the decoder's output [b, T, D]."""
        tokens, positions = batch["tokens"], batch["positions"]
        keys = side_keys(keys, TARGET)
        x = self.embed(params, TARGET, tokens, positions, keys, train)
        given = (keys, angles_of(self.options, positions), batch["segment_ids"], None, memory)
        return self.stack(params["decoder"], x, given, train, remat)

    def embed(
        self, params: Params, side: str, tokens: jax.Array, positions: jax.Array, keys: jax.Array, train: bool
    ) -> jax.Array:
        """Returns the activations [b, L, D] that enter the first layer of a side."""
        embedding = Embedding(self.options, self.placement, self.dtype)
        rows = self.source_length if side == SOURCE else self.target_length
        x: Any = embedding.apply({"params": params["embedding"]}, side, tokens, positions, rows, keys, train)
        return x

    def stack(
        self, params: Params, x: jax.Array, given: tuple[Any, ...], train: bool, remat: RematOptions
    ) -> jax.Array:
        """Returns the activations after all layers of a stack and its last norm, [b, L, D].

        Args:
          params: of the stack.
          x: [b, L, D].
          given: further arguments of each `Layer`: keys, angles, pairs, slots, and for the decoder the memory.
          train: whether to apply dropout and `remat`.
          remat: what the backward pass recomputes.
        """
        layers, place, dtype = params["layers"], self.placement, self.dtype
        indices = jnp.arange(jax.tree.leaves(layers)[0].shape[0])
        x = run_layers(self.options, layers, x, indices, given, place, dtype, train, remat, Layer)
        y: Any = End(self.options, place).apply(params_of(params, "end"), x)
        return y

    def columns(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns logits [b, T, V] in the output dtype, padding included."""
        table = params["embedding"]["table"] if self.options.tied_embeddings else None
        head = Head(self.options, self.placement, self.dtype, self.output_dtype)
        logits: Any = head.apply(params_of(params, "head"), x, table)
        return logits

    def loss(self, params: Params, batch: Batch, rng: jax.Array, train: bool, *, remat: RematOptions) -> Loss:
        """Returns (sum of cross-entropies over targets, number of targets, metrics).

        Without dropout, in an evaluation, the metrics have `exact_match`, see there.
        """
        keys = sequence_keys(rng, batch)
        memory = self.encode(params, batch, keys, train, remat)
        columns = self.columns(params, self.decode(params, memory, batch, keys, train, remat))
        targets, weights, vocab_size = batch["targets"], batch["weights"], self.options.vocab_size
        total = losses.cross_entropy(columns, targets, weights, vocab_size)
        metrics = {} if train else {"exact_match": exact_match(losses.without_padding(columns, vocab_size), batch)}
        return total, jnp.sum(weights), metrics

    def all_logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, T, V] of a batch without dropout, padding at minus infinity."""
        keys = sequence_keys(jax.random.key(0), batch)
        memory = self.encode(params, batch, keys, False, NOTHING_AGAIN)
        x = self.decode(params, memory, batch, keys, False, NOTHING_AGAIN)
        return losses.without_padding(self.columns(params, x), self.options.vocab_size)


def exact_match(logits: jax.Array, batch: Batch) -> Ratio:
    """Returns the number of pairs whose targets are all the most probable token, and the number of pairs.

    That is the share of pairs which greedy decoding gets right: as long as all tokens before were right, it has the
    same input as here.

    Args:
      logits: float32 [b, T, V], padding at minus infinity.
      batch: with `targets`, `weights` and `segment_ids`. The tokens of a pair are neighbours. A pair counts if it has
        a target of weight above 0, and only such targets have to be right.
    """
    counts = batch["weights"] > 0
    wrong = counts & (jnp.argmax(logits, axis=-1) != batch["targets"])
    segment_ids = batch["segment_ids"]
    differs = segment_ids[:, 1:] != segment_ids[:, :-1]
    ends = jnp.ones_like(differs[:, :1])
    is_first, is_last = jnp.concatenate([ends, differs], axis=1), jnp.concatenate([differs, ends], axis=1)
    is_pair = is_last & (_sum_in_pair(counts, is_first) > 0)
    is_right = is_pair & (_sum_in_pair(wrong, is_first) == 0)
    return Ratio(jnp.sum(is_right.astype(jnp.float32)), jnp.sum(is_pair.astype(jnp.float32)))


def _sum_in_pair(marks: jax.Array, is_first: jax.Array) -> jax.Array:
    """Returns how many of a pair's tokens up to each one are marked, int32 [b, T]; both arguments are bool [b, T]."""
    total = jnp.cumsum(marks.astype(jnp.int32), axis=1)
    before_pair = jax.lax.cummax(jnp.where(is_first, total - marks, 0), axis=1)
    return total - before_pair


def init(options: Seq2SeqOptions, source_length: int, target_length: int, rng: jax.Array) -> Params:
    """Returns initial float32 parameters, each boxed with its logical axes. The values depend on `rng` alone."""
    nowhere, keys, dtype = Placement.nowhere(), jax.random.split(rng, 6), jnp.float32
    ints, sequence = jnp.zeros((1, 1), jnp.int32), jax.random.split(rng, 1)
    x = jnp.zeros((1, 1, options.embed_dim))
    embedding, end = Embedding(options, nowhere, dtype), End(options, nowhere)
    # Both sides begin with the same key: a shared table has the same values in both.
    tables = [
        embedding.init(keys[0], side, ints, ints, rows, sequence, False)["params"]
        for side, rows in ((SOURCE, source_length), (TARGET, target_length))
    ]
    params: dict[str, Any] = {"embedding": {**tables[0], **tables[1]}}
    given: tuple[Any, ...] = (sequence, angles_of(options, ints), None, None)
    stacks = (
        ("encoder", options.num_encoder_layers, given),
        ("decoder", options.num_layers, (*given, Memory(x, None))),
    )
    for number, (name, num_layers, given_here) in enumerate(stacks):
        layers = layer_stack(options, num_layers, nowhere, dtype, False, "none", Layer, len(given_here))
        of_layers = layers.init(keys[1 + number], x, jnp.arange(num_layers), *given_here)["params"]
        params[name] = {"layers": of_layers, **_named("end", end.init(keys[3 + number], x))}
    table = jnp.zeros((options.padded_vocab_size, options.embed_dim)) if options.tied_embeddings else None
    return {**params, **_named("head", Head(options, nowhere, dtype, dtype).init(keys[5], x, table))}


def _named(name: str, variables: Any) -> dict[str, Any]:
    """Returns {name: parameters}, or {} for a module without parameters."""
    return {name: variables["params"]} if variables else {}


@functools.cache
def initializer(options: Seq2SeqOptions, source_length: int, target_length: int) -> Callable[[jax.Array], Params]:
    """Returns `Task.init`, the same function for equal arguments: JAX caches what it traces by the function."""
    return functools.partial(init, options, source_length, target_length)


def flops_per_token(options: Seq2SeqOptions, source_length: int, target_length: int) -> float:
    """Returns model FLOPs of a forward and backward pass for one token of a target, with its share of the sources.

    6 for each weight that multiplies a token, times S or T tokens, over T; and the products of attention. The encoder,
    and the keys and values of cross-attention, read tokens of sources; the rest of the decoder and the head those of
    targets.
    """
    params, _ = abstract.named_params(initializer(options, source_length, target_length))
    total = 6.0 * target_length * options.vocab_size * options.embed_dim
    for path, leaf in leaves_with_paths(params):
        if "/layers/" in path and leaf.ndim > 2 and not path.endswith("_bias"):
            reads_source = path.startswith("encoder/") or path.endswith(
                ("/cross_attention/key", "/cross_attention/value")
            )
            total += 6.0 * math.prod(leaf.shape) * (source_length if reads_source else target_length)
    return total / target_length + attention_flops_per_token(options, source_length, target_length)


def attention_flops_per_token(options: Seq2SeqOptions, source_length: int, target_length: int) -> float:
    """Returns the FLOPs of attention in a forward and backward pass for one token of a target: 12 N H pairs / T.

    N heads of width H compute scores of, and sums over, pairs of a query and a key: S S in each layer of the encoder, T
    T and T S in each layer of the decoder (full attention).
    """
    pairs = options.num_encoder_layers * source_length**2
    pairs += options.num_layers * target_length * (target_length + source_length)
    return 12.0 * options.num_heads * options.width_of_head * pairs / target_length
