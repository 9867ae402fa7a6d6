"""Text to token ids and back: bytes, a tokenizer.json (or the folder of one), or plain numbers.

V: vocabulary.
"""

import array
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshtrain.data.long_texts import batches, cuts_of
from meshtrain.data.packing import Examples
from meshtrain.errors import UserError, nearest, refuse, unknown
from meshtrain.files import Json, JsonObject, download_command, pointer_problem, read_json, snapshot_of, what_is_at

if TYPE_CHECKING:
    import tokenizers

NUM_BYTES = 256
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how tokenizers with a byte fallback write one byte

# Tokens by which well-known tokenizers end a document, best known first.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
      name: `bytes`, `numbers`, or the path of the tokenizer.json or its folder.
      vocab_size: one more than the largest id, the end id among them.
      end_id: the id that ends a document; -1 where there are no documents.
      encode_documents: texts -> one unsigned integer array each, without the end id.
      decode: ids -> text; ids that are not text (the end id, padding of the vocabulary) are left out.
      byte_lengths: () -> UTF-8 bytes of the text that each id stands for, int32 [vocab_size]; None: ids are no text.
      with_places: texts -> for each, its ids, and where each id begins and ends in the text's characters, int64 [N, 2];
        None: unknown. A blank may be left out at the beginning of a place: an id of blanks alone then has an empty one
        at its end.
      also_end: ids besides `end_id` that end a generated text.
    """

    name: str
    vocab_size: int
    end_id: int
    encode_documents: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Iterable[int]], str]
    byte_lengths: Callable[[], np.ndarray] | None = None
    with_places: Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]] | None = None
    also_end: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """The smaller of little-endian uint16 and uint32 that holds every id."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one text, without the end id."""
        [ids] = self.encode_documents([text])
        return [int(one) for one in ids]


