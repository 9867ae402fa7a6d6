"""Each file of `data.path` by itself and whole, to be evaluated: nothing is split off, and no end is left out."""

from collections.abc import Mapping
from pathlib import Path

from meshtrain.data.answers import as_examples, lines_of, losses, tokenized
from meshtrain.data.corpus import stream_of, tokenizer_for, vocabulary_problems
from meshtrain.data.packing import Examples, TokenStream, pack
from meshtrain.data.sources import DataOptions
from meshtrain.data.text import find_files, read_documents, tokens_as_text
from meshtrain.data.token_files import open_token_files
from meshtrain.data.tokenize import Tokenizer
from meshtrain.launch import peers
from meshtrain.words.errors import Problems, UserError, warn


def open_whole(options: DataOptions, *, sequence_length: int, vocab_size: int) -> Mapping[str, Examples]:
    """Returns the path of each file -> its examples, in which every token but a document's first is a target once.

    Of fine-tuning data, tokens of answers alone are targets; a warning says where lines were truncated or dropped.
    Documents are packed whole into padded rows (`first_fit`), whatever `data.packing` says: windows of a stream would
    leave out the tokens after the last whole window.

    Args:
      options: of a source of packed tokens that reads `path`, checked.
      sequence_length: T, tokens an example.
      vocab_size: the model's, which every id must be below.

    Raises:
      UserError: a line for each thing wrong with the files, and for each file without a document of two tokens.
    """
    files, problems = find_files(options.path)
    if problems:
        raise UserError(*problems)
    tokenizer = tokenizer_for(options, vocab_size=vocab_size)
    if options.source == "chat":
        return _chats(options, files, tokenizer, sequence_length, vocab_size)
    if options.source == "tokens":
        arrays, _ = open_token_files(files, vocab_size)
        streams = [TokenStream((array,), tokenizer.end_id) for array in arrays]
    else:
        streams = _text_streams(options, files, tokenizer, vocab_size)
    found = {str(path): pack(stream, sequence_length, "first_fit") for path, stream in zip(files, streams, strict=True)}
    empty = [
        f"data.path: '{path}' has no document of two tokens; allowed: files with a token to predict; nearest: leave it "
        "out"
        for path, examples in found.items()
        if not len(examples)
    ]
    if empty:
        raise UserError(*Problems(empty).lines())
    return found


def _chats(
    options: DataOptions, files: list[Path], tokenizer: Tokenizer, sequence_length: int, vocab_size: int
) -> Mapping[str, Examples]:
    found: dict[str, Examples] = {}
    empty = Problems()
    for path in files:
        lines = tokenized(tokenizer, lines_of(options, [path], tokenizer, vocab_size))
        one = as_examples(lines, sequence_length, tokenizer)
        found[str(path)] = one.examples
        if not one.num_lines:
            empty.add(
                f"data.path: '{path}' has no line with a token of an answer; allowed: files with an answer; nearest: "
                "leave it out"
            )
        elif (one.num_truncated or one.num_dropped) and peers.is_main_process():
            warn(f"{path}: {losses([one])}")
    if empty.count:
        raise UserError(*empty.lines())
    return found


def _text_streams(options: DataOptions, files: list[Path], tokenizer: Tokenizer, vocab_size: int) -> list[TokenStream]:
    problems = Problems([*vocabulary_problems(tokenizer, vocab_size), *tokens_as_text(files)])
    texts = []
    for path in files if not problems.count else ():
        texts.append([text for text, _ in read_documents(path, options.text_field, problems)])
        if problems.is_enough():
            break
    if problems.count:
        raise UserError(*problems.lines())
    return [stream_of(tokenizer, documents) for documents in texts]
