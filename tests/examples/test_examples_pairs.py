"""Pairs packed into rows: both budgets hold, every pair is there once, and both sides belong together."""

import itertools

import numpy as np
import pytest

from meshtrain.errors import UserError
from meshtrain.examples.pairs import pack_pairs, rows_in_order

GENERATOR = np.random.default_rng(0)
PAIRS = [
    (GENERATOR.integers(1, 50, GENERATOR.integers(1, 9)).tolist(), GENERATOR.integers(1, 50, length).tolist())
    for length in GENERATOR.integers(0, 7, 60)
]
S, T, BEGIN, END = 16, 11, 60, 61


def examples(**changes):
    return pack_pairs(PAIRS, **({"source_length": S, "target_length": T, "begin_id": BEGIN, "end_id": END} | changes))


def unpacked(example):
    """The pairs of a row, from what a model is given: (source, inputs, targets) by segment id."""
    found = []
    for segment in range(1, example["segment_ids"].max() + 1):
        source, target = example["source_segment_ids"] == segment, example["segment_ids"] == segment
        for places, positions in ((source, "source_positions"), (target, "positions")):
            assert example[positions][places].tolist() == list(range(places.sum()))
            assert np.all(np.diff(np.flatnonzero(places)) == 1), "the tokens of a pair are neighbours"
        assert np.all(example["weights"][target] == 1)
        found.append(
            [example["source_tokens"][source].tolist(), *(example[n][target].tolist() for n in ("tokens", "targets"))]
        )
    return found


def test_every_pair_is_in_one_row_with_its_begin_and_its_end():
    rows = examples()
    found = [pair for number in range(len(rows)) for pair in unpacked(rows[number])]
    assert found == [[[*source, BEGIN], [BEGIN, *target], [*target, END]] for source, target in PAIRS]


def test_rows_have_fixed_shapes_and_padding_counts_nothing():
    rows = examples()
    for row in (rows[number] for number in range(len(rows))):
        assert {name: (array.shape, array.dtype.name) for name, array in row.items()} == {
            **{f"source_{name}": ((S,), "int32") for name in ("tokens", "segment_ids", "positions")},
            **dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ((T,), "int32")),
            "weights": ((T,), "float32"),
        }
        assert np.all((row["segment_ids"] > 0) == (row["weights"] > 0))
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("capacities", [(9, 7), (16, 11), (400, 7), (9, 400), (400, 400)])
def test_a_row_is_closed_where_the_next_pair_does_not_fit(capacities):
    lengths = np.array([(len(source) + 1, len(target) + 1) for source, target in PAIRS])
    starts = rows_in_order(lengths, capacities)
    assert (starts[0], starts[-1]) == (0, len(PAIRS))
    for first, last in itertools.pairwise(starts):
        assert np.all(lengths[first:last].sum(axis=0) <= capacities)
        if last < len(PAIRS):
            assert np.any(lengths[first : last + 1].sum(axis=0) > capacities)


@pytest.mark.parametrize(
    "pair, said",
    [
        (
            (list(range(16)), [1]),
            r"^data: pair 60 has 17 source tokens and 2 target tokens, .* model\.source_length=17,",
        ),
        (([1], list(range(11))), r"^data: pair 60 has 2 .* allowed: at most 16 and 11; nearest: sequence_length=12,"),
    ],
)
def test_a_pair_that_no_row_holds_is_refused(pair, said):
    with pytest.raises(UserError, match=said):
        pack_pairs([*PAIRS, pair], source_length=S, target_length=T)