def byte_tokenizer() -> Tokenizer:
    """Returns the tokenizer whose ids are UTF-8 bytes, and 256 the end of a document."""

    def encode_documents(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(ids: Iterable[int]) -> str:
        # A model may emit an incomplete character, which is shown as a replacement character.
        return bytes(int(i) for i in ids if 0 <= i < NUM_BYTES).decode(errors="replace")

    def byte_lengths() -> np.ndarray:
        return np.asarray([1] * NUM_BYTES + [0], np.int32)

    def with_places(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(ids, _characters(text)) for text, ids in zip(texts, encode_documents(texts), strict=True)]

    return Tokenizer("bytes", NUM_BYTES + 1, NUM_BYTES, encode_documents, decode, byte_lengths, with_places)


def _characters(text: str) -> np.ndarray:
    """Returns where the character of each UTF-8 byte begins and ends, in characters, int64 [bytes, 2]."""
    character = np.repeat(np.arange(len(text)), [len(one.encode()) for one in text])
    return np.stack([character, character + 1], axis=1)


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of synthetic data, whose text is ids written as numbers with spaces between."""

    def encode_documents(texts: Sequence[str]) -> list[np.ndarray]:
        words = [text.split() for text in texts]
        for word in itertools.chain(*words):
            if not word.isdecimal() or int(word) >= vocab_size:
                raise UserError(
                    f"got '{word}'; allowed without a tokenizer: token ids, numbers from 0 to {vocab_size - 1}; "
                    "nearest: 0"
                )
        return [np.asarray([int(word) for word in document], np.uint32) for document in words]

    def decode(ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    return Tokenizer("numbers", vocab_size, -1, encode_documents, decode)


def file_problems(path: str) -> list[str]:
    """Returns one line if the path is no file, nor a folder with one. Nothing is opened: opening a pipe would block."""
    file = tokenizer_file(path)
    what = what_is_at(file)
    if what == "a file":
        return []
    if what_is_at(path) == "a folder":
        state = f"a folder that holds no {file.name}" if what == "nothing there" else f"whose {file.name} is {what}"
    else:
        state = "which does not exist" if what == "nothing there" else what
    download = download_command(path) or snapshot_of(path)
    fix = f"; nearest: {download}" if download else nearest(path, ["bytes"]) or "; nearest: bytes"
    return [
        f"data.tokenizer: got '{path}', {state}; allowed: bytes, or the path of a tokenizer.json or of its folder{fix}"
    ]


def _loaded(path: str) -> "tokenizers.Tokenizer":
    """Returns the `tokenizers.Tokenizer` of a tokenizer.json or of its folder.

    Raises:
      UserError: the file cannot be read, or is no tokenizer.json.
    """
    import tokenizers

    refuse(file_problems(path))
    try:
        text = tokenizer_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.tokenizer: got '{path}', which cannot be read ({error}); allowed: bytes, or the path of a "
            "tokenizer.json; nearest: bytes"
        ) from error
    try:
        loaded = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        if line := pointer_problem(tokenizer_file(path)):
            raise UserError(f"data.tokenizer: {line}") from error
        raise UserError(
            f"data.tokenizer: got '{path}', which is no tokenizer.json ({error}); allowed: what Tokenizer.save writes; "
            "nearest: bytes"
        ) from error
    # Documents are tokenized whole: truncation and padding stored in the file do not apply.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _end_id(path: str, end_token: str, vocab: dict[str, int]) -> int:
    """Returns the id that ends a document: of `end_token`, else of the folder's, else of a well-known one, else new.

    Raises:
      UserError: the vocabulary lacks the token.
    """
    of_folder = "" if end_token else folder_end_token(path)
    well_known = [token for token in _END_TOKENS if token in vocab]
    if of_folder and of_folder not in vocab:
        raise UserError(
            f"data.tokenizer: '{path}' names '{of_folder}' as its eos_token, which its {TOKENIZER} "
            "lacks; allowed: one of its tokens; nearest: data.end_token=TOKEN"
        )
    if end_token and end_token not in vocab:
        raise UserError(unknown(f"data.end_token for {path}", end_token, well_known, "'', which adds one id"))
    known = end_token or of_folder or next(iter(well_known), "")
    return vocab[known] if known else max(vocab.values(), default=-1) + 1


def file_tokenizer(path: str, end_token: str = "") -> Tokenizer:
    """Returns the tokenizer of a Hugging Face tokenizer.json (package `tokenizers`).

    Args:
      path: the tokenizer.json, or the folder that holds it.
      end_token: the token that ends a document; `` takes the folder's `eos_token`, else a well-known one, or adds one
        id after the last.

    Raises:
      UserError: the file cannot be read, is no tokenizer.json, or has no such token.
    """
    loaded = _loaded(path)
    vocab = loaded.get_vocab(with_added_tokens=True)
    vocab_size = max(vocab.values(), default=-1) + 1
    end_id = _end_id(path, end_token, vocab)

    cuts = functools.cache(lambda: cuts_of(loaded))  # takes seconds for a large vocabulary, and few texts need it

    def encoded(
        encode_batch: Callable[..., list["tokenizers.Encoding"]], texts: Sequence[str]
    ) -> Iterator[tuple[int, int, "tokenizers.Encoding"]]:
        """Yields the number of a text, where a piece of it begins, and the piece's encoding: about a MiB at a time."""
        for batch in batches(texts, lambda text: cuts().pieces(text, path)):
            pieces = [texts[number][start:end] for number, start, end in batch]
            try:
                encodings = encode_batch(pieces, add_special_tokens=False)
            except Exception as error:  # as above; for example, a tokenizer without a token for unknown text
                raise UserError(
                    f"data.tokenizer: got '{path}', which cannot encode the data ({error}); allowed: one that has a "
                    "token for every text; nearest: bytes"
                ) from error
            yield from ((number, start, one) for (number, start, _), one in zip(batch, encodings, strict=True))

    def encode_documents(texts: Sequence[str]) -> list[np.ndarray]:
        ids = [list[np.ndarray]() for _ in texts]
        for number, _, one in encoded(loaded.encode_batch_fast, texts):
            # Five times as fast as from a list, and with many threads the list would be what takes the time.
            ids[number].append(np.asarray(array.array("I", one.ids)))
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in ids]

    def with_places(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = [list[tuple[np.ndarray, np.ndarray]]() for _ in texts]
        for number, start, one in encoded(loaded.encode_batch, texts):
            places = np.asarray(one.offsets, np.int64).reshape(-1, 2) + start
            found[number].append((np.asarray(one.ids, np.uint32), places))
        return [
            (np.concatenate([ids for ids, _ in one]), np.concatenate([places for _, places in one])) for one in found
        ]

    def decode(ids: Iterable[int]) -> str:
        return str(loaded.decode([int(i) for i in ids if 0 <= i < vocab_size and i != end_id]))

    whole_size = max(vocab_size, end_id + 1)
    byte_lengths = functools.partial(bytes_of_ids, loaded, end_id, whole_size)
    also_end = end_ids(path)
    return Tokenizer(path, whole_size, end_id, encode_documents, decode, byte_lengths, with_places, also_end)


def open_tokenizer(name: str, end_token: str = "") -> Tokenizer:
    """Returns the tokenizer called `name`: `bytes`, or the path of a tokenizer.json or its folder."""
    return byte_tokenizer() if name == "bytes" else file_tokenizer(name, end_token)


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Returns one line if the tokenizer, with its end of document, has ids that the model does not have."""
    if tokenizer.vocab_size <= vocab_size:
        return []
    return [
        f"model.vocab_size: got {vocab_size}; allowed for tokenizer '{tokenizer.name}' with its end of document: at "
        f"least {tokenizer.vocab_size}; nearest: {tokenizer.vocab_size}"
    ]


def bytes_of_ids(loaded: "tokenizers.Tokenizer", end_id: int, vocab_size: int) -> np.ndarray:
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


def _decoders(decoder: Json) -> set[str]:
    """Returns the types of a tokenizer.json's decoder and of the decoders in its sequence."""
    if not decoder:
        return set()
    inner = decoder["decoders"] if "decoders" in decoder else []
    return {decoder["type"]}.union(*map(_decoders, inner))


def _lengths_behind_another(
    loaded: "tokenizers.Tokenizer", pieces: dict[int, str], *, has_byte_pieces: bool
) -> dict[int, int]:
    """Returns the bytes that each id adds to the text of a token before it."""
    # A letter or digit of ASCII: nothing that a decoder joins with what follows, or cleans up.
    anchors = [index for index, piece in pieces.items() if re.fullmatch(r"[A-Za-z0-9]", piece)] or list(pieces)[:1]
    before = len(loaded.decode(anchors[:1]).encode())
    texts = loaded.decode_batch([[anchors[0], index] for index in pieces])
    return {
        index: 1 if has_byte_pieces and _BYTE.fullmatch(piece) else len(text.encode()) - before
        for (index, piece), text in zip(pieces.items(), texts, strict=True)
    }


def bytes_of_targets(examples: Examples, indices: Iterable[int], lengths: np.ndarray) -> int:
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


def tokenizer_file(path: str) -> Path:
    """Returns the file that `data.tokenizer` means: the path itself, or the tokenizer.json in the folder."""
    return Path(path, TOKENIZER) if what_is_at(path) == "a folder" else Path(path)


def settings(path: str, name: str = SETTINGS) -> JsonObject:
    """Returns the content of a file in a tokenizer's folder; {} where `path` is no folder, or has no such file.

    Raises:
      UserError: the file cannot be read, or holds no JSON object.
    """
    file = Path(path, name)
    if what_is_at(file) != "a file":
        return {}
    try:
        content = read_json(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}")
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.tokenizer: '{file}' cannot be read ({error}); allowed: a JSON object in UTF-8; nearest: "
            f"data.tokenizer={tokenizer_file(path)}, which is read alone"
        ) from error
    return content


