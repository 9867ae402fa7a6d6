"""Splits token streams into numbered examples of equal length: windows of the stream, or rows of packed documents.

Shapes: T sequence_length, N tokens of a stream, P pieces of documents, R rows.

An example is a dict of arrays [T]: tokens, targets, segment_ids, positions (int32) and weights (float32: 1 if the loss
includes the target, else 0). Segment ids count from 1 within a row; 0 is padding. Positions count from 0 within a
segment.
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
    """Numbered examples, and the (token, target) pairs in them to which a bigram model can be fitted."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def pairs(self) -> TokenPairs:
        """Yields (tokens, targets) in chunks, integer arrays of equal length.

        The chunks contain each position of weight 1 exactly once, and no other positions.
        """
        ...


class Ids(Protocol):
    """A 1-D array of token ids, or an object for a range of a token file, which `np.asarray` converts to an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...

    def __array__(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """The concatenation of one or more 1-D arrays of token ids; ids of files are loaded only when they are read.

    Attributes:
      parts: the arrays in order, of unsigned integers.
      end_id: the id of the token that ends a document.
      find_ends: a function that returns the result of `document_ends` without reading the ids; None: `document_ends`
        reads all ids.
      inner_ends: sorted positions of end tokens that are part of a document and do not end it, int64.
      starts: position of the first token of each part, and the length of the stream, int64 [parts + 1].
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
        """Reads the tokens at positions start .. stop - 1, int32 [stop - start]."""
        spans = [np.asarray(span, dtype=np.int32) for span in self._spans(start, stop)]
        return spans[0] if len(spans) == 1 else np.concatenate([np.empty(0, np.int32), *spans])

    def cut(self, start: int, stop: int) -> "TokenStream":
        """Returns the part at positions start .. stop - 1 as a stream, without reading tokens."""
        find_ends = functools.partial(self._ends_between, start, stop) if self.find_ends else None
        first, last = np.searchsorted(self.inner_ends, (start, stop))
        inner_ends = self.inner_ends[first:last] - start
        return TokenStream(tuple(self._spans(start, stop)), self.end_id, find_ends, inner_ends)

    def _ends_between(self, start: int, stop: int) -> np.ndarray:
        ends = self.document_ends()
        first, last = np.searchsorted(ends, (start, stop), side="right")
        return ends[first:last] - start

    def ends_documents(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Returns a mask of the tokens that end a document, bool [number of tokens].

        The mask is false for an end token inside a document.

        Args:
          start: position of the first token in the stream.
          tokens: int32 [number of tokens], the tokens from this position on.
        """
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
        """Yields (tokens, next tokens) in chunks, for positions 0 .. stop - 1.

        Positions of tokens that end a document are left out.
        """
        for start in range(0, stop, _CHUNK_TOKENS):
            chunk = self.read(start, min(start + _CHUNK_TOKENS, stop) + 1)
            inside = ~self.ends_documents(start, chunk[:-1])
            yield chunk[:-1][inside], chunk[1:][inside]


@dataclasses.dataclass(frozen=True)
class StreamExamples:
    """Consecutive windows of a stream: the inputs of example i are tokens i*T .. (i+1)*T - 1 of the stream.

    The targets are shifted by one token. Tokens after the last complete window are unused. A document that started in
    an earlier window continues as a new segment, from position 0. The end token is a target. If the input is the end
    token, the target belongs to the next document and has weight 0.

    Attributes:
      stream: the concatenated documents.
      sequence_length: T.
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
        """Yields (tokens, targets) in chunks, for every position of weight 1."""
        return self.stream.pairs(len(self) * self.sequence_length)


@dataclasses.dataclass(frozen=True)
class FirstFitExamples:
    """Padded rows of complete documents, packed by first fit; example i is row i.

    A document of L tokens, including its end token, has L - 1 inputs. A document with more than T inputs is split into
    pieces. The last target of a piece is the first input of the next piece, so every token except a document's first is
    a target exactly once.

    Attributes:
      stream: the concatenated documents.
      sequence_length: T.
      piece_starts: int64 [pieces], position of each piece in the stream, ordered by row.
      piece_lengths: int64 [pieces], number of inputs of each piece.
      row_starts: int64 [rows + 1]; row r consists of the pieces row_starts[r] .. row_starts[r + 1] - 1.
      counted: bool [N], whether the weight of a token as a target is 1; False for the first token of each document.
        None: the weight is 1 for all tokens except these first tokens.
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
        """Yields (tokens, targets) in chunks, for every position of weight 1; requires that `counted` is None."""
        assert self.counted is None, "answers are not a corpus"
        return self.stream.pairs(max(len(self.stream) - 1, 0))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The examples of several sources, numbered one source after the other.

    Attributes:
      parts: source name -> examples.
      weights: for a mixture, how many of sum(weights) consecutive samples come from each source; () if the examples are
        not sampled by weight.
      starts: number of the first example of each source, and the total number of examples, int64 [sources + 1].
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
        """Returns the source that contains example `index`, and the number of this example within the source."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return list(self.parts.values())[number], index - int(self.starts[number])

    def pairs(self) -> TokenPairs:
        """Yields the (tokens, targets) chunks of each source once, ignoring the weights."""
        for part in self.parts.values():
            yield from part.pairs()


def inner_ends(documents: Sequence[np.ndarray], end_id: int) -> np.ndarray:
    """Returns the positions of end ids that are part of a document and do not end it, int64, sorted.

    The positions are in a stream of the concatenated documents, in which `end_id` also follows each document.

    Args:
      documents: the ids of each document, without the end id after it.
      end_id: the id that ends a document.
    """
    places, start = [np.empty(0, np.int64)], 0
    for ids in documents:
        places.append(np.flatnonzero(ids == end_id) + start)
        start += len(ids) + 1
    return np.concatenate(places)


def inner_end_targets(examples: Examples, index: int) -> np.ndarray | None:
    """Returns a mask of the targets of example `index` that are end tokens inside a document, bool [T].

    Returns None if no document of the data contains an end token that does not end the document.
    """
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
    """Returns the number of input tokens in all examples, without padding."""
    if isinstance(examples, FirstFitExamples):
        return int(examples.piece_lengths.sum())
    assert isinstance(examples, StreamExamples), examples
    return len(examples) * examples.sequence_length


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Packs pieces into rows: assigns each piece to the oldest open row with enough space.

    If no open row has enough space, a new row replaces the fullest open row. At most 64 rows are open, so the time is
    linear in the number of pieces, and rows are about 90 % full.

    Args:
      lengths: int [P], number of tokens of each piece, 1 .. capacity.
      capacity: T, number of tokens in a row.

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
    """Splits a token stream into examples.

    Args:
      stream: the concatenated documents.
      sequence_length: T.
      packing: `stream` (windows of the stream) or `first_fit` (rows of complete documents). `first_fit` reads the
        stream once if the positions of the document ends are not known.
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
      stream: the concatenated documents.
      lengths: int [documents], number of tokens of each document, 2 .. T + 1.
      sequence_length: T.
      counted: bool [N], whether the weight of a token as a target is 1; False for the first token of each document.
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
