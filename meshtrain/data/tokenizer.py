"""Tokenizers, which convert text to token ids and back: by bytes, with a tokenizer.json, or as decimal numbers.

V: vocabulary.
"""

import array
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtrain.data.encoding.special_tokens import ENCODE, TEXT, SpecialTokens, mark_tokenizer, original_ids, unmark
from meshtrain.data.encoding.text_bytes import blank_in_bytes, bytes_of_ids, num_added_blanks
from meshtrain.data.encoding.tokenizer_folder import (
    TOKENIZER,
    end_ids,
    folder_end_token,
    read_tokenizer_json,
    tokenizer_file,
)
from meshtrain.data.long_texts import batches, cuts_of
from meshtrain.data.packing import Example, Examples, inner_end_targets
from meshtrain.errors import Problem, UserError, nearest, refuse, unknown
from meshtrain.files import download_command, pointer_problem, snapshot_of, what_is_at

if TYPE_CHECKING:
    import tokenizers

NUM_BYTES = 256
NO_TOKEN = "none"  # the value of `data.begin_token` for no token
_NUM_PROBES = 16  # number of tokens of a vocabulary whose texts `_added_ids` tries to encode
_NO_CHARACTER = "\U0010ffff"  # a character that no vocabulary contains

# Tokens that end a document in well-known tokenizers, best known first.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: functions that encode text as ids and decode ids, and the ids with a special meaning.

    Attributes:
      name: `bytes`, `numbers`, or the path of the tokenizer.json or its folder.
      vocab_size: one more than the largest id, including the end id.
      end_id: the id that ends a document; -1 if there are no documents.
      encode_documents: texts -> an array of unsigned ids for each text, with the `begin` ids and without the end id.
      decode: ids -> text; ids without text (the end id, padding of the vocabulary) are left out.
      byte_lengths: a function that returns the number of UTF-8 bytes of each id's text, int32 [vocab_size]; None: the
        ids represent no text.
      with_places: texts -> for each text, its N ids without the `begin` ids, and (start, stop) of each id in characters
        of the text, int64 [N, 2]. None: the tokenizer cannot locate ids. The range of an id may omit its leading blank;
        an id of blanks only then has an empty range at its end.
      also_end: ids that end a generated text, in addition to `end_id`.
      begin: the ids before a text, unless a chat template wrote the text.
      special: the special tokens, and whether their text in documents is encoded as plain text.
      blank: the ids of bytes that together encode a blank; () if the tokenizer has a single id for a blank.
      added_blanks: the number of blanks that the tokenizer adds before a text, 0 or 1.
    """

    name: str
    vocab_size: int
    end_id: int
    encode_documents: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Iterable[int]], str]
    byte_lengths: Callable[[], np.ndarray] | None = None
    with_places: Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]] | None = None
    also_end: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    special: SpecialTokens = dataclasses.field(default_factory=lambda: SpecialTokens({}))
    blank: tuple[int, ...] = ()
    added_blanks: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The smallest dtype for every id: little-endian uint16 or uint32."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    def end_text(self) -> str:
        """The text of the end token; '' if the tokenizer has no end token, or its end id represents no text."""
        return next((text for text, index in self.special.ids.items() if index == self.end_id), "")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one text, with the `begin` ids and without the end id."""
        [ids] = self.encode_documents([text])
        return [int(one) for one in ids]

    def encode_templated(self, text: str) -> list[int]:
        """Returns the ids of a text that a chat template wrote, without the `begin` ids."""
        assert self.with_places is not None, self.name
        [(ids, _)] = self.with_places([text])
        return [int(one) for one in ids]


