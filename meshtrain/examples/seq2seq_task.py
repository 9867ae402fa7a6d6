"""The task of an encoder-decoder: cross-entropy of the targets of packed pairs, and the share of exactly correct pairs.

B: sequences in the global batch, b: sequences in a microbatch, T: tokens of targets in a sequence, S: tokens of
sources, D: embed dim, V: padded vocabulary, K: layers of the decoder, N: heads, H: head dim, R: rows of a cache, P:
tokens of a source after padding.

A sequence contains several pairs. Tokens of sources and targets with the same segment id belong to the same pair.

params = {"embedding": {table [V, D], ...}, "encoder": {"layers": {... each leaf [layers, ...]}, "end": {"norm": ...}},
          "decoder": like "encoder", "head": {kernel [D, V]}}
There is no "end" with post-norm, and no "head" with tied embeddings.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.config.mesh_checks import sequence_problems
from meshtrain.config.schema import Config
from meshtrain.config.tasks import BuiltIn, of_text, source_problems
from meshtrain.errors import Problem, nearest_multiple
from meshtrain.examples.numbers import BEGIN_ID
from meshtrain.examples.seq2seq import (
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
from meshtrain.models import problems, remat, vocabulary
from meshtrain.models.attention.multi_head import CACHE, NEW, Memory, Slots
from meshtrain.models.cost import of_transformer
from meshtrain.models.lora import with_adapters
from meshtrain.models.metrics import Ratio
from meshtrain.models.remat import RematOptions, casts_first
from meshtrain.models.task import (
    SEQUENCE_INDEX,
    Activations,
    Batch,
    Cache,
    Decode,
    Entry,
    Loss,
    Params,
    Task,
    num_parameters,
    sequence_keys,
    token_batch,
)
from meshtrain.models.transformer import cache as caches
from meshtrain.models.transformer.decoder import Given, layer_stack, run_layers
from meshtrain.models.transformer.task import NOTHING_AGAIN, computing
from meshtrain.sharding.param_sharding import params_with_axes
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import default_rules
from meshtrain.sharding.trees import Arrays, leaves_with_paths
from meshtrain.step.precision import compute_name

PAIRS = ("numbers",)  # data sources of pairs


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
    """Returns the task of an encoder-decoder. It has no stages, so it cannot run in a pipeline.

    Args:
      options: options of the encoder-decoder.
      batch_size: B, sequences in the global batch.
      sequence_length: T, tokens of targets in a sequence.
      dtype: compute dtype.
      output_dtype: dtype of logits; None: `dtype`.
      remat: activations that the backward pass recomputes; `every` must divide the number of layers of the encoder and
        of the decoder.
      placement: determines the shardings of weights and activations; None for a single device.
    """
    assert options.vocab_size, "resolve() replaces a vocab_size of 0 by the vocab_size of the data"
    lengths = (options.source_length or sequence_length, sequence_length)
    model = Seq2Seq(options, *lengths, dtype, output_dtype or dtype, placement or Placement.single_device(), remat)
    of_init, num_layers = initializer(options, *lengths), options.num_encoder_layers + options.num_layers
    return Task(
        init=of_init,
        loss=model.loss,
        batch=pair_batch(batch_size, *lengths, options.vocab_size),
        logits=model.all_logits,
        decode=model.decoding(),
        flops_per_token=flops_per_token(options, *lengths),
        attention_flops_per_token=causal_flops_per_token(options, sequence_length),
        num_parameters=num_parameters(of_init, {"vocab": options.vocab_size}),
        takes_manual_axes=True,
        width=options.embed_dim,
        cost=functools.partial(of_transformer, options, num_layers, dtype, model.output_dtype, remat, model.placement),
        vocab_size=options.vocab_size,
        batch_text=f"{batch_size} sequences of {lengths[0]} source and {lengths[1]} target tokens",
    )


def pair_batch(batch_size: int, source_length: int, target_length: int, vocab_size: int) -> dict[str, Entry]:
    """Returns `Task.batch` of packed pairs: the entries of `token_batch` for targets, and three entries for sources.

    `tokens` are the decoder's inputs, a begin token and the target. `targets` are the target and an end token.
    `source_tokens`, `source_segment_ids` (0 is padding) and `source_positions` are int32 [B, S]. A begin token ends
    each source.

    Args:
      batch_size: B, sequences in the global batch.
      source_length: S, tokens of sources in a sequence.
      target_length: T, tokens of targets in a sequence.
      vocab_size: exclusive upper bound of the ids of sources.
    """
    ints = Entry((batch_size, source_length), jnp.int32, ("batch", "sequence"))
    tokens = dataclasses.replace(ints, below=vocab_size)
    source = {"source_tokens": tokens, "source_segment_ids": ints, "source_positions": ints}
    return {**token_batch(batch_size, target_length), **source}


@dataclasses.dataclass(frozen=True)
class Seq2Seq:
    """The functions of an encoder-decoder: loss, logits, and generation with a cache.

    Attributes:
      options: options of the model.
      source_length: S, tokens of sources in a sequence.
      target_length: T, tokens of targets in a sequence.
      dtype: compute dtype.
      output_dtype: dtype of logits.
      placement: determines the shardings of weights and activations.
      remat: activations that the backward pass recomputes.
    """

    options: Seq2SeqOptions
    source_length: int
    target_length: int
    dtype: DTypeLike
    output_dtype: DTypeLike
    placement: Placement
    remat: RematOptions

    def encode(self, params: Params, batch: Batch, keys: jax.Array, train: bool) -> Memory:
        """Returns the memory for cross-attention: the encoder's output [b, S, D] and the segment ids of its tokens.

        Args:
          params: parameters of the model.
          batch: source tokens, positions and segment ids, int32 [b, S].
          keys: a random key for each sequence, [b].
          train: whether to apply dropout and `remat`.
        """
        tokens, positions = batch["source_tokens"], batch["source_positions"]
        segment_ids, keys = batch["source_segment_ids"], side_keys(keys, SOURCE)
        x = self.embed(params, SOURCE, tokens, positions, keys, train)
        given = (keys, angles_of(self.options, positions), segment_ids, None)
        return Memory(self.stack(params["encoder"], x, given, train), segment_ids)

    def decode(self, params: Params, memory: Memory, batch: Batch, keys: jax.Array, train: bool) -> jax.Array:
        """Returns the decoder's output for the target tokens of a batch, [b, T, D].

        Args:
          params: parameters of the model.
          memory: the encoder's output, which cross-attention reads.
          batch: target tokens, positions and segment ids, int32 [b, T].
          keys: a random key for each sequence, [b].
          train: whether to apply dropout and `remat`.
        """
        tokens, positions = batch["tokens"], batch["positions"]
        keys = side_keys(keys, TARGET)
        x = self.embed(params, TARGET, tokens, positions, keys, train)
        given = (keys, angles_of(self.options, positions), batch["segment_ids"], None, memory)
        return self.stack(params["decoder"], x, given, train)

    def embed(
        self, params: Params, side: str, tokens: jax.Array, positions: jax.Array, keys: jax.Array, train: bool
    ) -> jax.Array:
        """Returns the activations that enter the first layer of encoder or decoder, [b, L, D] for L tokens.

        Args:
          params: parameters of the model.
          side: `source` for the encoder, `target` for the decoder.
          tokens: int32 [b, L].
          positions: position of each token, int32 [b, L].
          keys: a random key for each sequence's dropout, [b].
          train: whether to apply dropout.
        """
        embedding = Embedding(self.options, self.placement, self.dtype)
        rows = self.source_length if side == SOURCE else self.target_length
        x: Activations = embedding.apply({"params": params["embedding"]}, side, tokens, positions, rows, keys, train)
        return x

    def stack(self, params: Params, x: jax.Array, given: tuple[Given, ...], train: bool) -> jax.Array:
        """Returns the output of encoder or decoder, [b, L, D] for L tokens: the activations after layers and last norm.

        Args:
          params: parameters of encoder or decoder: its layers and its last norm.
          x: activations that enter the first layer, [b, L, D].
          given: further arguments of each `Layer`: keys, angles, documents, slots, and for the decoder the memory.
          train: whether to apply dropout and `remat`.
        """
        layers, place, dtype, remat = params["layers"], self.placement, self.dtype, self.remat
        layers = computing(layers, dtype) if train and casts_first(remat, place) else layers
        indices = jnp.arange(jax.tree.leaves(layers)[0].shape[0])
        x, sums = run_layers(self.options, layers, x, indices, given, place, dtype, train, remat, Layer)
        assert sums is None, "layers of an encoder-decoder do not add to the loss"
        y: Activations = End(self.options, place).apply(params_of(params, "end"), x)
        return y

    def columns(self, params: Params, x: jax.Array, loss: vocabulary.Loss = vocabulary.logits) -> jax.Array:
        """Returns the result of `loss`: by default logits [b, T, V] in the output dtype, including columns of padding.

        Args:
          params: parameters of the model.
          x: output of the decoder, [b, T, D].
          loss: (settings of the matmul, x, weight) -> logits, or a loss that computes the logits in chunks.
        """
        table = params["embedding"]["table"] if self.options.tied_embeddings else None
        module = Head(self.options, self.placement, self.dtype, self.output_dtype)
        result: Arrays = module.apply(params_of(params, "head"), x, table, loss)
        return result

    def loss(self, params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        """Returns (sum of cross-entropies over targets, number of targets, metrics), float32 scalars.

        In training the metrics are empty. In an evaluation they have `exact_match`, the share of pairs whose most
        probable tokens are all correct.
        """
        keys = sequence_keys(rng, batch)
        memory = self.encode(params, batch, keys, train)
        x = self.decode(params, memory, batch, keys, train)
        targets, weights, vocab_size = batch["targets"], batch["weights"], self.options.vocab_size
        if train:
            cross_entropy = vocabulary.CrossEntropy(vocab_size, self.options.loss_chunk)
            loss = functools.partial(cross_entropy, targets=targets, weights=weights)
            return self.columns(params, x, loss), jnp.sum(weights), {}
        columns = self.columns(params, x)
        total = vocabulary.cross_entropy(columns, targets, weights, vocab_size)
        matches = exact_match(vocabulary.without_padding(columns, vocab_size), batch)
        return total, jnp.sum(weights), {"exact_match": matches}

    def all_logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, T, V] of a batch without dropout, padding at minus infinity."""
        keys = sequence_keys(jax.random.key(0), batch)
        memory = self.encode(params, batch, keys, False)
        x = self.decode(params, memory, batch, keys, False)
        return vocabulary.without_padding(self.columns(params, x), self.options.vocab_size)

    def decoding(self) -> Decode:
        """Returns the functions that generate targets token by token, with a cache; see `Decode`."""
        # A single token cannot be sharded over axes that shard the sequence dim in training.
        unsharded = dataclasses.replace(self, placement=self.placement.for_decoding(("sequence", "residual_sequence")))
        is_learned = self.options.positions == "learned"
        return Decode(
            unsharded.prefill,
            unsharded.step,
            self.cache,
            functools.partial(computing, dtype=self.dtype),
            continues=False,
            max_prompt=self.source_length - 1 if is_learned else 0,
            max_positions=self.target_length if is_learned else 0,
            trained_positions=self.target_length,
        )

    def cache(self, num_rows: int, prompt_length: int, num_steps: int) -> dict[str, Entry]:
        """Returns the shapes, dtypes and logical axes of the cache's arrays, by name.

        `keys` and `values` are for self-attention, with slots for the begin token and `num_steps` further tokens of the
        target. `memory_keys` and `memory_values` [K, R, P + 1, N, H] are for cross-attention in K layers with N heads.
        `memory_filled` int32 [R, P + 1] is 1 for tokens of the source and for the token that ends it, else 0.

        Args:
          num_rows: R, number of sources.
          prompt_length: P, tokens of a source after padding.
          num_steps: maximum number of calls of `step`.
        """
        o, num_sources = self.options, prompt_length + 1
        entries = functools.partial(caches.stack_entries, o.attends, o.num_layers, num_rows)
        own, memory = (entries(slots, self.dtype) for slots in (1 + num_steps, num_sources))
        filled = caches.row_entries(num_rows, num_sources)["filled"]
        of_memory = {f"memory_{name}": entry for name, entry in {**memory, "filled": filled}.items()}
        return {**own, **caches.row_entries(num_rows, 1 + num_steps), **of_memory}

    def prefill(self, params: Params, tokens: jax.Array, lengths: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Encodes R sources; returns the logits [R, V] of each target's first token, and the cache.

        The token that ends a source is appended to each source. The keys and values of cross-attention are computed
        only in this function.

        Args:
          params: parameters of the model.
          tokens: sources, int32 [R, P], padded on the right.
          lengths: number of tokens of each source, int32 [R].
          cache: an empty cache.
        """
        tokens = jnp.pad(tokens, ((0, 0), (0, 1)))
        num_rows, num_sources = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(num_sources), tokens.shape)
        tokens = jnp.where(positions == lengths[:, None], self.options.begin_id, tokens)
        filled = caches.first_slots(lengths + 1, num_sources)
        source = {"source_tokens": tokens, "source_positions": positions, "source_segment_ids": filled}
        memory = self.encode(params, source, self._no_keys(num_rows), False)
        ones = jnp.ones(num_rows, jnp.int32)
        begin, zeros = ones * self.options.begin_id, 0 * ones
        y, new = self._one_token(params, begin, zeros, {}, (ones[:, None], None, memory, None))
        stored = {name: cache[f"memory_{name}"] for name in ("keys", "values")}
        of_memory = {**caches.write(stored, new["cross_attention"], 0), "filled": filled}
        after = {
            **caches.write(cache, new["attention"], 0),
            **{f"memory_{name}": value for name, value in of_memory.items()},
            "filled": caches.first_slots(ones, cache["filled"].shape[1]),
            "positions": ones,
            "slot": jnp.int32(1),
        }
        return self._next_logits(params, y), after

    def step(self, params: Params, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends a token to each of R targets; returns the logits [R, V] of the next tokens, and the cache.

        Args:
          params: parameters of the model.
          tokens: the appended tokens, int32 [R].
          cache: the cache returned by `prefill` or by the previous `step`.
        """
        slot, positions = cache["slot"], cache["positions"]
        filled = caches.next_slot(cache["filled"], slot)
        names = ("keys", "values")
        stored = {
            "attention": {name: cache[name] for name in names},
            "cross_attention": {name: cache[f"memory_{name}"] for name in names},
        }
        of_memory = Slots(cache["memory_filled"], jnp.int32(0))
        y, new = self._one_token(
            params, tokens, positions, {CACHE: stored}, (None, Slots(filled, slot), None, of_memory)
        )
        written = caches.write(cache, new["attention"], slot)
        after = {**cache, **written, "filled": filled, "positions": positions + 1, "slot": slot + 1}
        return self._next_logits(params, y), after

    def _one_token(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        stored: Mapping[str, Arrays],
        given: tuple[Given, ...],
    ) -> tuple[jax.Array, Arrays]:
        """Returns the decoder's output [R, 1, D] for one token of each of R rows, and the token's keys and values.

        Args:
          params: parameters of the model.
          tokens: one token of each row, int32 [R].
          positions: positions of the tokens in their targets, int32 [R].
          stored: Linen variables with the collection CACHE of the layers, or {} without a cache.
          given: further arguments of each `Layer`: documents, slots, memory, slots of the memory.
        """
        tokens, positions, keys = tokens[:, None], positions[:, None], self._no_keys(tokens.shape[0])
        x = self.embed(params, TARGET, tokens, positions, keys, False)
        decoder, num_layers = params["decoder"], self.options.num_layers
        stack = layer_stack(self.options, num_layers, self.placement, self.dtype, Layer, 2 + len(given))
        variables = {"params": decoder["layers"], **stored}
        angles = angles_of(self.options, positions)
        (x, _), new = stack.apply(variables, x, jnp.arange(num_layers), keys, angles, *given, mutable=[NEW])
        y: Activations = End(self.options, self.placement).apply(params_of(decoder, "end"), x)
        return y, new[NEW]

    def _next_logits(self, params: Params, x: jax.Array) -> jax.Array:
        return vocabulary.without_padding(self.columns(params, x), self.options.vocab_size)[:, 0]

    def _no_keys(self, num_rows: int) -> jax.Array:
        """Returns placeholder random keys, one per row, for layers whose dropout is off."""
        return sequence_keys(jax.random.key(0), {SEQUENCE_INDEX: jnp.arange(num_rows)})


def init(options: Seq2SeqOptions, source_length: int, target_length: int, rng: jax.Array) -> Params:
    """Returns the initial float32 parameters of an encoder-decoder, each boxed with its logical axes.

    The values depend only on `rng` and the options, not on the mesh.

    Args:
      options: options of the model.
      source_length: number of learned positions of sources.
      target_length: number of learned positions of targets.
      rng: random key.
    """
    nowhere, keys, dtype = Placement.single_device(), jax.random.split(rng, 6), jnp.float32
    ints, sequence = jnp.zeros((1, 1), jnp.int32), jax.random.split(rng, 1)
    x = jnp.zeros((1, 1, options.embed_dim))
    embedding, end = Embedding(options, nowhere, dtype), End(options, nowhere)
    # Both sides use the same key, so that a shared table has the same values.
    tables = [
        embedding.init(keys[0], side, ints, ints, rows, sequence, False)["params"]
        for side, rows in ((SOURCE, source_length), (TARGET, target_length))
    ]
    params: dict[str, Params] = {"embedding": {**tables[0], **tables[1]}}
    given: tuple[Given, ...] = (sequence, angles_of(options, ints), None, None)
    stacks = (
        ("encoder", options.num_encoder_layers, given),
        ("decoder", options.num_layers, (*given, Memory(x, None))),
    )
    for number, (name, num_layers, given_here) in enumerate(stacks):
        layers = layer_stack(options, num_layers, nowhere, dtype, Layer, len(given_here))
        of_layers = layers.init(keys[1 + number], x, jnp.arange(num_layers), *given_here)["params"]
        params[name] = {"layers": of_layers, **_params_of("end", end.init(keys[3 + number], x))}
    table = jnp.zeros((options.padded_vocab_size, options.embed_dim)) if options.tied_embeddings else None
    return {**params, **_params_of("head", Head(options, nowhere, dtype, dtype).init(keys[5], x, table))}


def _params_of(name: str, variables: Mapping[str, Params]) -> dict[str, Params]:
    """Returns {name: parameters} for a module's variables, which its `init` returned; {} if it has no parameters."""
    return {name: variables["params"]} if variables else {}


@functools.cache
def initializer(options: Seq2SeqOptions, source_length: int, target_length: int) -> Callable[[jax.Array], Params]:
    """Returns the function `Task.init` of an encoder-decoder.

    Returns the same function for equal arguments, because JAX caches traces by function.
    """
    return functools.partial(init, options, source_length, target_length)


def flops_per_token(options: Seq2SeqOptions, source_length: int, target_length: int) -> float:
    """Returns the model FLOPs of a sequence's forward and backward pass, divided by its T target tokens.

    Each weight takes 6 FLOPs per token that it multiplies. The encoder, and the projections to keys and values of
    cross-attention, multiply S source tokens; the other weights of the decoder and the head multiply T target tokens.
    Full attention takes 12 N H FLOPs for each pair of a query and a key: there are S S pairs in a layer of the encoder,
    and T T + T S pairs in a layer of the decoder.

    Args:
      options: options of the model.
      source_length: S, tokens of sources in a sequence.
      target_length: T, tokens of targets in a sequence.
    """
    params, _ = params_with_axes(initializer(options, source_length, target_length))
    total = 6.0 * target_length * options.vocab_size * options.embed_dim
    for path, leaf in leaves_with_paths(params):
        if "/layers/" in path and leaf.ndim > 2 and not path.endswith("_bias"):
            reads_source = path.startswith("encoder/") or path.endswith(
                ("/cross_attention/key", "/cross_attention/value")
            )
            total += 6.0 * math.prod(leaf.shape) * (source_length if reads_source else target_length)
    of_pair = 12.0 * options.num_heads * options.width_of_head
    others = options.num_encoder_layers * source_length**2 + options.num_layers * target_length * source_length
    return (total + of_pair * others) / target_length + causal_flops_per_token(options, target_length)


def causal_flops_per_token(options: Seq2SeqOptions, target_length: int) -> float:
    """Returns the FLOPs of the decoder's self-attention per target token, forward and backward: 12 L T N H.

    L is the number of decoder layers, T the number of target tokens, N the number of heads, and H the head dim.
    Attention is counted as full attention: each query attends to T keys.
    """
    return 12.0 * options.num_layers * target_length * options.num_heads * options.width_of_head


def exact_match(logits: jax.Array, batch: Batch) -> Ratio:
    """Returns a `Ratio`: the number of pairs whose most probable tokens are all correct, and the number of all pairs.

    The first number equals the number of pairs that greedy decoding solves: as long as all previous tokens are correct,
    greedy decoding computes the same logits.

    Args:
      logits: float32 [b, T, V], padding of the vocabulary at minus infinity.
      batch: `targets`, `weights` and `segment_ids` of packed pairs, [b, T]; tokens of a pair are adjacent. A pair is
        counted if it has a target with a weight above 0, and only these targets must be correct.
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
    """Returns the cumulative number of marked tokens within each pair, int32 [b, T].

    Args:
      marks: bool [b, T], the tokens to count.
      is_first: bool [b, T], the first token of each pair.
    """
    total = jnp.cumsum(marks.astype(jnp.int32), axis=1)
    before_pair = jax.lax.cummax(jnp.where(is_first, total - marks, 0), axis=1)
    return total - before_pair


def _make(config: Config, placement: Placement) -> Task:
    return with_adapters(seq2seq(config.model, **of_text(config, placement)), config.lora)


def _check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each conflict of the options with each other, with the data or with the mesh.

    Args:
      config: configuration with `Seq2SeqOptions` as its model; each field is within its bounds.
      mesh_shape: mesh axis -> size.
    """
    options, found = config.model, source_problems(config, PAIRS, "pairs of a source and a target")
    if options.source_length:
        rules = default_rules(config.layout)
        found += sequence_problems(options.source_length, rules, mesh_shape, name="model.source_length")
    found += [
        *problems.of_transformer(options, compute_name(config.precision), mesh_shape),
        *remat.check(config.remat, options.num_layers, mesh_shape["pipeline"]),
        *remat.check(config.remat, options.num_encoder_layers, 1, name="model.num_encoder_layers"),
    ]
    if options.positions == "sinusoidal" and options.embed_dim % 2:
        step = 2 if options.head_dim else math.lcm(2, options.num_heads)
        found.append(
            Problem(
                "model.embed_dim",
                got=options.embed_dim,
                allowed="an even number with sinusoidal positions",
                nearest=nearest_multiple(options.embed_dim, step),
            )
        )
    if config.data.source in PAIRS and options.begin_id != BEGIN_ID:
        found.append(
            Problem(
                "model.begin_id",
                got=options.begin_id,
                condition=f"with data.source={config.data.source}",
                allowed=f"{BEGIN_ID}, the first token of its targets",
                nearest=BEGIN_ID,
                depends_on=["data.source"],
            )
        )
    elif options.begin_id >= options.vocab_size:
        found.append(
            Problem(
                "model.begin_id",
                got=options.begin_id,
                allowed=f"a token, below model.vocab_size = {options.vocab_size}",
                nearest=options.vocab_size - 1,
                depends_on=["model.vocab_size"],
            )
        )
    return found


built_in = BuiltIn("seq2seq", _make, Seq2SeqOptions, _check, takes_adapters=True)
