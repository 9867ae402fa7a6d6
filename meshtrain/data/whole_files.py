"""Each file of `data.path` by itself and whole, to be evaluated: nothing is split off, and no end is left out."""

from collections.abc import Mapping
from pathlib import Path

from meshtrain.data.corpus import stream_of, tokenizer_for, vocabulary_problems
from meshtrain.data.packing import Examples, TokenStream, pack
from meshtrain.data.sources import READ_BY_FILE, DataOptions
from meshtrain.data.text import find_files, read_documents, tokens_as_text
from meshtrain.data.token_files import open_token_files
from meshtrain.data.tokenize import Tokenizer
from meshtrain.words.errors import Problems, UserError


def open_whole(options: DataOptions, *, sequence_length: int, vocab_size: int) -> Mapping[str, Examples]:
    """Returns the path of each file -> its examples, in which every token but a document's first is a target once.

    Documents are packed whole into padded rows (`first_fit`), whatever `data.packing` says: windows of a stream would
    leave out the tokens after the last whole window.

    Args:
      options: of a source in `READ_BY_FILE`, checked.
      sequence_length: T, tokens an example.
      vocab_size: the model's, which every id must be below.

    Raises:
      UserError: a line for each thing wrong with the files, and for each file without a document of two tokens.
    """
    assert options.source in READ_BY_FILE, options.source
    files, problems = find_files(options.path)
    if problems:
        raise UserError(*problems)
    tokenizer = tokenizer_for(options, vocab_size=vocab_size)
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
