"""Counts special tokens such as `</s>` whose text occurs in documents and messages; encodes them as text if requested.

By default a tokenizer encodes the text of a special token as this token, also in documents and messages. With
`data.special_tokens=text`, only a chat template can write special tokens; the option `split_special_tokens` of
transformers does this for texts. The special tokens that a template writes are prefixed with the character `MARK`, and
the tokenizer recognizes only special tokens with this mark.
"""

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtrain.files import Json, JsonObject

if TYPE_CHECKING:
    import tokenizers

ENCODE, TEXT = MODES = ("encode", "text")
# Unicode reserves these two code points for internal use of programs, like `chat_template.BEGIN`.
MARK, LITERAL = "\ufdd2", "\ufdd3"
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

Message = Mapping[str, Json]
Spans = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
      ids: text -> id of each token that the tokenizer.json marks as special, and of the end token.
      as_text: whether the text of a special token in documents and messages is encoded as plain text.
    """

    ids: Mapping[str, int]
    as_text: bool = False

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def count(self, value: Json) -> int:
        """Returns how often special tokens occur in a text, or in all texts of a nested list or object."""
        if isinstance(value, dict | list | tuple):
            return sum(map(self.count, value.values() if isinstance(value, dict) else value))
        return len(self._pattern.findall(value)) if self._pattern and isinstance(value, str) else 0

    def counted(self, number: int) -> str:
        """Returns a text with the number of special tokens, to append to the data's summary; '' if `number` is 0."""
        return f" with {number:,} special tokens in texts, encoded as {'text' if self.as_text else 'these tokens'}" * (
            number > 0
        )

    def literal(self, value: Json) -> Json:
        """Returns a copy of `value` with the character `LITERAL` inserted into the text of each special token.

        A tokenizer then does not recognize these texts as special tokens.

        Args:
          value: a text, or a nested list or object of texts, such as messages.
        """
        if isinstance(value, dict):
            return {name: self.literal(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.literal(inner) for inner in value]
        if not self._pattern or not isinstance(value, str):
            return value
        return self._pattern.sub(lambda match: f"{match[0][:1]}{LITERAL}{match[0][1:]}", unmark(value))

    def through_template(
        self, write: Callable[[Sequence[Message]], tuple[str, Spans]], messages: Sequence[Message]
    ) -> tuple[str, Spans]:
        """Formats messages with a chat template; if `as_text`, special tokens can come only from the template.

        If `as_text`, a special token's text in a message becomes plain text.

        Args:
          write: a function that applies the template: messages -> text and spans, such as the positions of answers.
          messages: the messages of one conversation.

        Returns:
          The text and its spans. If `as_text`, the text has `MARK` before each special token of the template.
        """
        return self.insert_marks(*write(self.literal(messages))) if self.as_text else write(messages)

    def insert_marks(self, text: str, spans: Spans = ()) -> tuple[str, Spans]:
        """Inserts `MARK` before each special token that a template wrote, and removes the characters `LITERAL`.

        Args:
          text: the output of the template, for messages into which `literal` has inserted `LITERAL`.
          spans: (start, stop) in characters of `text`.

        Returns:
          The new text, and the same spans in characters of the new text.

        >>> SpecialTokens({"</s>": 2}, True).insert_marks(f"<{LITERAL}/s>b</s>", ((6, 10),))[1]
        ((5, 10),)
        """
        places = [(match.start(), MARK) for match in self._pattern.finditer(text)] if self._pattern else []
        places += [(match.start(), "") for match in re.finditer(LITERAL, text)]
        pieces, moved, last = list[str](), np.arange(len(text) + 1), 0
        for place, mark in sorted(places):
            pieces += [text[last:place], mark]
            last = place if mark else place + 1
            moved[place + 1 :] += 1 if mark else -1
        result = "".join([*pieces, text[last:]])
        return result, tuple((int(moved[begin]), int(moved[end])) for begin, end in spans)


def unmark(text: str) -> str:
    """Removes the characters `MARK` and `LITERAL` from a text."""
    return text.replace(MARK, "").replace(LITERAL, "")


def mark_tokenizer(loaded: "tokenizers.Tokenizer", special: Mapping[str, int]) -> "tokenizers.Tokenizer":
    """Returns a copy of a tokenizer that recognizes special tokens only with `MARK` before them.

    Args:
      loaded: a `tokenizers.Tokenizer`.
      special: text -> id of each special token.

    Returns:
      The copy. Its ids may differ from the ids of `loaded`; `original_ids` maps them.
    """
    import tokenizers

    content: JsonObject = copy.deepcopy(json.loads(loaded.to_str()))
    added = [token for token in content["added_tokens"] if token["content"] not in special]
    flags = {token["content"]: token for token in content["added_tokens"]}
    for text, index in special.items():
        given = flags[text] if text in flags else _FLAGS
        added.append({**given, "id": index, "content": MARK + text, "special": True, "normalized": False})
    content["added_tokens"] = sorted(added, key=lambda token: token["id"])
    _hide(content["model"], special)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _hide(model: JsonObject, special: Mapping[str, int]) -> None:
    """Renames special tokens in the vocabulary of a tokenizer's model to `MARK` + text, in place.

    Otherwise some models would encode a special token's text in a document as this token. In a BPE model, a special
    token that is a piece of a merge is not renamed.

    Args:
      model: the entry `model` of a tokenizer.json.
      special: text -> id of each special token.
    """
    if isinstance(model["vocab"], list):  # Unigram: (piece, score)
        model["vocab"] = [[MARK + piece if piece in special else piece, score] for piece, score in model["vocab"]]
        return
    merged = {piece for merge in (model["merges"] if "merges" in model else ()) for piece in _pieces_of(merge)}
    hidden = {text for text in special if text in model["vocab"] and text not in merged}
    model["vocab"] = {MARK + piece if piece in hidden else piece: index for piece, index in model["vocab"].items()}
    if "unk_token" in model and model["unk_token"] in hidden:
        model["unk_token"] = MARK + model["unk_token"]


def _pieces_of(merge: Json) -> set[str]:
    """Returns the two pieces of a BPE merge and the merged piece.

    Args:
      merge: the two pieces as a list, or as a text with a blank between them.
    """
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return {left, right, left + right}


def original_ids(marked: "tokenizers.Tokenizer", loaded: "tokenizers.Tokenizer") -> np.ndarray:
    """Returns an array that maps each id of the copy `marked` to the id of the same token in `loaded`, uint32."""
    pieces = marked.get_vocab(with_added_tokens=True)
    result = np.zeros(max(pieces.values(), default=-1) + 1, np.uint32)
    for piece, index in pieces.items():
        original = loaded.token_to_id(piece.removeprefix(MARK))
        assert original is not None, piece
        result[index] = original
    return result
