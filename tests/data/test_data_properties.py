"""Properties of shares, orders, splits, masks and interrupted writes, for arbitrary sizes and seeds."""

import contextlib
import math
import pathlib
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from meshtrain.data.chat import Tokens, as_examples, in_spans
from meshtrain.data.loader import mixture_order, sample_order, samples_per_source, turns
from meshtrain.data.packing import Parts
from meshtrain.data.prepare import prepare
from meshtrain.data.text import SPLIT_BY_HASH_FROM, split_by_hash
from meshtrain.data.token_files import is_intact, make_index, read_description, read_index
from meshtrain.data.tokenizer import byte_tokenizer
from meshtrain.errors import UserError

SEEDS = st.integers(0, 2**32 - 1)
few = hypothesis.settings(max_examples=25)


@few
@hypothesis.given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_each_source_is_less_than_one_sample_away_from_its_share(weights, data):
    weights = tuple(weight // math.gcd(*weights) for weight in weights)
    total = sum(weights)
    num_samples = data.draw(st.integers(0, 3 * total))
    drawn = np.bincount(np.tile(turns(weights), 3)[:num_samples], minlength=len(weights))
    np.testing.assert_array_equal(samples_per_source(weights, num_samples), drawn)
    assert np.all(np.abs(drawn * total - np.asarray(weights) * num_samples) < total)


@few
@hypothesis.given(st.integers(1, 30), SEEDS)
def test_each_epoch_is_a_permutation_and_epochs_differ(size, seed):
    order = sample_order(size, seed=seed)
    epochs = [[order[epoch * size + place] for place in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size < 12 or len({tuple(epoch) for epoch in epochs}) == 3


@few
@hypothesis.given(st.integers(12, 30), st.integers(2, 4), SEEDS)
def test_the_sources_of_a_mixture_have_orders_of_their_own(size, num_sources, seed):
    """Sources of one size would have the same order if they had one seed."""
    mixture = Parts({str(number): range(size) for number in range(num_sources)}, (1,) * num_sources)
    order = mixture_order(mixture, seed=seed)
    samples = [order[sample] for sample in range(size * num_sources)]
    orders = [[number % size for number in samples if number // size == source] for source in range(num_sources)]
    assert all(sorted(one) == list(range(size)) for one in orders)
    assert len({tuple(one) for one in orders}) == num_sources


@few
@hypothesis.given(st.integers(1, 2 * SPLIT_BY_HASH_FROM), st.floats(0.001, 0.999))
def test_a_split_has_each_item_once_and_few_items_still_give_validation_items(num_items, fraction):
    keys = [f"text {number}" for number in range(num_items)]
    train, validation = split_by_hash(keys, keys, fraction)
    assert sorted([*train, *validation], key=keys.index) == keys
    assert num_items >= SPLIT_BY_HASH_FROM or validation
    assert split_by_hash(keys, keys, 0.0) == (keys, [])


@few
@hypothesis.given(st.data())
def test_a_token_counts_exactly_if_it_has_a_character_of_a_span(data):
    numbers = st.integers(0, 12)
    places = data.draw(st.lists(st.tuples(numbers, numbers).map(sorted), min_size=1, max_size=8))
    spans = data.draw(st.lists(st.tuples(numbers, numbers).map(sorted).filter(lambda span: span[0] < span[1])))
    # A token without characters, blanks that the tokenizer has trimmed, belongs to the character before it.
    characters = [set(range(begin, end)) or {end - 1} for begin, end in places]
    wanted = [any(held & set(range(*span)) for span in spans) for held in characters]
    assert in_spans(np.asarray(places), spans).tolist() == wanted


@few
@hypothesis.given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), max_size=6), st.integers(2, 8))
def test_each_line_of_a_row_has_a_target_and_short_lines_keep_all(lines, sequence_length):
    tokens = [Tokens(np.arange(len(line), dtype=np.uint16) + 1, np.asarray(line)) for line in lines]
    fitted = as_examples(tokens, sequence_length, byte_tokenizer())
    rows = [fitted.examples[number] for number in range(len(fitted.examples))]
    targets = [row["weights"][row["segment_ids"] == segment] for row in rows for segment in {*row["segment_ids"]} - {0}]
    assert all(one.any() for one in targets)
    assert len(targets) == fitted.num_lines == len(lines) - fitted.num_dropped
    assert fitted.num_lines == sum(any(line[1:]) for line in lines if len(line) <= sequence_length + 1) + sum(
        any(line) for line in lines if len(line) > sequence_length + 1
    )
    if not fitted.num_truncated:
        assert sum(one.sum() for one in targets) == sum(sum(line[1:]) for line in lines)


class Killed(BaseException):
    """Ends `prepare` at one of its file operations, as a kill would."""


@contextlib.contextmanager
def killed_at(number):
    """Makes one operation on names of files, counted from 0, raise `Killed` before it happens."""
    count = 0

    def counted(original):
        def operation(*given, **named):
            nonlocal count
            count += 1
            if count == number + 1:
                raise Killed
            return original(*given, **named)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))
        yield


@few
@hypothesis.given(st.integers(0, 8), st.lists(st.text("ab\n", min_size=1, max_size=9), min_size=2, max_size=2))
def test_an_interrupted_overwrite_leaves_tokens_with_their_own_description_or_none(number, texts):
    hypothesis.assume(all(text.strip() for text in texts))
    with tempfile.TemporaryDirectory() as folder:
        source, out = pathlib.Path(folder, "a.txt"), pathlib.Path(folder, "a.bin")
        source.write_text(texts[0])
        prepare(str(source), str(out))
        source.write_text(texts[1])
        with killed_at(number), contextlib.suppress(Killed):
            prepare(str(source), str(out), overwrite=True)
        try:
            described = read_description(out)
        except UserError:
            return
        assert is_intact(out, described)
        assert read_index(out) in (None, make_index(out, described, whole=True))
