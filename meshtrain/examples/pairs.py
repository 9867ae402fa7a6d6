"""Packs pairs of a source and a target, such as a sentence and its translation, into examples of fixed lengths.

Shapes: S: tokens of sources in an example, T: tokens of targets in an example, P: pairs, R: examples (rows).

An example is a dict of arrays. For the decoder it has tokens, targets, segment_ids, positions (int32 [T]) and weights
(float32 [T]: 1 if the target is part of the loss, else 0). For the encoder it has source_tokens, source_segment_ids,
source_positions (int32 [S]). Source and target of a pair have the same segment id; ids start at 1, and 0 is padding.
Positions start at 0 in each segment.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshtrain.errors import Problem, Problems, refuse

Pair = tuple[Sequence[int], Sequence[int]]  # ids of the source and of the target, without begin and end tokens
Example = dict[str, np.ndarray]


class Pairs(Protocol):
    """A sequence of pairs (ids of a source, ids of a target) with a length and access by index, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Pair: ...


@dataclasses.dataclass(frozen=True)
class PairExamples:
    """A sequence of R examples, each with several complete pairs of a source and a target.

    The encoder reads the source and the begin token, which marks the end of the source. The decoder reads the begin
    token and the target, and predicts the target and the end token.

    Attributes:
      pairs: the pairs by index, without begin and end tokens.
      row_starts: int64 [R + 1]; example r contains the pairs from row_starts[r] to row_starts[r + 1] - 1.
      source_length: S, tokens of sources in an example, including padding.
      target_length: T, tokens of targets in an example, including padding.
      begin_id: id of the token that ends a source and is the decoder's first input.
      end_id: id of the token that ends a target.
    """

    pairs: Pairs
    row_starts: np.ndarray
    source_length: int
    target_length: int
    begin_id: int
    end_id: int

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source_names = ("source_tokens", "source_segment_ids", "source_positions")
        row = {name: np.zeros(self.source_length, np.int32) for name in source_names}
        for name in ("tokens", "targets", "segment_ids", "positions"):
            row[name] = np.zeros(self.target_length, np.int32)
        row["weights"] = np.zeros(self.target_length, np.float32)
        source_start = target_start = 0
        first, last = int(self.row_starts[index]), int(self.row_starts[index + 1])
        for segment, number in enumerate(range(first, last), start=1):
            source, target = self.pairs[number]
            source = [*source, self.begin_id]
            place = slice(source_start, source_start := source_start + len(source))
            row["source_tokens"][place] = source
            row["source_segment_ids"][place] = segment
            row["source_positions"][place] = np.arange(len(source))
            place = slice(target_start, target_start := target_start + len(target) + 1)
            row["tokens"][place] = [self.begin_id, *target]
            row["targets"][place] = [*target, self.end_id]
            row["segment_ids"][place] = segment
            row["positions"][place] = np.arange(len(target) + 1)
            row["weights"][place] = 1
        return row


def pack_pairs(
    pairs: Pairs,
    *,
    source_length: int,
    target_length: int,
    begin_id: int = 0,
    end_id: int = 0,
    lengths: np.ndarray | None = None,
) -> PairExamples:
    """Packs consecutive pairs into examples of fixed lengths, as many as fit into both source and target length.

    Args:
      pairs: pairs by index, without begin and end tokens. A source has at most S - 1 tokens and a target at most T - 1,
        because a token is appended to both.
      source_length: S, tokens of sources in an example.
      target_length: T, tokens of targets in an example.
      begin_id: id of the token that ends a source and is the decoder's first input; the option `model.begin_id`.
      end_id: id of the token that ends a target; may be the same as `begin_id`.
      lengths: int [P, 2], tokens of each source and of each target, including the appended tokens; None: all pairs are
        read to count their tokens.

    Raises:
      UserError: has one line for each pair that is too long for an example.

    >>> rows = pack_pairs([([5, 6], [7]), ([8], [9])], source_length=5, target_length=4)
    >>> rows[0]["source_tokens"].tolist(), rows[0]["targets"].tolist()
    ([5, 6, 0, 8, 0], [7, 0, 9, 0])
    """
    if lengths is None:
        counted = [(len(source) + 1, len(target) + 1) for source, target in (pairs[i] for i in range(len(pairs)))]
        lengths = np.asarray(counted, np.int64).reshape(-1, 2)
    refuse(_too_long(lengths, (source_length, target_length)))
    row_starts = rows_in_order(lengths, (source_length, target_length))
    return PairExamples(pairs, row_starts, source_length, target_length, begin_id, end_id)


def _too_long(lengths: np.ndarray, capacities: tuple[int, int]) -> list[Problem]:
    problems = Problems()
    for number in np.flatnonzero(np.any(lengths > capacities, axis=1)):
        source, target = lengths[number].tolist()
        problems.add(
            Problem(
                "data",
                fault=f"pair {number} has {source} source tokens and {target} target tokens, including end tokens",
                allowed=f"at most {capacities[0]} and {capacities[1]}",
                nearest=(
                    f"sequence_length={max(target, capacities[1])}, model.source_length={max(source, capacities[0])}, "
                    "or a shorter pair"
                ),
            )
        )
        if problems.is_enough():
            break
    return problems.lines()


def rows_in_order(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """Packs P pieces (such as pairs) into R rows in order; a row ends when the next piece does not fit (next fit).

    Returns the index of the first piece of each row, and P as the last element: int64 [R + 1].

    Args:
      lengths: int [P, K], the K sizes of each piece (such as source and target tokens), each from 1 to its capacity.
      capacities: for each of the K sizes, its maximum sum over the pieces of a row.
    """
    assert np.all(lengths <= np.asarray(capacities)), "a piece does not fit into a row"
    totals = np.concatenate([np.zeros((1, len(capacities)), np.int64), np.cumsum(lengths, axis=0)])
    ends = [np.searchsorted(total, total + most, "right") - 1 for total, most in zip(totals.T, capacities, strict=True)]
    following = np.min(ends, axis=0).tolist()
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(following[starts[-1]])
    return np.asarray(starts, np.int64)
