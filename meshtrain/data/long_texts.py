"""Splits long texts into pieces that can be tokenized one by one: their ids together are the ids of the complete text.

The package tokenizers needs about 170 bytes of memory for each byte of a text. A *place* is a position between two
adjacent characters. The steps of a tokenizer.json are added tokens, normalizer, pre-tokenizer and model. A place is
safe for a split if each step processes the text before the place independently of the text after the place. This module
derives the independence from the definitions of the steps. If it does not know a step, no place is safe.
"""

import json
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshtrain.data import adjacent
from meshtrain.errors import Problem, UserError
from meshtrain.files import Json, JsonObject

if TYPE_CHECKING:
    import tokenizers

PIECE_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 20
MOST_CHARACTERS = 1 << 24  # maximum length of a piece; tokenizing a piece of this length needs 3 GB of memory
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # used by ByteLevel
_WORDS = r"\w+|[^\w\s]+"  # used by Whitespace
_ASCII = frozenset(string.printable[:95])
_JAMO = range(0x1160, 0x1200)  # Korean letters that compose with the preceding syllable


class _Place(NamedTuple):
    """A place between two adjacent characters of a text, as changed by the tokenizer's steps so far.

    Attributes:
      left: the character before the place, as transformed by the steps.
      right: the character after the place, as transformed by the steps.
      is_split: whether one of the pre-tokenizer steps ended a word at the place.
      prepended: the text that the normalizer prepends to each text.
    """

    left: str
    right: str
    is_split: bool = False
    prepended: str = ""  # text that the normalizer prepends to each text


class _Unsafe(Exception):
    """Raised if a tokenizer step may combine characters before a place with characters after the place."""


def batches(
    texts: Sequence[str], pieces_of: Callable[[str], Iterable[tuple[int, int]]]
) -> Iterator[list[tuple[int, int, int]]]:
    """Splits texts into pieces; yields lists of pieces, each piece as (index of the text, start, stop).

    The pieces of a list have about 1 M characters together.

    Args:
      texts: the texts to tokenize. A text of up to 128 K characters is one piece.
      pieces_of: text -> (start, stop) of each piece, in characters; called for longer texts.
    """
    batch, size = list[tuple[int, int, int]](), 0
    for number, text in enumerate(texts):
        pieces = pieces_of(text) if len(text) > 2 * PIECE_CHARACTERS else ((0, len(text)),)
        for start, end in pieces:
            batch.append((number, start, end))
            size += end - start
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class Cuts:
    """Finds places at which texts can be split without changing the token ids, for one tokenizer.json.

    Args:
      description: the content of the tokenizer.json.
      normalize: text -> normalized text, with the normalizer of the tokenizer.
    """

    def __init__(self, description: JsonObject, normalize: Callable[[str], str]) -> None:
        """Stores the arguments; whether a place is safe is computed later, once for each pair of characters."""
        self._description, self._normalize = description, normalize
        self._skips = dict[str, int | None]()  # pair of characters -> the result of `_count_skipped`
        self._vocabulary_pairs: frozenset[str] | None = None

    def pieces(self, text: str, name: str) -> list[tuple[int, int]]:
        """Splits a text at safe places; returns (start, stop) of each piece in characters. A short text is one piece.

        Args:
          text: the text of a document.
          name: the name of the tokenizer, for the error.

        Raises:
          UserError: a piece would be longer than `MOST_CHARACTERS`, because no safe place in it is known.
        """
        pieces, start = list[tuple[int, int]](), 0
        while len(text) - start > 2 * PIECE_CHARACTERS:
            stop = min(len(text) - PIECE_CHARACTERS, start + MOST_CHARACTERS)
            place = next((one for one in range(start + PIECE_CHARACTERS, stop) if self._is_safe(text, one)), None)
            if place is None:
                break
            pieces.append((start, place))
            start = place + (self._skips[text[place - 1 : place + 1]] or 0)
        if len(text) - start > MOST_CHARACTERS:
            raise UserError(
                Problem(
                    "data.tokenizer",
                    got=(
                        f"'{name}' and a document with {len(text) - start:,} characters that cannot be split "
                        "without changing its tokens"
                    ),
                    allowed=f"at most {MOST_CHARACTERS:,}",
                    nearest="shorter documents",
                )
            )
        return [*pieces, (start, len(text))]

    def _is_safe(self, text: str, place: int) -> bool:
        pair = text[place - 1 : place + 1]
        if pair not in self._skips:
            self._skips[pair] = self._count_skipped(*pair)
        return self._skips[pair] is not None and not self._meets_added_token(text, place)

    def _meets_added_token(self, text: str, place: int) -> bool:
        """Returns whether an added token of the tokenizer may overlap or touch a place in the text.

        The normalized text around the place is also searched.

        Args:
          text: the text of a document.
          place: the number of characters before the place.
        """
        for token in self._description["added_tokens"] or ():
            content = token["content"]
            around = text[max(place - len(content) - 1, 0) : place + len(content) + 2]
            if content in around:
                return True
            if token["normalized"] and self._normalize(content) in self._normalize(around):
                return True
        return False

    def _count_skipped(self, left: str, right: str) -> int | None:
        """Returns the number of characters to omit after a safe place: 0 or 1; None if the place is unsafe.

        It is 1 for a blank after the place if the normalizer prepends a blank to each text. The next piece starts at
        the place without this blank, and the normalizer prepends it again.

        Args:
          left: the character before the place.
          right: the character after the place.
        """
        if any(not _is_simple(one) for one in (left, right)) or (left.isspace() and right.isspace()):
            return None  # an added token may absorb adjacent blanks
        try:
            place = _Place(left, right)
            for step in _steps(self._description["normalizer"], "normalizers"):
                place = _normalize(step, place)
            for step in _steps(self._description["pre_tokenizer"], "pretokenizers"):
                place = _pre_tokenized(step, place)
        except (_Unsafe, adjacent.Unknown, KeyError):
            return None
        if not place.is_split and not self._is_apart(place):
            return None
        if place.prepended:
            return 1 if place.right == place.prepended else None
        return 0

    def _is_apart(self, place: _Place) -> bool:
        """Returns whether no token of a BPE model has the characters around a place next to each other.

        Then no merge crosses the place. Returns False for other models.
        """
        model = self._description["model"]
        is_plain = not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
        if model["type"] != "BPE" or not is_plain or not {place.left, place.right} <= model["vocab"].keys():
            return False
        if self._vocabulary_pairs is None:
            pairs = (token[i : i + 2] for token in model["vocab"] for i in range(len(token) - 1))
            self._vocabulary_pairs = frozenset(pairs)
        return place.left + place.right not in self._vocabulary_pairs


