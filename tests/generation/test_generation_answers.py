"""What of a text is shown while its tokens come, and where it ends."""

import pytest

from meshtrain.data.tokenizer import byte_tokenizer, number_tokenizer
from meshtrain.generation.answers import Shown, Text, first_stop, num_settled

BYTES = byte_tokenizer()


def pieces(ids, size, **given):
    """The text after each piece of `size` tokens, and the text itself."""
    text, seen = Text(BYTES.decode, **given), []
    for start in range(0, len(ids), size):
        if text.add(ids[start : start + size], start + size >= len(ids), len(ids)):
            break
        seen.append(text.text)
    return seen, text


def test_half_a_character_is_held_back():
    seen, text = pieces(list("aé€😀b".encode()), 1)
    assert [one for i, one in enumerate(seen) if i == 0 or one != seen[i - 1]] == ["a", "aé", "aé€", "aé€😀"]
    assert text.text == "aé€😀b"
    assert text.ended == "length"


def test_bytes_that_are_no_text_are_shown_at_the_end():
    seen, text = pieces([65, 0xFF, 0xFE], 1)
    assert seen[-1] == "A"
    assert text.text == "A��"


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_stop_string_ends_a_text_before_it_whatever_comes_at_once(size):
    seen, text = pieces(list(b"one; two;; three. four"), size, stops=[". ", ";; th"])
    assert text.text == "one; two"
    assert text.ended == "stop"
    assert all("one; two".startswith(one) for one in seen), "nothing of a stop string is ever shown"


def test_the_end_token_and_the_length_are_told_apart():
    text = Text(BYTES.decode)
    assert not text.add([65], False, 5)
    assert text.add([66], True, 5)
    assert (text.text, text.ended) == ("AB", "end")


def test_the_first_stop_that_is_complete_counts():
    assert first_stop("abcde", ["abcde", "c"]) == 2
    assert first_stop("ab", ["c"]) is None
    assert num_settled("ab.", [".."]) == 2


def test_a_tokens_text_may_depend_on_the_prompt():
    numbers = number_tokenizer(100)
    text = Text(numbers.decode, before=[1, 2])
    text.add([3, 4], True, 2)
    assert text.text == " 3 4"


def test_texts_are_shown_one_after_the_other():
    said = []
    texts = [Text(BYTES.decode) for _ in range(3)]
    shown = Shown(said.append, ["<", "", "["])

    def add(index, what, is_last=False):
        texts[index].add(list(what), is_last, 100)
        shown(index, texts[index])

    add(1, b"second", True)
    assert said == []
    add(0, b"fir")
    assert "".join(said) == "<fir"
    add(2, b"th")
    add(0, b"st", True)
    assert "".join(said) == "<first\nsecond\n[th"
    add(2, b"ird", True)
    assert "".join(said) == "<first\nsecond\n[third\n"
