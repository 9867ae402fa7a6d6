"""How many UTF-8 bytes of text each token id stands for, so that losses can be compared across tokenizers.

Shapes: V vocabulary.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from meshtrain.data.packing import Examples

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how tokenizers with a byte fallback write one byte


def of_tokenizer(loaded: Any, end_id: int, vocab_size: int) -> np.ndarray:
    """Returns the bytes of the text that each id stands for, int32 [V]; 0 for the end of a document and for no text.

    Byte-level tokenizers write a byte as one character. Of others, the text of an id is what it adds behind another
    token, so that the blank before a word counts. Added tokens stand for their own text.

    Args:
      loaded: a `tokenizers.Tokenizer`.
      end_id: the id that ends a document.
      vocab_size: V.
    """
    pieces = {index: piece for piece, index in loaded.get_vocab(with_added_tokens=True).items()}
    added = {index: token.content for index, token in loaded.get_added_tokens_decoder().items()}
    kinds = _decoders(json.loads(loaded.to_str())["decoder"])
    lengths = np.zeros(vocab_size, np.int32)
    if "ByteLevel" in kinds:
        plain = {index: len(piece) for index, piece in pieces.items()}
    else:
        plain = _lengths_behind_another(loaded, pieces, has_byte_pieces="ByteFallback" in kinds)
    for index, length in plain.items():
        lengths[index] = len(added[index].encode()) if index in added else length
    lengths[end_id] = 0
    return lengths


def _decoders(decoder: Any) -> set[str]:
    """Returns the types of a tokenizer.json's decoder and of the decoders in its sequence."""
    if not decoder:
        return set()
    inner = decoder["decoders"] if "decoders" in decoder else []
    return {decoder["type"]}.union(*map(_decoders, inner))


def _lengths_behind_another(loaded: Any, pieces: dict[int, str], *, has_byte_pieces: bool) -> dict[int, int]:
    """Returns the bytes that each id adds to the text of a token before it."""
    # A letter or digit of ASCII: nothing that a decoder joins with what follows, or cleans up.
    anchors = [index for index, piece in pieces.items() if re.fullmatch(r"[A-Za-z0-9]", piece)] or list(pieces)[:1]
    before = len(loaded.decode(anchors[:1]).encode())
    texts = loaded.decode_batch([[anchors[0], index] for index in pieces])
    return {
        index: 1 if has_byte_pieces and _BYTE.fullmatch(piece) else len(text.encode()) - before
        for (index, piece), text in zip(pieces.items(), texts, strict=True)
    }


def of_targets(examples: Examples, indices: Iterable[int], lengths: np.ndarray) -> int:
    """Returns the bytes of the text that the targets of examples stand for; a target of weight 0 does not count.

    Args:
      examples: each with `targets` and `weights` of one shape.
      indices: which of them.
      lengths: bytes of each id, int [V].
    """
    total = 0
    for index in indices:
        example = examples[index]
        total += int(lengths[example["targets"][example["weights"] > 0]].sum())
    return total