def cuts_of(loaded: "tokenizers.Tokenizer") -> Cuts:
    """Creates the `Cuts` for a `tokenizers.Tokenizer`."""
    return Cuts(json.loads(loaded.to_str()), loaded.normalizer.normalize_str if loaded.normalizer else str)


def _is_simple(one: str) -> bool:
    """Returns whether a character never combines with the character before it, and is not a control character.

    False for marks, Korean vowels and final consonants, control characters, and unassigned characters. True for line
    breaks and tabs.
    """
    category = unicodedata.category(one)
    return one in "\n\r\t" or not (category[0] in "MC" or unicodedata.combining(one) or ord(one) in _JAMO)


def _steps(step: Json, names: str) -> Iterable[JsonObject]:
    if not step:
        return ()
    return [inner for one in step[names] for inner in _steps(one, names)] if step["type"] == "Sequence" else [step]


def _normalize(step: JsonObject, place: _Place) -> _Place:
    """Returns the place after one step of the normalizer: its two characters as the step transforms them.

    Args:
      step: the step's entry in the tokenizer.json.
      place: the place after the previous steps.

    Raises:
      _Unsafe: the step is unknown, or may combine characters on both sides of the place.
    """
    kind, both = step["type"], (place.left, place.right)
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        if unicodedata.normalize(kind, place.left + place.right) != place.left + place.right:
            raise _Unsafe
        return place
    if kind == "StripAccents":
        return place
    if kind == "Lowercase":
        return place._replace(left=_single(place.left.lower()), right=_single(place.right.lower()))
    if kind == "Prepend":
        return place._replace(prepended=step["prepend"])
    if kind == "Replace":
        pattern, content = step["pattern"], step["content"]
        if "Regex" in pattern:
            if adjacent.facts(pattern["Regex"], *both).meets:
                raise _Unsafe
            return place
        if pattern["String"] in both:
            left, right = (content if one == pattern["String"] else one for one in both)
            return place._replace(left=_single(left), right=_single(right))
        if any(one in pattern["String"] for one in both):
            raise _Unsafe
        return place
    if kind in ("Nmt", "Precompiled") and _ASCII.issuperset(both):
        return place
    if kind == "BertNormalizer" and _ASCII.issuperset(both):
        left, right = (one.lower() if step["lowercase"] else one for one in both)
        return place._replace(left=left, right=right)
    raise _Unsafe


