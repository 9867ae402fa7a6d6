import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain.data.packing import TokenStream, first_fit, pack

END = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, END - 1), max_size=12), min_size=1, max_size=12)


def stream_of(documents, parts=1, closed=True):
    flat = [token for document in documents for token in [*document, END]]
    ids = np.asarray(flat if closed else flat[:-1], np.uint16)
    return TokenStream(tuple(np.array_split(ids, parts)), END)


def true_pairs(documents):
    """The (token, next token) pairs inside documents, by the plainest means."""
    return sorted(pair for document in documents for pair in zip([*document, END], [*document, END][1:], strict=False))


def counted_pairs(examples):
    found = []
    for index in range(len(examples)):
        example = examples[index]
        counts = example["weights"] > 0
        found += zip(example["tokens"][counts].tolist(), example["targets"][counts].tolist(), strict=True)
    return sorted(found)


def yielded_pairs(examples):
    return sorted(
        pair for tokens, targets in examples.pairs() for pair in zip(tokens.tolist(), targets.tolist(), strict=True)
    )


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_stream_reads_across_parts(parts):
    whole = np.arange(17, dtype=np.uint16)
    stream = TokenStream(tuple(np.array_split(whole, parts)) + (whole[:0],), -1)
    assert len(stream) == 17
    for start in range(18):
        for stop in range(start, 18):
            read = stream.read(start, stop)
            assert read.dtype == np.int32
            assert read.tolist() == list(range(start, stop))
            assert stream.cut(start, stop).read(0, stop - start).tolist() == list(range(start, stop))


def test_stream_window_by_hand():
    examples = pack(stream_of([[1, 2], [3], [4, 5, 6, 7]]), 4, "stream")
    # The stream is 1 2 E 3 E 4 5 6 7 E.
    assert len(examples) == 2
    assert {name: array.tolist() for name, array in examples[0].items()} == {
        "tokens": [1, 2, END, 3],
        "targets": [2, END, 3, END],
        "segment_ids": [1, 1, 1, 2],
        "positions": [0, 1, 2, 0],
        "weights": [1, 1, 0, 1],
    }
    assert {name: array.tolist() for name, array in examples[1].items()} == {
        "tokens": [END, 4, 5, 6],
        "targets": [4, 5, 6, 7],
        "segment_ids": [1, 2, 2, 2],
        "positions": [0, 0, 1, 2],
        "weights": [0, 1, 1, 1],
    }


def test_first_fit_row_by_hand():
    examples = pack(stream_of([[1, 2], [3], [4, 5, 6, 7, 8, 1], []]), 4, "first_fit")
    # The long document fills a row, and its last two inputs open another; the empty one has nothing to predict.
    assert len(examples) == 3
    assert {name: array.tolist() for name, array in examples[0].items()} == {
        "tokens": [1, 2, 3, 0],
        "targets": [2, END, END, 0],
        "segment_ids": [1, 1, 2, 0],
        "positions": [0, 1, 0, 0],
        "weights": [1, 1, 1, 0],
    }
    assert examples[1]["tokens"].tolist() == [8, 1, 0, 0]
    assert examples[1]["targets"].tolist() == [1, END, 0, 0]
    assert examples[2]["tokens"].tolist() == [4, 5, 6, 7]
    assert examples[2]["targets"].tolist() == [5, 6, 7, 8]


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(1, 8), parts=st.integers(1, 4))
def test_first_fit_counts_every_pair_once(documents, length, parts):
    examples = pack(stream_of(documents, parts), length, "first_fit")
    assert counted_pairs(examples) == yielded_pairs(examples) == true_pairs(documents)
    for index in range(len(examples)):
        example = examples[index]
        padding = example["segment_ids"] == 0
        assert np.array_equal(example["weights"], 1.0 - padding)
        # Each segment is one run, numbered upwards, and padding comes last.
        segments = example["segment_ids"][~padding]
        assert (np.diff(segments) >= 0).all()
        assert not padding[: len(segments)].any()
        for segment in set(segments.tolist()):
            positions = example["positions"][example["segment_ids"] == segment]
            assert positions.tolist() == list(range(len(positions)))


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(1, 8), parts=st.integers(1, 4))
def test_stream_counts_pairs_inside_documents_only(documents, length, parts):
    stream = stream_of(documents, parts)
    examples = pack(stream, length, "stream")
    used = len(examples) * length
    ids = stream.read(0, len(stream)).tolist()
    wanted = sorted((ids[i], ids[i + 1]) for i in range(used) if ids[i] != END)
    assert counted_pairs(examples) == yielded_pairs(examples) == wanted
    for index in range(len(examples)):
        example = examples[index]
        same = example["segment_ids"][1:] == example["segment_ids"][:-1]
        assert np.array_equal(same, example["tokens"][:-1] != END)
        assert np.array_equal(example["positions"][1:], np.where(same, example["positions"][:-1] + 1, 0))


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_dtypes_shapes_and_ends(packing):
    examples = pack(stream_of([[1, 2, 3, 4, 5]] * 3, closed=False), 4, packing)
    for name, array in examples[0].items():
        assert array.shape == (4,)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
    for index in (-1, len(examples)):
        with pytest.raises(IndexError):
            examples[index]


def test_first_fit_takes_the_first_open_row_and_never_overfills():
    assert first_fit(np.array([3, 3, 1, 2, 4, 1]), 4).tolist() == [0, 1, 0, 2, 3, 1]
    lengths = np.random.default_rng(0).integers(1, 65, 5000)
    rows = first_fit(lengths, 64)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 64
    assert filled.min() > 0
    assert filled.mean() > 0.9 * 64


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_empty_stream_has_no_examples(packing):
    assert len(pack(TokenStream((np.empty(0, np.uint16),), END), 4, packing)) == 0
