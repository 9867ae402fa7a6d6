"""Numbers in words: their spelling, which are held out, and what a model is given."""

import dataclasses

import numpy as np
import pytest

from meshtrain.data.sources import DataRequest
from meshtrain.errors import UserError
from meshtrain.examples.numbers import NumberOptions, NumberPairs, open_numbers, spell, split_by_hash, tokenizer

OPTIONS = NumberOptions(source="numbers")
WIDE = dataclasses.replace(OPTIONS, numbers_below=1_000_000)


def opened(options, source_length=20, target_length=24, vocab_size=100):
    shapes = {"source_tokens": (1, source_length), "tokens": (1, target_length)}
    batch = {name: np.empty(shape, np.int32) for name, shape in shapes.items()}
    return open_numbers(options, DataRequest(batch, {}, target_length, vocab_size, 0))


@pytest.mark.parametrize(
    "number, english",
    [
        (0, "zero"),
        (7, "seven"),
        (10, "ten"),
        (19, "nineteen"),
        (20, "twenty"),
        (42, "forty two"),
        (100, "one hundred"),
        (110, "one hundred and ten"),
        (407, "four hundred and seven"),
        (999, "nine hundred and ninety nine"),
        (1000, "one thousand"),
        (1001, "one thousand and one"),
        (1100, "one thousand one hundred"),
        (20_042, "twenty thousand and forty two"),
        (999_999, "nine hundred and ninety nine thousand nine hundred and ninety nine"),
    ],
)
def test_numbers_are_spoken_as_in_britain(number, english):
    assert " ".join(spell(number, "english")) == english


def test_digits_are_spelled_one_by_one():
    assert " ".join(spell(407, "digits")) == "four zero seven"
    assert spell(0, "digits") == ["zero"]


@pytest.mark.parametrize("spelling", ["digits", "english"])
def test_lengths_are_those_of_the_pairs_with_their_ends(spelling):
    numbers = np.concatenate([np.arange(2500), np.random.default_rng(0).integers(0, 1_000_000, 500), [999_999]])
    pairs = NumberPairs(numbers, spelling)
    counted = [(len(source) + 1, len(target) + 1) for source, target in map(pairs.__getitem__, range(len(pairs)))]
    np.testing.assert_array_equal(pairs.lengths(), counted)


def test_the_held_out_numbers_are_those_with_the_smallest_hash():
    train, held_out = split_by_hash(OPTIONS)
    assert (len(train), len(held_out)) == (900, 100)
    assert sorted([*train, *held_out]) == list(range(1000))
    # They stay held out where fewer are, and among more numbers those below 1,000 are no others.
    assert split_by_hash(dataclasses.replace(OPTIONS, num_held_out=30))[1].tolist() == held_out[:30].tolist()
    _, of_many = split_by_hash(dataclasses.replace(WIDE, num_held_out=100_000))
    small = of_many[of_many < 1000].tolist()
    both = min(len(small), len(held_out))
    assert small[:both] == held_out.tolist()[:both]
    assert both > 50
    assert len(split_by_hash(WIDE)[1]) == 1000


def test_the_hash_mixes_neighbours():
    """Each digit leads about a tenth of the held-out numbers, and in each place."""
    _, held_out = split_by_hash(WIDE)
    for place in range(6):
        counts = np.bincount(held_out // 10**place % 10, minlength=10)
        assert np.all((counts > 60) & (counts < 140)), counts
    train, _ = split_by_hash(WIDE)
    assert abs(np.corrcoef(train[:-1], train[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("spelling", ["digits", "english"])
def test_a_row_reads_aloud(spelling):
    options = dataclasses.replace(OPTIONS, spelling=spelling)
    data = opened(options)
    row, number = data.train[0], split_by_hash(options)[0][0]
    first = row["source_segment_ids"] == 1, row["segment_ids"] == 1
    assert data.text.decode(row["source_tokens"][first[0]]) == str(number)
    assert data.text.decode(row["targets"][first[1]]) == " ".join(spell(int(number), spelling))
    assert row["targets"][first[1]][-1] == row["tokens"][0] == data.text.end_id == 0
    assert data.summary.startswith(f"numbers below 1,000 in {spelling}: 900 + 100 pairs in ")
    pairs = sum(int(data.train[i]["segment_ids"].max()) for i in range(len(data.train)))
    assert pairs == 900


def test_other_numbers_are_other_data():
    changes = [{}, {"spelling": "english"}, {"numbers_below": 999}, {"num_held_out": 99}]
    lengths = [(20, 24)] * 4 + [(21, 24), (20, 25)]
    found = {
        opened(dataclasses.replace(OPTIONS, **change), source, target).fingerprint
        for change, (source, target) in zip([*changes, {}, {}], lengths, strict=True)
    }
    assert len(found) == 6


def test_text_goes_both_ways():
    text = tokenizer("english")
    assert text.decode(text.encode("407")) == "407"
    assert text.decode([*text.encode("four hundred and seven"), text.end_id]) == "four hundred and seven"
    assert text.decode([10**6, -1]) == ""
    assert text.vocab_size == 1 + 10 + 10 + 10 + 8 + 3
    assert tokenizer("digits").vocab_size == 21
    assert [ids.tolist() for ids in text.encode_documents(["40", "forty"])] == [[5, 1], text.encode("forty")]


@pytest.mark.parametrize(
    "prompt, said",
    [("4o7", "got '4o7'"), ("sevn", "did you mean 'seven'"), ("<end>", "got '<end>'"), ("-7", "got '-7'")],
)
def test_a_prompt_that_is_no_number_is_refused(prompt, said):
    with pytest.raises(UserError, match=said):
        tokenizer("digits").encode(prompt)


@pytest.mark.parametrize(
    "sizes, keys",
    [
        ((3, 24, 100), ["model.source_length: got 3; allowed for numbers below 1,000 in english: at least 4,"]),
        ((4, 5, 100), ["sequence_length: got 5; allowed for numbers below 1,000 in english: at least 6,"]),
        ((2, 5, 41), ["model.source_length: ", "sequence_length: ", "model.vocab_size: got 41; allowed"]),
    ],
)
def test_sizes_that_hold_no_number_are_refused_together(sizes, keys):
    options = dataclasses.replace(OPTIONS, spelling="english")
    with pytest.raises(UserError) as caught:
        opened(options, *sizes)
    for line, key in zip(caught.value.problems, keys, strict=True):
        assert line.startswith(key)