def _single(text: str) -> str:
    if len(text) != 1:
        raise _Unsafe
    return text


def _pre_tokenized(step: JsonObject, place: _Place) -> _Place:
    """Returns the place after one step of the pre-tokenizer, which may transform its characters and end a word there.

    In the result, `is_split` is true if this step or a previous step ends a word at the place.

    Args:
      step: the step's entry in the tokenizer.json.
      place: the place after the previous steps.

    Raises:
      _Unsafe: the step is unknown, or may combine characters on both sides of the place.
    """
    kind, both = step["type"], (place.left, place.right)
    is_blank, is_sign = any(one.isspace() for one in both), any(_is_punctuation(one) for one in both)
    if kind == "ByteLevel":
        if step["add_prefix_space"] and place.right != " " and not place.is_split:
            raise _Unsafe
        if step["use_regex"]:
            place = _split_at_matches(_GPT2, "Isolated", place)
        return place._replace(left=_BYTES[place.left.encode()[-1]], right=_BYTES[place.right.encode()[0]])
    if kind == "Metaspace":
        return _at_blank(step, place)
    if kind == "Split":
        pattern = step["pattern"]
        if "Regex" in pattern:
            return _split_at_matches(pattern["Regex"], step["behavior"], place)
        if not any(one in pattern["String"] for one in both):
            return place
        if pattern["String"] not in both or step["behavior"] not in ("Isolated", "Removed"):
            raise _Unsafe
        return place._replace(is_split=True)
    if kind == "Whitespace":
        return _split_at_matches(_WORDS, "Removed", place)
    if kind == "Punctuation" and is_sign and step["behavior"] not in ("Isolated", "Removed"):
        raise _Unsafe
    numeric = [unicodedata.category(one).startswith("N") for one in both]
    splits: Mapping[str, Callable[[], bool]] = {
        "WhitespaceSplit": lambda: is_blank,
        "BertPreTokenizer": lambda: is_blank or is_sign,
        "Punctuation": lambda: is_sign,
        "Digits": lambda: any(numeric) and (step["individual_digits"] or not all(numeric)),
        "CharDelimiterSplit": lambda: step["delimiter"] in both,
    }
    if kind not in splits:
        raise _Unsafe
    return place._replace(is_split=place.is_split or splits[kind]())


def _at_blank(step: JsonObject, place: _Place) -> _Place:
    """Returns the place after the step Metaspace, which replaces blanks by `▁` and may end a word before each `▁`.

    Raises:
      _Unsafe: the step would prepend `▁` to a piece that starts at the place.
    """
    mark = step["replacement"]
    left, right = (mark if one == " " else one for one in (place.left, place.right))
    if right != mark and step["prepend_scheme"] != "never":
        raise _Unsafe
    return place._replace(left=left, right=right, is_split=place.is_split or (step["split"] and right == mark))


def _split_at_matches(pattern: str, behavior: str, place: _Place) -> _Place:
    """Returns the place after a step that splits the text into words at the matches of a regular expression.

    Args:
      pattern: the regular expression.
      behavior: whether each match becomes a separate word (`Isolated`), is removed (`Removed`), or another value of a
        tokenizer.json, which is not supported.
      place: the place after the previous steps.

    Raises:
      _Unsafe: a match may contain the characters on both sides of the place, or `behavior` is not supported.
    """
    found = adjacent.facts(pattern, place.left, place.right)
    if not found.meets:
        return place
    if found.joins or behavior not in ("Isolated", "Removed"):
        raise _Unsafe
    return place._replace(is_split=place.is_split or found.matches_y)


def _is_punctuation(one: str) -> bool:
    return one in string.punctuation or unicodedata.category(one).startswith("P")


def _byte_characters() -> Sequence[str]:
    """Returns the 256 characters by which the step ByteLevel represents bytes.

    Source: the function bytes_to_unicode in GPT-2's encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTES = _byte_characters()