def special_tokens(content: JsonObject) -> dict[str, str]:
    """Returns name -> text of the special tokens in a tokenizer_config.json, such as `eos_token`.

    >>> special_tokens({"eos_token": {"content": "</s>", "special": True}, "bos_token": None, "pad_token": "<pad>"})
    {'eos_token': '</s>', 'pad_token': '<pad>'}
    """
    tokens = {}
    for name, value in content.items():
        text = value["content"] if isinstance(value, dict) and "content" in value else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def folder_end_token(path: str) -> str:
    """Returns the token that ends a document according to the folder's tokenizer_config.json; `` if it names none.

    Raises:
      UserError: the file cannot be read, or holds no JSON object.
    """
    return special_tokens(settings(path)).get("eos_token") or ""


def end_ids(path: str) -> tuple[int, ...]:
    """Returns the ids that end a generated text by the folder's generation_config.json, otherwise by its config.json.

    Raises:
      UserError: a file cannot be read, or has something else there.
    """
    for name in ("generation_config.json", "config.json"):
        if (given := settings(path, name).get("eos_token_id")) is not None:
            listed = given if isinstance(given, list) else [given]
            if not all(type(one) is int and 0 <= one < 1 << 31 for one in listed):
                raise UserError(f"{Path(path, name)}: eos_token_id: got {str(given)[:200]}; allowed: an id, or a list; "
                                "nearest: the file that was published with the model")  # fmt: skip
            return tuple(listed)
    return ()
