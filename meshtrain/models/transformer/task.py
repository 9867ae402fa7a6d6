"""The task of a decoder: next-token cross-entropy on packed sequences.

B: sequences in the global batch, b: sequences in a microbatch, T: tokens per sequence, D: embed dim, V: padded
vocabulary, v: the part of it on one shard of a manual axis (V without an axis), K: layers in a stack, R: rows of a
cache, P: tokens per prompt after padding.

params = {"embedding": {table [V, D], positions [T, D]}, "layers": {... each leaf [layers, ...]},
          "head": {"norm": ..., kernel [D, V]}}
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.models import vocabulary
from meshtrain.models.attention.multi_head import CACHE, NEW, SINKS, Slots
from meshtrain.models.moe.experts import BIAS, ROUTER_SHIFT, with_moved_biases, with_stacks
from meshtrain.models.moe.routing import Tokens
from meshtrain.models.remat import RematOptions, casts_first
from meshtrain.models.task import (
    SEQUENCE_INDEX,
    Activations,
    Batch,
    Cache,
    Decode,
    Entry,
    LayerSums,
    Loss,
    Params,
    Stages,
    Task,
    loss_of_stages,
    num_parameters,
    sequence_keys,
    token_batch,
)
from meshtrain.models.transformer import cache as caches
from meshtrain.models.transformer.decoder import (
    ByKind,
    DecoderOptions,
    Embedding,
    Head,
    Layer,
    Watched,
    angles_of,
    layer_stack,
    run_layers,
    slots_of,
)
from meshtrain.models.transformer.decoder_cost import attention_flops_per_token, cost
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import Arrays

NOTHING_AGAIN = RematOptions("none")
IN_FLOAT32 = ("router", BIAS, ROUTER_SHIFT, SINKS)
FIRST = "first_layers"  # the stack before the layers that a pipeline splits


def decoder(
    options: DecoderOptions,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: DTypeLike = jnp.float32,
    output_dtype: DTypeLike | None = None,
    remat: RematOptions = NOTHING_AGAIN,
    placement: Placement | None = None,
    balance_rate: float = 0.0,
    watches: bool = False,
) -> Task:
    """Returns the task of training a decoder on packed sequences.

    Args:
      options: options of the decoder.
      batch_size: B, sequences in the global batch.
      sequence_length: T, tokens per sequence.
      dtype: compute dtype of activations and of weights in matmuls; parameters are float32.
      output_dtype: dtype of logits; None: `dtype`.
      remat: activations that the backward pass recomputes, also in a pipeline.
      placement: determines the shardings of activations and gathered weights; None: a single device.
      balance_rate: change of each router bias in a step, against the load of the expert.
      watches: whether the training metrics have the largest activation of each repeated layer.
    """
    assert options.vocab_size, "resolve() replaces a vocab_size of 0 by the vocab_size of the tokenizer"
    num_positions = options.max_positions or sequence_length
    place = placement or Placement.single_device()
    model = Decoder(options, num_positions, dtype, output_dtype or dtype, place, remat, watches)
    num_parameters = count_parameters(options, num_positions)
    num_active = num_parameters - num_idle_parameters(options)
    has_biases = options.moe.num_experts > 0 and options.moe.router == "sigmoid"
    stages = model.stages()
    return Task(
        init=initializer(options, num_positions),
        loss=loss_of_stages(stages, casts_first(remat, place)),
        batch=token_batch(batch_size, sequence_length),
        logits=model.all_logits,
        stages=stages,
        decode=model.decode(sequence_length),
        flops_per_token=flops_per_token(options, num_active, num_positions, sequence_length),
        attention_flops_per_token=attention_flops_per_token(options, sequence_length),
        num_parameters=num_parameters,
        num_active_parameters=num_active if options.moe.num_experts else 0,
        cost=functools.partial(cost, options, sequence_length, dtype, model.output_dtype, remat, place),
        attends_within_segments=options.within_documents,
        after_update=functools.partial(with_moved_biases, balance_rate) if has_biases else None,
        takes_manual_axes=True,
        width=options.embed_dim,
        vocab_size=options.vocab_size,
    )


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The functions of a decoder: pipeline stages, the complete forward pass, and generation with a cache.

    Attributes:
      options: options of the decoder.
      num_positions: number of learned positions.
      dtype: compute dtype.
      output_dtype: dtype of logits.
      placement: determines the shardings of activations and gathered weights.
      remat: activations that the backward pass recomputes.
      watches: whether training metrics have the largest activation of each repeated layer.
    """

    options: DecoderOptions
    num_positions: int
    dtype: DTypeLike
    output_dtype: DTypeLike
    placement: Placement
    remat: RematOptions
    watches: bool

    def first(
        self, params: Params, batch: Batch, rng: jax.Array, train: bool, axis: vocabulary.Axis = None
    ) -> jax.Array:
        """Returns the activations before the repeated layers, [b, T, D].

        They are the embedding of the tokens or, in a model with experts, the output of the first layers without
        experts. Every stage of a pipeline computes these layers. For the arguments see `Stages.first`.
        """
        x = self.embedded(params, batch, rng, train, axis)
        if not self.options.num_dense:
            return x
        once = dataclasses.replace(self.remat, every=1)
        return self._run(self.options.of_dense, params[FIRST], x, batch, rng, 0, train, once)[0]

    def stages(self) -> Stages:
        """Returns the decoder split for a pipeline: `first`, `repeated`, `last` and further functions."""
        has_experts = self.options.moe.num_experts > 0
        return Stages(
            self.options.num_repeated,
            self.first,
            self.repeated,
            self.last,
            self.logits,
            self.cast,
            num_together=1 if self.remat.policy == "none" else self.remat.every,
            with_stack=with_stacks if has_experts else None,
            loss_name="cross_entropy" if has_experts else "",
        )

    def embedded(
        self, params: Params, batch: Batch, rng: jax.Array, train: bool, axis: vocabulary.Axis = None
    ) -> jax.Array:
        """Returns the embedding of the batch's tokens, [b, T, D]; for the arguments see `Stages.first`."""
        num_rows = params["embedding"]["table"].shape[0]
        embedding = Embedding(self.options, num_rows, self.num_positions, self.placement, self.dtype)
        x: Activations = embedding.apply({"params": params["embedding"]}, batch, sequence_keys(rng, batch), train, axis)
        return x

    def repeated(
        self, layers: Params, x: jax.Array, batch: Batch, rng: jax.Array, start: jax.Array | int, train: bool
    ) -> tuple[jax.Array, LayerSums]:
        """Returns the activations after K repeated layers, [b, T, D], and the layers' auxiliary losses and metrics.

        For the arguments see `Stages.repeated`; `start` is the index of the first of the K layers among repeated
        layers.
        """
        return self._run(self.options, layers, x, batch, rng, start + self.options.num_dense, train, self.remat)

    def _run(
        self,
        options: DecoderOptions,
        layers: Params,
        x: jax.Array,
        batch: Batch,
        rng: jax.Array,
        start: jax.Array | int,
        train: bool,
        remat: RematOptions,
    ) -> tuple[jax.Array, LayerSums]:
        """Returns the activations after K layers, [b, T, D], and the layers' auxiliary losses and metrics.

        Args:
          options: options of these layers, which differ between first and repeated layers.
          layers: parameters of the K layers, each leaf [K, ...].
          x: activations that enter the first of the K layers, [b, T, D].
          batch: positions, segment ids and weights, [b, T].
          rng: random key of the step, for dropout.
          start: index of the first of the K layers in the model.
          train: whether to apply dropout and `remat`.
          remat: activations that the backward pass recomputes.
        """
        indices = start + jnp.arange(jax.tree.leaves(layers)[0].shape[0])
        angles = angles_of(self.options, batch["positions"])
        documents = batch["segment_ids"] if self.options.within_documents else None
        tokens = None
        if train and options.moe.num_experts:
            tokens = Tokens(batch["weights"], (batch["segment_ids"] > 0).astype(jnp.float32))
        given = (sequence_keys(rng, batch), angles, documents, None, tokens)
        layer = Watched if train and self.watches else Layer
        return run_layers(options, layers, x, indices, given, self.placement, self.dtype, train, remat, layer)

    def cast(self, params: Params) -> Params:
        """Returns parameters in their compute dtypes: norms, routers and sinks in float32, others in `dtype`."""
        return computing(params, self.dtype)

    def columns(
        self, params: Params, x: jax.Array, axis: vocabulary.Axis = None, loss: vocabulary.Loss = vocabulary.logits
    ) -> jax.Array:
        """Returns the result of `loss`: by default logits in the output dtype, including columns of padding.

        Logits are [b, T, v] for the v columns on one shard of `axis`.

        Args:
          params: parameters of embedding and head.
          x: activations after the last layer, [b, T, D].
          axis: the manual mesh axis over which the columns of logits are sharded, or None.
          loss: (settings of the matmul, activations, weight) -> logits, or a loss that computes logits in chunks.
        """
        table = params["embedding"]["table"] if self.options.tied_embeddings else None
        num_columns = table.shape[0] if table is not None else params["head"]["kernel"].shape[1]
        module = Head(self.options, num_columns, self.placement, self.dtype, self.output_dtype)
        result: Arrays = module.apply({"params": params["head"]}, x, table, axis, loss)
        return result

    def logits(self, params: Params, x: jax.Array, axis: vocabulary.Axis = None) -> jax.Array:
        """Returns float32 logits [b, T, v] with minus infinity in columns of padding.

        `x` are the activations after the last layer, [b, T, D]. v: columns of logits on one shard of `axis`.
        """
        return vocabulary.without_padding(self.columns(params, x, axis), self.options.vocab_size, axis)

    def last(self, params: Params, x: jax.Array, batch: Batch, axis: vocabulary.Axis = None) -> Loss:
        """Returns (weighted sum of cross-entropies over targets, sum of the weights, {}), float32 scalars.

        `x` are the activations after the last layer, [b, T, D]; for the other arguments see `Stages.last`.
        """
        cross_entropy = vocabulary.CrossEntropy(self.options.vocab_size, self.options.loss_chunk, axis)
        loss = functools.partial(cross_entropy, targets=batch["targets"], weights=batch["weights"])
        return self.columns(params, x, axis, loss), jnp.sum(batch["weights"]), {}

    def all_logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, T, columns] of a batch, without dropout, with minus infinity in padded columns."""
        rng = jax.random.key(0)
        x = self.first(params, batch, rng, False)
        y, _ = self.repeated(params["layers"], x, batch, rng, 0, False)
        return self.logits(params, y)

    def decode(self, sequence_length: int) -> Decode:
        """Returns the functions that generate tokens with a cache.

        `sequence_length` is the number of tokens of a training sequence, beyond which text may be poor.
        """
        # A single token cannot be split over an axis that splits sequences in training.
        unsharded = dataclasses.replace(self, placement=self.placement.for_decoding(("sequence", "residual_sequence")))
        return Decode(
            unsharded.prefill,
            unsharded.step,
            self.cache,
            self.cast,
            max_positions=self.num_positions if self.options.positions == "learned" else 0,
            trained_positions=sequence_length,
        )

    def cache(self, num_rows: int, prompt_length: int, num_steps: int) -> dict[str, Entry]:
        """Returns the shapes, dtypes and logical axes of the cache's arrays, by name.

        Args:
          num_rows: R, number of texts.
          prompt_length: P, tokens of a prompt after padding.
          num_steps: maximum number of calls of `step`.
        """
        o, num_slots = self.options, prompt_length + num_steps
        stack = caches.stack_entries(o.attends, o.num_layers, num_rows, num_slots, self.dtype, o.latent_widths)
        return {**stack, **caches.row_entries(num_rows, num_slots)}

    def prefill(self, params: Params, tokens: jax.Array, lengths: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Reads R prompts into an empty cache; returns the logits [R, V] of the next tokens, and the cache.

        V: padded vocabulary.

        Args:
          params: parameters in their compute dtypes.
          tokens: prompts, int32 [R, P], padded on the right to P tokens.
          lengths: number of tokens of each prompt, int32 [R].
          cache: an empty cache.
        """
        # Padding is not masked: it follows all tokens of its row, and its slots are never filled.
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        y, new = self._compute_cached(params, tokens, positions, None, None)
        last = jnp.take_along_axis(y, (lengths - 1)[:, None, None], axis=1)
        filled = caches.first_slots(lengths, cache["filled"].shape[1])
        slot = jnp.int32(tokens.shape[1])
        after = {**caches.write(cache, new, 0), "filled": filled, "positions": lengths, "slot": slot}
        return self.logits(params, last)[:, 0], after

    def step(self, params: Params, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends a token to each of R rows; returns the logits [R, V] of the next tokens, and the cache.

        V: padded vocabulary.

        Args:
          params: parameters in their compute dtypes.
          tokens: the appended tokens, int32 [R].
          cache: the cache returned by `prefill` or by the previous `step`.
        """
        slot, positions = cache["slot"], cache["positions"]
        filled = caches.next_slot(cache["filled"], slot)
        slots = slots_of(self.options, filled, slot)
        y, new = self._compute_cached(params, tokens[:, None], positions[:, None], cache, slots)
        after = {**caches.write(cache, new, slot), "filled": filled, "positions": positions + 1, "slot": slot + 1}
        return self.logits(params, y)[:, 0], after

    def _compute_cached(
        self, params: Params, tokens: jax.Array, positions: jax.Array, cache: Cache, slots: Slots | ByKind | None
    ) -> tuple[jax.Array, Arrays]:
        """Returns the activations after the last layer, [R, T, D], and the tokens' keys and values [K, R, T, ...].

        R: rows (texts), K: layers. With latent attention, latents replace keys and values.

        Args:
          params: parameters in their compute dtypes.
          tokens: int32 [R, T].
          positions: position of each token, int32 [R, T].
          cache: the cache of earlier tokens; not used without `slots`.
          slots: the slots of the cache that the tokens attend to, with T = 1; None: the tokens are prompts and attend
            to each other.
        """
        o, index = self.options, jnp.arange(tokens.shape[0])
        batch = {"tokens": tokens, "positions": positions, SEQUENCE_INDEX: index}
        rng = jax.random.key(0)  # key for dropout, which is off
        x, parts = self.embedded(params, batch, rng, False), list[Arrays]()
        names = caches.stack_entries(o.attends, o.num_layers, 1, 1, self.dtype, o.latent_widths)
        for options, start, stop, name in stacks(o):
            variables = {"params": params[name]}
            if slots is not None:
                variables[CACHE] = {"attention": {name: cache[name][start:stop] for name in names}}
            stack = layer_stack(options, stop - start, self.placement, self.dtype)
            given = (jnp.arange(start, stop), sequence_keys(rng, batch), angles_of(o, positions), None, slots, None)
            (x, _), new = stack.apply(variables, x, *given, mutable=[NEW])
            parts.append(new[NEW]["attention"])
        return x, parts[0] if len(parts) == 1 else jax.tree.map(lambda *all: jnp.concatenate(all), *parts)


def computing(params: Params, dtype: DTypeLike) -> Params:
    """Returns parameters in their compute dtypes: norms, routers and sinks unchanged, other parameters in `dtype`."""

    def cast(path: Sequence[jax.tree_util.DictKey], leaf: jax.Array) -> jax.Array:
        # Some norms are inside attention.
        is_norm = any(part.key.endswith("norm") for part in path)
        return leaf if is_norm or path[-1].key in IN_FLOAT32 else leaf.astype(dtype)

    return jax.tree.map_with_path(cast, params)


def init(options: DecoderOptions, num_positions: int, rng: jax.Array) -> Params:
    """Returns the initial float32 parameters of a decoder, each boxed with its logical axes.

    The values depend only on `rng` and the options, not on the mesh.

    Args:
      options: options of the decoder.
      num_positions: number of learned positions.
      rng: random key.
    """
    nowhere = Placement.single_device()
    keys = jax.random.split(rng, 3)
    ints = jnp.zeros((1, 1), jnp.int32)
    batch = {"tokens": ints, "positions": ints}
    sequence = jax.random.split(rng, 1)
    rows = options.padded_vocab_size
    x = jnp.zeros((1, 1, options.embed_dim))
    embedding = Embedding(options, rows, num_positions, nowhere, jnp.float32)
    head_module = Head(options, rows, nowhere, jnp.float32, jnp.float32)
    table = jnp.zeros((rows, options.embed_dim)) if options.tied_embeddings else None
    arguments = (sequence, angles_of(options, ints), None, None, None)
    layers = {}
    for own, start, stop, name in stacks(options):
        stack = layer_stack(own, stop - start, nowhere, jnp.float32, stacked_by=name)
        key = keys[1] if name == "layers" else jax.random.fold_in(keys[1], 1)
        layers[name] = stack.init(key, x, jnp.arange(start, stop), *arguments)["params"]
    return {
        "embedding": embedding.init(keys[0], batch, sequence, False, None)["params"],
        **layers,
        "head": head_module.init(keys[2], x, table, None)["params"],
    }


def stacks(options: DecoderOptions) -> list[tuple[DecoderOptions, int, int, str]]:
    """Returns the stacks of identical layers of a decoder, in order: the first layers if any, then repeated layers.

    Each item is (options of the layers, index of the first layer in the model, index after the last layer, name of the
    stack among the parameters).
    """
    num_dense, num_layers = options.num_dense, options.num_layers
    first = [(options.of_dense, 0, num_dense, FIRST)] if num_dense else []
    return [*first, (options, num_dense, num_layers, "layers")]


@functools.cache
def initializer(options: DecoderOptions, num_positions: int) -> Callable[[jax.Array], Params]:
    """Returns the function `Task.init` of a decoder.

    Returns the same function for equal arguments, because JAX caches traces by function.
    """
    return functools.partial(init, options, num_positions)


def count_parameters(options: DecoderOptions, num_positions: int) -> int:
    """Returns the number of a decoder's parameters without padding of the vocabulary.

    The number is computed from shapes without using a device. `num_positions` is the number of learned positions.
    """
    return num_parameters(initializer(options, num_positions), {"vocab": options.vocab_size})


def num_idle_parameters(options: DecoderOptions) -> int:
    """Returns the number of parameters of the experts that do not process a token, in all layers; 0 without experts.

    Each expert has three matrices, and biases if `moe.biases` is set.
    """
    if not options.moe.num_experts:
        return 0
    num_idle = options.moe.num_experts - options.moe.experts_per_token
    width, inner = options.embed_dim, options.moe.expert_dim
    biases = 2 * inner + width if options.moe.biases else 0
    return options.num_repeated * num_idle * (3 * width * inner + biases)


def flops_per_token(options: DecoderOptions, num_parameters: int, num_positions: int, sequence_length: int) -> float:
    """Returns model FLOPs of a forward and backward pass for one token: 6 N + `attention_flops_per_token`.

    N counts the weights that are multiplied in a matmul for one token: only the active experts, the embedding table
    only if it is also the head, learned positions never (PaLM, Chowdhery et al. 2022, appendix B).

    Args:
      options: options of the decoder.
      num_parameters: number of parameters that process one token, without padding.
      num_positions: number of learned positions.
      sequence_length: tokens per sequence.
    """
    lookups = 0 if options.tied_embeddings else options.vocab_size * options.embed_dim
    if options.positions == "learned":
        lookups += num_positions * options.embed_dim
    return 6.0 * (num_parameters - lookups) + attention_flops_per_token(options, sequence_length)
