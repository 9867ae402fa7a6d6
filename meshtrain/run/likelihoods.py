"""Computes log-likelihoods of many texts: packs texts into rows and batches; the devices sum log probabilities.

B: rows in a batch, T: tokens a row, V: padded vocabulary, S: segments in a row.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.assemble import Assembly
from meshtrain.data.loader import batches
from meshtrain.data.packing import FirstFitExamples, TokenStream, pack_whole
from meshtrain.errors import Problem
from meshtrain.models.task import Batch, Params, token_batch
from meshtrain.step.step import with_sequence_index

Score = Callable[[Params, Batch], tuple[jax.Array, jax.Array]]

_NEEDED = ("tokens", "targets", "segment_ids", "weights")


class Likelihood(NamedTuple):
    """The likelihood of a continuation.

    Attributes:
      log_probability: the sum of the log probabilities of the continuation's tokens, in nats.
      is_greedy: whether each token is the most probable token at its position.
    """

    log_probability: float
    is_greedy: bool


class Window(NamedTuple):
    """A part of a text whose last tokens are scored.

    Attributes:
      ids: up to T + 1 token ids: the inputs, and the target of the last input.
      num_scored: the number of ids at the end of `ids` that are scored.
      text: the index of the text in the argument `texts` of `likelihoods`.
    """

    ids: Sequence[int]
    num_scored: int
    text: int


def problems_of_task(assembly: Assembly) -> list[Problem]:
    """Returns a problem if the task cannot score texts, else []; a task needs logits and a batch of packed tokens."""
    if assembly.task.logits is None:
        return [
            Problem(
                "task",
                got="a task without logits",
                condition="for likelihoods",
                allowed="Task.logits, (params, batch) -> float32 [B, T, vocabulary]",
                nearest="Task(init, loss, batch, logits)",
            )
        ]
    names, packed = set(assembly.batch), token_batch(1, 1)
    if names <= set(packed) and names >= set(_NEEDED):
        return []
    return [
        Problem(
            "task",
            got=f"a batch of {', '.join(assembly.batch)}",
            condition="for likelihoods",
            allowed=f"{', '.join(_NEEDED)}, and optionally {', '.join(sorted(set(packed) - set(_NEEDED)))}",
            nearest="token_batch(B, T)",
        )
    ]


def windows(text: int, context: Sequence[int], continuation: Sequence[int], length: int) -> Iterator[Window]:
    """Yields the windows in which each token of a continuation is scored once.

    A window has up to T tokens to score, preceded by earlier tokens up to a total of T + 1. So a continuation of up to
    T tokens takes one window, and only the start of a long context is omitted.

    Args:
      text: the index of the text, which the windows contain.
      context: at least one token id.
      continuation: the token ids to score; if it is empty, there is no window.
      length: T, the number of tokens in a row of the batch.
    """
    ids = [*context, *continuation]
    for start in range(len(context), len(ids), length):
        stop = min(start + length, len(ids))
        yield Window(ids[max(stop - length - 1, 0) : stop], stop - start, text)


def scorer(assembly: Assembly) -> Score:
    """Returns a jitted function (params, batch) -> the result of `segment_scores`, replicated on all devices.

    Args:
      assembly: an assembly for whose task `problems_of_task` returns [], on a mesh without a pipeline.
    """
    logits = assembly.task.logits
    assert logits is not None

    def scores(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        row_logits = logits(params, with_sequence_index(batch))
        return segment_scores(row_logits, batch["targets"], batch["weights"], batch["segment_ids"])

    return jax.jit(scores, out_shardings=NamedSharding(assembly.mesh, PartitionSpec()))


def likelihoods(
    assembly: Assembly, score: Score, params: Params, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Likelihood]:
    """Returns the likelihood of each continuation after its context, in the order of `texts`.

    Texts share a row of the batch if the task's attention stays within segments.

    Args:
      assembly: the assembly from which `score` was made.
      score: the function that `scorer` returns; it is compiled at its first call.
      params: the weights, with the shapes and shardings of `assembly.state.params`.
      texts: pairs (context, continuation) of token ids below the vocabulary size; a context has at least one id.
    """
    num_rows, length = assembly.batch["tokens"].shape
    cut = [window for text, pair in enumerate(texts) for window in windows(text, *pair, length)]
    rows, order = _pack_windows(cut, length, shares_rows=assembly.task.attends_within_segments)
    sums, misses = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    stream = batches(rows, batch=assembly.batch, seed=0, shuffle=False, num_epochs=1, num_threads=0)
    for number, batch in enumerate(stream):
        batch_sums, batch_misses = jax.device_get(score(params, batch))
        first = number * num_rows
        for row in range(first, min(first + num_rows, len(rows))):
            for segment, window in enumerate(order[rows.row_starts[row] : rows.row_starts[row + 1]]):
                sums[cut[window].text] += batch_sums[row - first, segment]
                misses[cut[window].text] += batch_misses[row - first, segment]
    return [Likelihood(float(total), not missed) for total, missed in zip(sums, misses, strict=True)]


def _pack_windows(cut: Sequence[Window], length: int, *, shares_rows: bool) -> tuple[FirstFitExamples, np.ndarray]:
    """Packs windows into rows of T tokens; returns the rows, and for each segment, row by row, the index of its window.

    Args:
      cut: the windows; each becomes a segment.
      length: T, the number of tokens in a row.
      shares_rows: whether a row may contain several windows.
    """
    lengths = np.asarray([len(window.ids) for window in cut], np.int64)
    ids = np.concatenate([np.empty(0, np.int32), *(window.ids for window in cut)])
    counted = np.concatenate([np.empty(0, bool), *(np.arange(-len(one.ids), 0) >= -one.num_scored for one in cut)])
    stream = TokenStream((ids,), end_id=-1)
    rows = pack_whole(stream, lengths, length, counted, shares_rows=shares_rows)
    return rows, np.searchsorted(np.cumsum(lengths) - lengths, rows.piece_starts)


def token_scores(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log probability of each target, float32 [B, T], and whether it is most probable, bool [B, T].

    If tokens are equally probable, the token with the smallest id is the most probable, as in `jnp.argmax`.

    Args:
      logits: float32 [B, T, V], padding at minus infinity.
      targets: int32 [B, T].
    """
    # A mask instead of an index: the vocabulary dim may be sharded.
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == targets


