"""Cuts or packs token streams into numbered examples of equal length.

Shapes: T sequence_length, N tokens of a stream, P pieces of documents, R rows.

An example is a dict of arrays [T]: tokens, targets, segment_ids, positions (int32) and weights (float32: 1 if the
target counts, else 0). Segment ids count from 1 within a row; 0 is padding. Positions count from 0 within a segment.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Example = dict[str, np.ndarray]
TokenPairs = Iterator[tuple[np.ndarray, np.ndarray]]

_CHUNK_TOKENS = 1 << 22
_NUM_OPEN_ROWS = 64


class Examples(Protocol):
    """Numbered examples, and the token pairs on which they are scored."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def pairs(self) -> TokenPairs:
        """Yields (tokens, targets) in chunks, int arrays of equal length.

        Each position with weight 1 occurs exactly once.
        """
        ...


class Ids(Protocol):
    """A 1-D array of tokens, or a part of a file that `np.asarray` reads."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...

    def __array__(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """The concatenation of one or more 1-D arrays of tokens; tokens of files are loaded only when they are read.

    Attributes:
      parts: unsigned integers, in order.
      end_id: the token that ends a document.
      find_ends: returns the result of `document_ends` without reading the tokens; None: the tokens are read.
      inner_ends: int64, sorted: positions of end tokens that are part of a document and do not end it.
    """

    parts: tuple[Ids, ...]
    end_id: int
    find_ends: Callable[[], np.ndarray] | None = None
    inner_ends: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    starts: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts = np.cumsum([0] + [len(part) for part in self.parts])
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _spans(self, start: int, stop: int) -> Iterator[Ids]:
        part = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(self.starts[part]), min(int(self.starts[part + 1]), stop)
            yield self.parts[part][start - begin : end - begin]
            start, part = end, part + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens start..stop as int32 [stop - start]."""
        spans = [np.asarray(span, dtype=np.int32) for span in self._spans(start, stop)]
        return spans[0] if len(spans) == 1 else np.concatenate([np.empty(0, np.int32), *spans])

    def cut(self, start: int, stop: int) -> "TokenStream":
        """Returns a stream of the tokens start..stop, without reading them."""
        find_ends = functools.partial(self._ends_between, start, stop) if self.find_ends else None
        first, last = np.searchsorted(self.inner_ends, (start, stop))
        inner_ends = self.inner_ends[first:last] - start
        return TokenStream(tuple(self._spans(start, stop)), self.end_id, find_ends, inner_ends)

    def _ends_between(self, start: int, stop: int) -> np.ndarray:
        ends = self.document_ends()
        first, last = np.searchsorted(ends, (start, stop), side="right")
        return ends[first:last] - start

    def ends_documents(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Returns which of `tokens`, read from position `start` on, end a document, bool [tokens]."""
        is_end = tokens == self.end_id
        first, last = np.searchsorted(self.inner_ends, (start, start + len(tokens)))
        is_end[self.inner_ends[first:last] - start] = False
        return is_end

    def document_ends(self) -> np.ndarray:
        """Returns the position after the end of each document, int64 [documents]."""
        if self.find_ends:
            return self.find_ends()
        ends = [np.empty(0, np.int64)]
        for start in range(0, len(self), _CHUNK_TOKENS):
            chunk = self.read(start, min(start + _CHUNK_TOKENS, len(self)))
            ends.append(np.flatnonzero(self.ends_documents(start, chunk)) + (start + 1))
        return np.concatenate(ends)

    def pairs(self, stop: int) -> TokenPairs:
        """Yields (token, next token) within documents, for tokens 0..stop."""
        for start in range(0, stop, _CHUNK_TOKENS):
            chunk = self.read(start, min(start + _CHUNK_TOKENS, stop) + 1)
            inside = ~self.ends_documents(start, chunk[:-1])
            yield chunk[:-1][inside], chunk[1:][inside]


@dataclasses.dataclass(frozen=True)
class StreamExamples:
    """Consecutive windows of a stream: example i has the tokens i*T .. i*T+T.

    Tokens after the last full window are unused.

    A document that began in an earlier window continues as a new segment, from position 0. The end token is a target;
    the target of the end token belongs to another document and has weight 0.
    """

    stream: TokenStream
    sequence_length: int

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.sequence_length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        length = self.sequence_length
        window = self.stream.read(index * length, (index + 1) * length + 1)
        tokens, targets = window[:-1], window[1:]
        is_end = self.stream.ends_documents(index * length, tokens)
        is_first = np.concatenate([[True], is_end[:-1]])
        steps = np.arange(length, dtype=np.int32)
        return {
            "tokens": tokens,
            "targets": targets,
            "segment_ids": np.cumsum(is_first, dtype=np.int32),
            "positions": steps - np.maximum.accumulate(np.where(is_first, steps, 0)),
            "weights": np.float32(1) - is_end.astype(np.float32),
        }

    def pairs(self) -> TokenPairs:
        """Yields (tokens, targets) in chunks, for every position with weight 1."""
        return self.stream.pairs(len(self) * self.sequence_length)


@dataclasses.dataclass(frozen=True)
class FirstFitExamples:
    """Rows of complete documents, packed by first fit: example i is row i. A document longer than T is cut into pieces.

    A document of L tokens, including its end token, has L - 1 inputs. The last target of a piece is the first input of
    the next piece, so every token except a document's first is a target exactly once.

    Attributes:
      stream: the concatenated documents.
      sequence_length: T.
      piece_starts: int64 [P], position of each piece in the stream, ordered by row.
      piece_lengths: int64 [P], number of inputs.
      row_starts: int64 [R + 1]: row r consists of the pieces row_starts[r] .. row_starts[r + 1].
      counted: bool [N], whether a token counts as a target; False for the first token of each document. None: all other
        tokens count.
    """

    stream: TokenStream
    sequence_length: int
    piece_starts: np.ndarray
    piece_lengths: np.ndarray
    row_starts: np.ndarray
    counted: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row: Example = {
            name: np.zeros(self.sequence_length, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")
        }
        row["weights"] = np.zeros(self.sequence_length, np.float32)
        offset = 0
        first, last = int(self.row_starts[index]), int(self.row_starts[index + 1])
        for segment, piece in enumerate(range(first, last), start=1):
            start, length = int(self.piece_starts[piece]), int(self.piece_lengths[piece])
            window = self.stream.read(start, start + length + 1)
            place = slice(offset, offset + length)
            row["tokens"][place] = window[:-1]
            row["targets"][place] = window[1:]
            row["segment_ids"][place] = segment
            row["positions"][place] = np.arange(length)
            row["weights"][place] = 1 if self.counted is None else self.counted[start + 1 : start + length + 1]
            offset += length
        return row

    def pairs(self) -> TokenPairs:
        """Yields (tokens, targets) in chunks, for every position with weight 1; requires `counted` to be None."""
        assert self.counted is None, "answers are no corpus"
        return self.stream.pairs(max(len(self.stream) - 1, 0))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The concatenated examples of several sources.

    Attributes:
      parts: name -> its examples.
      weights: for a mixture, how many of sum(weights) consecutive samples come from each source; () if the examples are
        not sampled by weight.
    """

    parts: Mapping[str, Examples]
    weights: tuple[int, ...] = ()
    starts: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.cumsum([0] + [len(part) for part in self.parts.values()]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part, place = self.part_of(index)
        return part[place]

    def part_of(self, index: int) -> tuple[Examples, int]:
        """Returns the source of an example, and the number of the example within this source."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return list(self.parts.values())[number], index - int(self.starts[number])

    def pairs(self) -> TokenPairs:
        """Yields the (tokens, targets) of each source once, ignoring the weights."""
        for part in self.parts.values():
            yield from part.pairs()


def inner_ends(documents: Sequence[np.ndarray], end_id: int) -> np.ndarray:
    """Returns the positions of end tokens inside documents, in a stream of documents each followed by `end_id`.

    The positions are int64.
    """
    places, start = [np.empty(0, np.int64)], 0
    for ids in documents:
        places.append(np.flatnonzero(ids == end_id) + start)
        start += len(ids) + 1
    return np.concatenate(places)


def inner_end_targets(examples: Examples, index: int) -> np.ndarray | None:
    """Returns which targets of an example are end tokens inside a document, bool [T]; None if no document has any."""
    if isinstance(examples, Parts):
        return inner_end_targets(*examples.part_of(index))
    if not isinstance(examples, StreamExamples | FirstFitExamples) or not len(examples.stream.inner_ends):
        return None
    if isinstance(examples, StreamExamples):
        starts, lengths = [index * examples.sequence_length], [examples.sequence_length]
    else:
        pieces = slice(*examples.row_starts[index : index + 2])
        starts, lengths = examples.piece_starts[pieces].tolist(), examples.piece_lengths[pieces].tolist()
    result, offset, ends = np.zeros(examples.sequence_length, bool), 0, examples.stream.inner_ends
    for start, length in zip(starts, lengths, strict=True):
        first, last = np.searchsorted(ends, (start + 1, start + length + 1))
        result[ends[first:last] - (start + 1) + offset] = True
        offset += length
    return result


def num_inputs(examples: Examples) -> int:
    """Returns the number of input tokens, without padding."""
    if isinstance(examples, FirstFitExamples):
        return int(examples.piece_lengths.sum())
    assert isinstance(examples, StreamExamples), examples
    return len(examples) * examples.sequence_length


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assigns each piece to the oldest open row with enough space.

    If no row fits, a new row replaces the fullest open row.

    At most 64 rows are open, so the time is linear in the number of pieces, and rows are about 90 % full.

    Args:
      lengths: int [P], each 1 .. capacity.
      capacity: T, tokens in a row.

    Returns:
      int64 [P]: the row of each piece; rows are numbered in the order in which they were opened.
    """
    # A piece that fills a row needs no search, and in long documents most pieces do.
    needs_search = np.flatnonzero(lengths < capacity)
    rows = np.full(len(lengths), -1, np.int64)
    room = np.zeros(_NUM_OPEN_ROWS, np.int64)
    row_of_slot = np.zeros(_NUM_OPEN_ROWS, np.int64)
    num_rows = 0
    for piece, length in zip(needs_search, lengths[needs_search], strict=True):
        fits = room >= length
        slot = fits.argmax()
        if not fits[slot]:
            # Slots are ordered by age: slots after the fullest move up, and the new row takes the last slot.
            fullest = room.argmin()
            room[fullest:-1], row_of_slot[fullest:-1] = room[fullest + 1 :], row_of_slot[fullest + 1 :]
            slot = _NUM_OPEN_ROWS - 1
            room[slot], row_of_slot[slot] = capacity, num_rows
            num_rows += 1
        room[slot] -= length
        rows[piece] = row_of_slot[slot]
    is_full = rows < 0
    rows[is_full] = num_rows + np.arange(np.count_nonzero(is_full))
    return rows


def pack(stream: TokenStream, sequence_length: int, packing: str) -> Examples:
    """Returns the examples of a stream.

    Args:
      stream: concatenated documents.
      sequence_length: T.
      packing: `stream`, or `first_fit`, which requires the positions of the document ends.
    """
    if packing == "stream":
        return StreamExamples(stream, sequence_length)
    assert packing == "first_fit", packing
    stops = stream.document_ends()
    if len(stream) and (not len(stops) or stops[-1] != len(stream)):
        stops = np.append(stops, len(stream))
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)[: len(stops)]
    num_inputs = stops - starts - 1
    num_pieces = -(-num_inputs // sequence_length)
    first_piece = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offsets = (np.arange(num_pieces.sum()) - first_piece) * sequence_length
    piece_starts = np.repeat(starts, num_pieces) + offsets
    piece_lengths = np.minimum(np.repeat(num_inputs, num_pieces) - offsets, sequence_length)
    rows = first_fit(piece_lengths, sequence_length)
    return _in_rows(stream, sequence_length, rows, piece_starts, piece_lengths)


def pack_whole(
    stream: TokenStream, lengths: np.ndarray, sequence_length: int, counted: np.ndarray, *, shares_rows: bool = True
) -> FirstFitExamples:
    """Packs complete documents into examples by first fit.

    Args:
      stream: concatenated documents.
      lengths: int [documents], number of tokens of each, 2 .. T + 1.
      sequence_length: T.
      counted: bool [N], which tokens count as targets; False for the first of each document.
      shares_rows: whether a row may contain several documents; if not, each document has its own row.
    """
    assert int(lengths.sum()) == len(stream) == len(counted), (lengths.sum(), len(stream), len(counted))
    rows = first_fit(lengths - 1, sequence_length) if shares_rows else np.arange(len(lengths))
    return _in_rows(stream, sequence_length, rows, np.cumsum(lengths) - lengths, lengths - 1, counted)


def _in_rows(
    stream: TokenStream,
    sequence_length: int,
    rows: np.ndarray,
    piece_starts: np.ndarray,
    piece_lengths: np.ndarray,
    counted: np.ndarray | None = None,
) -> FirstFitExamples:
    by_row = np.argsort(rows, kind="stable")
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    row_starts = np.searchsorted(rows[by_row], np.arange(num_rows + 1))
    return FirstFitExamples(stream, sequence_length, piece_starts[by_row], piece_lengths[by_row], row_starts, counted)
