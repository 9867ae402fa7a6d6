"""Computes the number of text bytes that each token id represents, for any kind of tokenizer.

V: vocabulary.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtrain.files import Json

if TYPE_CHECKING:
    import tokenizers

HALF = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character as this
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # tokenizers with a byte fallback write one byte in this form


def bytes_of_ids(loaded: "tokenizers.Tokenizer", end_id: int, vocab_size: int, begin: Sequence[int] = ()) -> np.ndarray:
    """Returns the number of text bytes that each id represents, int32 [V]; 0 for the end id and for ids without text.

    This is the number of bytes that the id adds after another token, so a blank before a word is included. Byte-level
    tokenizers write a byte as one character. For an added token that is matched literally in texts, the bytes of its
    text are counted. For other added tokens, such as `▁▁` for two blanks, the bytes of the decoded text are counted.

    Args:
      loaded: a `tokenizers.Tokenizer`.
      end_id: the id that ends a document.
      vocab_size: V.
      begin: the ids that precede a text. All but the first id are targets, but represent no text.
    """
    pieces = {index: piece for piece, index in loaded.get_vocab(with_added_tokens=True).items()}
    own, added = loaded.get_vocab(with_added_tokens=False), loaded.get_added_tokens_decoder()
    kinds = _decoders(json.loads(loaded.to_str())["decoder"])
    lengths = np.zeros(vocab_size, np.int32)
    if "ByteLevel" in kinds:
        plain = {index: len(piece) for index, piece in pieces.items()}
        for index in added:
            decoded = str(loaded.decode([index], skip_special_tokens=False))
            plain[index] = len((pieces[index] if HALF in decoded else decoded).encode())
    else:
        plain = _lengths_behind_another(loaded, pieces, has_byte_pieces="ByteFallback" in kinds)
    for index, length in plain.items():
        lengths[index] = length
    for index, token in added.items():
        if token.special or not (token.normalized or token.content in own):
            lengths[index] = len(token.content.encode())
    lengths[[end_id, *begin[1:]]] = 0
    return lengths


def _decoders(decoder: Json) -> set[str]:
    """Returns the types of a tokenizer.json's decoder and of the decoders nested in it; empty without a decoder."""
    if not decoder:
        return set()
    inner = decoder["decoders"] if "decoders" in decoder else []
    return {decoder["type"]}.union(*map(_decoders, inner))


def _anchor(loaded: "tokenizers.Tokenizer", vocab: Mapping[str, int]) -> tuple[list[int], int]:
    """Returns [id] of one token of `vocab`, and the number of bytes of its text; ([], 0) if `vocab` is empty.

    Other ids are decoded after this token, to measure the text that they add.

    Args:
      loaded: a `tokenizers.Tokenizer`.
      vocab: piece -> id.
    """
    # A letter or digit of ASCII: a decoder neither joins it with the next token nor removes it.
    anchors = [index for piece, index in vocab.items() if re.fullmatch(r"[A-Za-z0-9]", piece)] or list(vocab.values())
    return anchors[:1], len(loaded.decode(anchors[:1]).encode())


def _lengths_behind_another(
    loaded: "tokenizers.Tokenizer", pieces: dict[int, str], *, has_byte_pieces: bool
) -> dict[int, int]:
    """Returns {id: number of bytes that it adds to the decoded text after another token}.

    Args:
      loaded: a `tokenizers.Tokenizer`.
      pieces: id -> piece of the vocabulary.
      has_byte_pieces: whether pieces such as `<0x0A>` represent one byte.
    """
    anchor, before = _anchor(loaded, {piece: index for index, piece in pieces.items()})
    texts = loaded.decode_batch([[*anchor, index] for index in pieces])
    return {
        index: 1 if has_byte_pieces and _BYTE.fullmatch(piece) else len(text.encode()) - before
        for (index, piece), text in zip(pieces.items(), texts, strict=True)
    }


def blank_in_bytes(ids: Sequence[int], vocab: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids of the bytes that together encode a blank; () if the tokenizer has a single id for a blank.

    Llama 2 writes a blank as `▁`. A vocabulary of this kind without a piece for `▁` uses the three bytes of `▁`.

    Args:
      ids: the ids of the text `a a`, which contains the blank to examine.
      vocab: piece -> id.
    """
    pieces = {index: piece for piece, index in vocab.items()}
    is_byte = [_BYTE.fullmatch(pieces[index]) is not None for index in ids]
    if len(ids) < 4 or is_byte[-1] or False not in is_byte[:-1]:
        return ()
    first = len(ids) - 1 - is_byte[-2::-1].index(False)
    return tuple(ids[first:-1]) if first < len(ids) - 2 else ()


def num_added_blanks(
    loaded: "tokenizers.Tokenizer", ids: Sequence[int], vocab: Mapping[str, int], blank: tuple[int, ...]
) -> int:
    """Returns the number of blanks that a tokenizer adds before a text, 0 or 1.

    Args:
      loaded: a `tokenizers.Tokenizer`.
      ids: the ids that the tokenizer returns for the text `a`, perhaps with an added blank.
      vocab: piece -> id.
      blank: the ids of bytes that together encode a blank, from `blank_in_bytes`.
    """
    if blank and tuple(ids[: len(blank)]) == blank:
        return 1
    anchor, before = _anchor(loaded, vocab)
    return int(loaded.decode([*anchor, *ids]).encode()[before:] == b" a")