def segment_sums(values: jax.Array, segment_ids: jax.Array, num_segments: int) -> jax.Array:
    """Returns the sum of values over each segment, [B, S]: column s is the segment with id s + 1.

    Args:
      values: the value of each token, float32 or int32 [B, T].
      segment_ids: int32 [B, T], from 1 to S; 0 is padding, which is not summed.
      num_segments: S.
    """
    of_row = functools.partial(jax.ops.segment_sum, num_segments=num_segments + 1)
    return jax.vmap(of_row)(values, segment_ids)[:, 1:]


def segment_scores(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log probability sums and greedy misses per segment, over the targets with a positive weight.

    A greedy miss is a target that is not the most probable token. Both results are [B, T], float32 and int32: column s
    is the segment with id s + 1, and a row has at most T segments.

    Args:
      logits: float32 [B, T, V], padding at minus infinity.
      targets: int32 [B, T].
      weights: float32 [B, T]; a target is included if its weight is above 0.
      segment_ids: int32 [B, T], from 1; 0 is padding.
    """
    log_probabilities, is_greedy = token_scores(logits, targets)
    counts = weights > 0
    sums = segment_sums(jnp.where(counts, log_probabilities, 0.0), segment_ids, targets.shape[1])
    misses = segment_sums(jnp.where(counts & ~is_greedy, 1, 0), segment_ids, targets.shape[1])
    return sums, misses