def byte_tokenizer() -> Tokenizer:
    """Returns the tokenizer whose ids are UTF-8 bytes; id 256 ends a document."""

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
    """Returns (start, stop), in characters, of the character to which each UTF-8 byte belongs, int64 [bytes, 2]."""
    character = np.repeat(np.arange(len(text)), [len(one.encode()) for one in text])
    return np.stack([character, character + 1], axis=1)


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of synthetic data: a text is a list of ids as decimal numbers, separated by spaces.

    The method `encode` raises UserError for a word that is no number below `vocab_size`.
    """

    def encode_documents(texts: Sequence[str]) -> list[np.ndarray]:
        words = [text.split() for text in texts]
        for word in itertools.chain(*words):
            if not word.isdecimal() or int(word) >= vocab_size:
                raise UserError(
                    Problem(
                        None,
                        got=f"'{word}'",
                        condition="without a tokenizer",
                        allowed=f"token ids, numbers from 0 to {vocab_size - 1}",
                        nearest=0,
                    )
                )
        return [np.asarray([int(word) for word in document], np.uint32) for document in words]

    def decode(ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    return Tokenizer("numbers", vocab_size, -1, encode_documents, decode)


def file_problems(path: str) -> list[Problem]:
    """Returns an error line if `path` is neither a file nor a folder with a tokenizer.json; otherwise [].

    No file is opened, because opening a pipe would block.
    """
    file = tokenizer_file(path)
    what = what_is_at(file)
    if what == "a file":
        return []
    if what_is_at(path) == "a folder":
        state = f"a folder without {file.name}" if what == "nothing there" else f"whose {file.name} is {what}"
    else:
        state = "which does not exist" if what == "nothing there" else what
    download = download_command(path) or snapshot_of(path)
    return [
        Problem(
            "data.tokenizer",
            got=f"'{path}', {state}",
            allowed="bytes, or the path of a tokenizer.json or of its folder",
            fix="" if download else nearest(path, ["bytes"]),
            nearest=download or "bytes",
        )
    ]


def _load(path: str) -> "tokenizers.Tokenizer":
    """Loads the tokenizer.json at `path`, or in the folder `path`, as a `tokenizers.Tokenizer`.

    Raises:
      UserError: the file cannot be read, or is no tokenizer.json.
    """
    import tokenizers

    refuse(file_problems(path))
    try:
        text = tokenizer_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = f"'{path}', which cannot be read ({error})"
        allowed = "bytes, or the path of a tokenizer.json"
        raise UserError(Problem("data.tokenizer", got=got, allowed=allowed, nearest="bytes")) from error
    try:
        loaded = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises no narrower class
        if line := pointer_problem(tokenizer_file(path)):
            raise UserError(f"data.tokenizer: {line}") from error
        got = f"'{path}', which is not a valid tokenizer.json ({error})"
        allowed = "a file written by Tokenizer.save"
        raise UserError(Problem("data.tokenizer", got=got, allowed=allowed, nearest="bytes")) from error
    # Documents are never truncated or padded, even if the file requests it.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _end_id(path: str, end_token: str, vocab: dict[str, int]) -> int:
    """Returns the id that ends a document: the id of `end_token`, or a default if `end_token` is ''.

    The default is the id of the folder's `eos_token`. If the folder has no `eos_token`, it is the id of the best-known
    end token in the vocabulary (`_END_TOKENS`). If the vocabulary has none of these, it is a new id after the largest.

    Args:
      path: the tokenizer.json, or its folder.
      end_token: the value of `data.end_token`; '' for the default.
      vocab: token -> id.

    Raises:
      UserError: the vocabulary lacks `end_token`; or `end_token` is '', and it lacks the folder's `eos_token`.
    """
    of_folder = "" if end_token else folder_end_token(path)
    well_known = [token for token in _END_TOKENS if token in vocab]
    if of_folder and of_folder not in vocab:
        fault = f"'{path}' has the eos_token '{of_folder}', which is not in its {TOKENIZER}"
        allowed = "a token of this file"
        raise UserError(Problem("data.tokenizer", fault=fault, allowed=allowed, nearest="data.end_token=TOKEN"))
    if end_token and end_token not in vocab:
        raise UserError(unknown(f"data.end_token for {path}", end_token, well_known, "'', which adds an id"))
    known = end_token or of_folder or next(iter(well_known), "")
    return vocab[known] if known else max(vocab.values(), default=-1) + 1


def _encodings(
    path: str,
    encode_batch: Callable[..., list["tokenizers.Encoding"]],
    texts: Sequence[str],
    *,
    add_special_tokens: bool = False,
) -> list["tokenizers.Encoding"]:
    try:
        return encode_batch(list(texts), add_special_tokens=add_special_tokens)
    except Exception as error:  # as in `_load`; for example, a tokenizer without a token for unknown text
        got = f"'{path}', which cannot encode the data ({error})"
        allowed = "a tokenizer with tokens for every text"
        raise UserError(Problem("data.tokenizer", got=got, allowed=allowed, nearest="bytes")) from error


def _ids(loaded: "tokenizers.Tokenizer", text: str) -> list[int]:
    """Returns the ids of a text, without tokens that the post-processor adds; [] if the text cannot be encoded."""
    try:
        return list(_encodings("", loaded.encode_batch, [text])[0].ids)
    except UserError:
        return []


def _begin_ids(
    path: str, begin_token: str, loaded: "tokenizers.Tokenizer", vocab: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the ids that precede each text.

    Args:
      path: the tokenizer.json, or its folder, for errors.
      begin_token: the token before a text; '': the tokens that the post-processor adds; `none`: no token.
      loaded: the `tokenizers.Tokenizer`.
      vocab: token -> id.

    Raises:
      UserError: the vocabulary lacks `begin_token`; or `begin_token` is '', and the post-processor adds tokens after a
        text.
    """
    if begin_token == NO_TOKEN:
        return ()
    if begin_token:
        if begin_token not in vocab:
            known = [token.content for token in loaded.get_added_tokens_decoder().values() if token.special]
            raise UserError(unknown(f"data.begin_token for {path}", begin_token, [NO_TOKEN, *known]))
        return (vocab[begin_token],)
    before, behind = _added_ids(loaded, vocab)
    if not behind:
        return before
    shown = " ".join(str(loaded.id_to_token(index)) for index in behind)
    fix = loaded.id_to_token(before[0]) if len(before) == 1 else NO_TOKEN
    got = f"'' with '{path}', whose post-processor adds {shown} after a text, as for encoder models such as BERT"
    key = "data.begin_token"
    raise UserError(Problem(key, got=got, allowed=f"{NO_TOKEN}, or a token", nearest=f"{key}={fix}"))


def _added_ids(loaded: "tokenizers.Tokenizer", vocab: Iterable[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that the post-processor of a tokenizer adds before a text, and the ids that it adds after a text.

    The ids are found by encoding a short text: `a`, or else one of the first tokens of `vocab`. Both results are () if
    none of these texts can be encoded.
    """
    if loaded.num_special_tokens_to_add(is_pair=False) == 0:
        return (), ()
    for text in ("a", *itertools.islice(vocab, _NUM_PROBES)):
        if _ids(loaded, text):
            encoding = loaded.encode(text, add_special_tokens=True)
            mask, ids = encoding.special_tokens_mask, encoding.ids
            first, last = mask.index(0), len(mask) - mask[::-1].index(0)
            return tuple(ids[:first]), tuple(ids[last:])
    return (), ()


def with_begin_token(path: str, begin_token: str) -> str:
    """Returns the content of a tokenizer.json, changed so that its post-processor adds `begin_token` before a text.

    Args:
      path: the tokenizer.json, or its folder.
      begin_token: the token before a text; `none`: no token; '': the tokens that the post-processor already adds.

    Returns:
      The JSON text; '' if no change is needed.

    Raises:
      UserError: the file cannot be read, or lacks the token.
    """
    loaded = _load(path)
    vocab = loaded.get_vocab(with_added_tokens=True)
    if not begin_token or _added_ids(loaded, vocab) == ((begin := _begin_ids(path, begin_token, loaded, vocab)), ()):
        return ""
    names = [str(loaded.id_to_token(index)) for index in begin]
    first = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {name: {"id": name, "ids": [index], "tokens": [name]} for name, index in zip(names, begin, strict=True)}
    added = {"type": "TemplateProcessing", "single": single, "special_tokens": tokens}
    added["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    content = read_tokenizer_json(tokenizer_file(path), "bytes")
    # In the package's current format, because the file may have an older form or lack this key.
    former = json.loads(loaded.to_str())["post_processor"] or {"type": ""}
    listed = former["processors"] if former["type"] == "Sequence" else [former]
    kept = [one for one in listed if one["type"] == "ByteLevel"]
    content["post_processor"] = {"type": "Sequence", "processors": [*kept, added]} if kept else added
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _special_tokens(
    loaded: "tokenizers.Tokenizer", end_id: int, vocab: Mapping[str, int], *, as_text: bool
) -> SpecialTokens:
    """Returns the tokens that a tokenizer.json marks as special, and the end token.

    Args:
      loaded: the `tokenizers.Tokenizer`.
      end_id: the id that ends a document.
      vocab: token -> id.
      as_text: whether the text of special tokens in documents is encoded as plain text.
    """
    ids = {token.content: index for index, token in loaded.get_added_tokens_decoder().items() if token.special}
    return SpecialTokens(ids | {piece: index for piece, index in vocab.items() if index == end_id}, as_text)


def _as_text(
    path: str, loaded: "tokenizers.Tokenizer", special: SpecialTokens
) -> tuple["tokenizers.Tokenizer", np.ndarray]:
    """Returns a tokenizer that encodes the text of special tokens as plain text, and a map of its ids.

    Args:
      path: the path of the tokenizer, for errors.
      loaded: the original `tokenizers.Tokenizer`.
      special: its special tokens.

    Returns:
      The `tokenizers.Tokenizer`, and an array that maps its ids to the ids of `loaded`, uint32.

    Raises:
      UserError: the text of a special token is still encoded as this token: the vocabulary has no other tokens for it.
    """
    marked = mark_tokenizer(loaded, special.ids)
    ids_of = original_ids(marked, loaded)
    unknown = ids_of[np.asarray(_ids(marked, _NO_CHARACTER), np.int64)]
    for text, index in special.ids.items():
        if index in ids_of[np.asarray(_ids(marked, text), np.int64)] and index not in unknown:
            raise UserError(
                Problem(
                    "data.special_tokens",
                    got=f"{TEXT} with '{path}', which has no other encoding of the text '{text}'",
                    allowed=f"{ENCODE}, or a tokenizer that can encode every text",
                    nearest=f"data.special_tokens={ENCODE}",
                )
            )
    return marked, ids_of


def _encoders(
    path: str, encoder: "tokenizers.Tokenizer", ids_of: np.ndarray | None, begin: tuple[int, ...]
) -> tuple[Callable[[Sequence[str]], list[np.ndarray]], Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]]:
    """Returns the functions `encode_documents` and `with_places` for a `Tokenizer`.

    Args:
      path: the path of the tokenizer, for errors.
      encoder: the `tokenizers.Tokenizer` that encodes texts.
      ids_of: array that maps the encoder's ids to the original ids if `mark_tokenizer` made the encoder; None: the
        encoder's ids are the original ids.
      begin: the ids before a document.
    """
    cuts = functools.cache(lambda: cuts_of(encoder))  # takes seconds for a large vocabulary; few texts need it

    def encoded(
        encode_batch: Callable[..., list["tokenizers.Encoding"]], texts: Sequence[str]
    ) -> Iterator[tuple[int, int, "tokenizers.Encoding"]]:
        """Encodes texts in pieces; yields (index of the text, start of the piece in characters, its encoding).

        About 1 M characters are encoded at a time, by `encode_batch`, a method of the encoder.
        """
        for batch in batches(texts, lambda text: cuts().pieces(text, path)):
            encodings = _encodings(path, encode_batch, [texts[number][start:end] for number, start, end in batch])
            yield from ((number, start, one) for (number, start, _), one in zip(batch, encodings, strict=True))

    def ids_in(encoding: "tokenizers.Encoding") -> np.ndarray:
        # Five times faster than a list, which would take most of the time with many threads.
        ids = np.asarray(array.array("I", encoding.ids))
        return ids if ids_of is None else ids_of[ids]

    def encode_documents(texts: Sequence[str]) -> list[np.ndarray]:
        if ids_of is not None:  # only text of a template has special tokens, each after a mark
            texts = list(map(unmark, texts))
        before = [np.asarray(begin, np.uint32)] if begin else []
        ids = [list(before) for _ in texts]
        for number, _, one in encoded(encoder.encode_batch_fast, texts):
            ids[number].append(ids_in(one))
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in ids]

    def with_places(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = [list[tuple[np.ndarray, np.ndarray]]() for _ in texts]
        for number, start, one in encoded(encoder.encode_batch, texts):
            found[number].append((ids_in(one), np.asarray(one.offsets, np.int64).reshape(-1, 2) + start))
        return [
            (np.concatenate([ids for ids, _ in one]), np.concatenate([places for _, places in one])) for one in found
        ]

    return encode_documents, with_places


def file_tokenizer(
    path: str, end_token: str = "", begin_token: str | tuple[int, ...] = "", special_tokens: str = ENCODE
) -> Tokenizer:
    """Opens a Hugging Face tokenizer.json (package `tokenizers`).

    Args:
      path: the tokenizer.json, or its folder.
      end_token: the token that ends a document; '' uses the folder's `eos_token`, else a well-known token, or adds one
        id after the largest id.
      begin_token: the token before a text, or the ids before a text; '' uses the tokens that the tokenizer.json's
        post-processor adds, `none` uses no token.
      special_tokens: how special tokens in texts are encoded: `encode` (as these tokens) or `text`.

    Raises:
      UserError: the file cannot be read, is no tokenizer.json, lacks the end or the begin token, adds tokens after a
        text, or cannot encode the text of special tokens as plain text.
    """
    loaded = _load(path)
    vocab = loaded.get_vocab(with_added_tokens=True)
    vocab_size = max(vocab.values(), default=-1) + 1
    end_id = _end_id(path, end_token, vocab)
    begin = _begin_ids(path, begin_token, loaded, vocab) if isinstance(begin_token, str) else begin_token
    special = _special_tokens(loaded, end_id, vocab, as_text=special_tokens == TEXT)
    encoder, ids_of = (loaded, None) if special_tokens == ENCODE else _as_text(path, loaded, special)

    encode_documents, with_places = _encoders(path, encoder, ids_of, begin)

    def decode(ids: Iterable[int]) -> str:
        return str(loaded.decode([int(i) for i in ids if 0 <= i < vocab_size and i != end_id]))

    whole_size = max(vocab_size, end_id + 1)
    blank = blank_in_bytes(_ids(loaded, "a a"), vocab)
    return Tokenizer(
        path,
        whole_size,
        end_id,
        encode_documents,
        decode,
        functools.partial(bytes_of_ids, loaded, end_id, whole_size, begin),
        with_places,
        end_ids(path),
        begin,
        special,
        blank,
        num_added_blanks(loaded, _ids(loaded, "a"), vocab, blank),
    )


def open_tokenizer(name: str, end_token: str = "", begin_token: str = "", special_tokens: str = ENCODE) -> Tokenizer:
    """Opens the tokenizer `name`: `bytes`, or the path of a tokenizer.json or its folder.

    Args:
      name: the value of `data.tokenizer`.
      end_token: the token that ends a document; '' uses the default of `file_tokenizer`.
      begin_token: the token before a text; '' uses the default of `file_tokenizer`, `none` uses no token.
      special_tokens: how special tokens in texts are encoded: `encode` (as these tokens) or `text`.

    Raises:
      UserError: the tokenizer.json is missing or invalid, or lacks the end or the begin token; or a begin token
        is given for `bytes`, which has none.
    """
    if name != "bytes":
        return file_tokenizer(name, end_token, begin_token, special_tokens)
    if begin_token not in ("", NO_TOKEN):
        got = f"'{begin_token}' with data.tokenizer=bytes, which does not have this token"
        allowed = f"'', {NO_TOKEN}"
        raise UserError(Problem("data.begin_token", got=got, allowed=allowed, nearest=f"data.begin_token={NO_TOKEN}"))
    return byte_tokenizer()


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int) -> list[Problem]:
    """Returns an error line if the tokenizer has ids, including its end id, that are not below `vocab_size`."""
    if tokenizer.vocab_size <= vocab_size:
        return []
    return [
        Problem(
            "model.vocab_size",
            got=vocab_size,
            condition=f"for tokenizer '{tokenizer.name}' with its end token",
            allowed=f"at least {tokenizer.vocab_size}",
            nearest=tokenizer.vocab_size,
        )
    ]


def bytes_of_targets(
    examples: Examples, indices: Iterable[int], lengths: np.ndarray, tokenizer: Tokenizer | None = None
) -> int:
    """Returns the number of text bytes that the targets of examples represent; targets of weight 0 are not counted.

    Bits per byte, a loss that does not depend on the tokenizer, is computed with this number.

    Args:
      examples: the examples; each has `targets` and `weights` of the same shape.
      indices: the numbers of the examples to count.
      lengths: int [V], number of bytes of each id's text, from the tokenizer's `byte_lengths`.
      tokenizer: the tokenizer of the examples, with which the count is exact; None: the bytes of each target's id are
        summed, regardless of the context.
    """
    total, end_text = 0, tokenizer.end_text if tokenizer else ""
    for index in indices:
        example = examples[index]
        total += int(lengths[example["targets"][example["weights"] > 0]].sum())
        if (is_inner_end := inner_end_targets(examples, index)) is not None:
            total += len(end_text.encode()) * int((is_inner_end & (example["weights"] > 0)).sum())
        if tokenizer and {"tokens", "positions"} <= example.keys():
            total -= _num_bytes_too_many(example, lengths, tokenizer)
    return total


def _num_bytes_too_many(example: Example, lengths: np.ndarray, tokenizer: Tokenizer) -> int:
    """Returns the number of bytes by which the sum of `lengths` over an example's targets exceeds the text's bytes.

    The reasons are blanks that are encoded as several bytes, and blanks that the tokenizer adds before a text.
    """
    targets, is_target, result = example["targets"], example["weights"] > 0, 0
    if blank := tokenizer.blank:
        # If the first bytes are in another example, the remaining bytes are assumed to be a blank.
        is_blank = is_target & (targets == blank[-1]) & _follows(example, blank[:-1], partial=True)
        result += (len(blank) - 1) * int(is_blank.sum())
    if tokenizer.begin and tokenizer.added_blanks:
        is_first = is_target & (lengths[targets] > 0) & (example["positions"] == len(tokenizer.begin) - 1)
        result += int((is_first & _follows(example, tokenizer.begin, partial=False)).sum())
    return result


def _follows(example: Example, ids: Sequence[int], *, partial: bool) -> np.ndarray:
    """Returns a mask of the targets that directly follow the sequence `ids` in the inputs, bool [T].

    Args:
      example: an example with `tokens` and `positions`.
      ids: the ids before a target.
      partial: whether an id of `ids` counts as present if its position would be before the start of the segment.
    """
    result = np.ones(len(example["tokens"]), bool)
    for distance, index in enumerate(reversed(ids)):
        is_outside = example["positions"] < distance
        result &= np.where(is_outside, partial, np.roll(example["tokens"], distance) == index)
    return result
