"""The options of the data, and the checks of them that read no data."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from meshtrain.data import chat_template
from meshtrain.data.idx import find_images
from meshtrain.data.text import find_files, tokens_as_text
from meshtrain.data.token_files import read_sidecar
from meshtrain.data.tokenize import file_problems
from meshtrain.words import named
from meshtrain.words.errors import Problems, UserError, unknown
from meshtrain.words.options import option

TOKENS = ("python", "text", "tokens", "chat", "synthetic")  # sources of packed tokens, for the decoder
IMAGES = ("digits", "idx")
PAIRS, BEGIN_ID = ("numbers",), 0  # of a source and a target, for the encoder-decoder; what a target begins with
SOURCES = (*TOKENS, *IMAGES, *PAIRS)
SPELLINGS = ("digits", "english")
NUMBERS = {"source": PAIRS}
PACKINGS = ("stream", "first_fit")
DOCUMENTS = {"source": ("python", "text", "chat")}  # documents go through data.tokenizer
READ_BY_FILE = ("text", "tokens", "chat")  # each file can be evaluated by itself
READ = {"source": ("python", "text", "tokens")}
CHATS = (*READ["source"], "chat")  # whose models can be asked by `generate --chat`
SPLIT = {"source": (*CHATS, *IMAGES), "validation_path": ("",)}


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Where the data come from, and how they are packed and read."""

    source: str = option(
        "python",
        "python (source of the running Python's standard library), text (files), tokens (prepared .bin), "
        "chat (prompts and answers, or messages), synthetic, digits (handwritten, 8 x 8 pixels), idx (images in files "
        "like MNIST's), numbers (to be written in words), or "
        "package.module:function of one's own, see data/own.py",
        names="function",
    )
    path: str = option(
        "",
        "files or globs, comma separated: .txt, .py, .jsonl for text; .bin for tokens; .jsonl for chat; images for "
        "idx, whose labels are beside them; '' otherwise",
        names="path",
    )
    validation_path: str = option(
        "",
        "files of images for validation; '': a share of those of data.path",
        only_for={"source": ("idx",)},
        names="path",
    )
    text_field: str = option(
        "text", "the field of a .jsonl line that holds the document", only_for={"source": ("text",)}
    )
    tokenizer: str = option(
        "bytes", "bytes, or the path of a tokenizer.json or of its folder (tokens bring their own)", names="path"
    )
    end_token: str = option(
        "", "the token that ends a document; '' takes the folder's, else a well-known one, or adds one id",
        only_for=DOCUMENTS,
    )  # fmt: skip
    chat_template: str = option(
        "", "a file with the Jinja template of conversations; '' takes that of the tokenizer's folder", names="path"
    )
    packing: str = option(
        "stream",
        "stream (documents end to end, cut into windows) or first_fit (whole documents packed into padded rows)",
        choices=PACKINGS,
        only_for=READ,
    )
    validation_fraction: float = option(
        0.05, "share of the data kept for validation, 0 to below 1", minimum=0, only_for=SPLIT
    )
    numbers_below: int = option(
        1000, "numbers 0 .. this minus 1 are written in words", minimum=10, maximum=1_000_000, only_for=NUMBERS
    )
    num_held_out: int = option(
        0, "numbers kept for validation; 0: a tenth of them, at most 1,000", minimum=0, only_for=NUMBERS
    )
    spelling: str = option(
        "digits", "how a number is written: digits (four zero seven) or english (four hundred and seven)",
        choices=SPELLINGS, only_for=NUMBERS,
    )  # fmt: skip
    num_threads: int = option(2, "threads that read ahead; 0 reads when asked", minimum=0, maximum=1024)
    num_prefetch_batches: int = option(4, "batches read ahead, on the host", minimum=1)


def is_own(options: DataOptions) -> bool:
    """Returns whether the data come from a user's function."""
    return ":" in options.source


def unread(options: DataOptions) -> list[str]:
    """Returns one line for each input that the user names and this source would not read.

    There is none for a user's data function, which gets the whole configuration and may read any input.
    """
    if is_own(options):
        return []
    found = []
    if options.source not in (*READ_BY_FILE, "idx") and options.path:
        found.append(
            f"data.path: got '{options.path}' with data.source={options.source}, which reads no files; allowed: ''; "
            f"nearest: data.source={_source_of(options.path)}"
        )
    if options.source != "idx" and options.validation_path:
        found.append(
            f"data.validation_path: got '{options.validation_path}' with data.source={options.source}, which takes its "
            "validation data from data.path or brings them; allowed: ''; nearest: leave it out"
        )
    if options.source not in DOCUMENTS["source"] and options.tokenizer != "bytes":
        why = "its token files bring their own" if options.source == "tokens" else "it reads no text"
        found.append(
            f"data.tokenizer: got '{options.tokenizer}' with data.source={options.source}: {why}; allowed: bytes, the "
            "default; nearest: leave it out"
        )
    if options.source not in CHATS and options.chat_template:
        found.append(
            f"data.chat_template: got '{options.chat_template}' with data.source={options.source}, whose models answer "
            "no messages; allowed: ''; nearest: data.source=chat"
        )
    return found


def _source_of(path: str) -> str:
    """Returns the source that reads a file, judged by its name."""
    if path.endswith(".bin"):
        return "tokens"
    return "idx" if "idx" in path or "ubyte" in path else "text"


def check(options: DataOptions, *, reads_data: bool = True) -> list[str]:
    """Returns one line for each problem that can be seen without reading the data: paths, sizes, descriptions.

    Args:
      options: each within its own bounds.
      reads_data: whether the files must exist on this machine; if not, only the options themselves are checked.
    """
    if options.source not in SOURCES and not is_own(options):
        line = unknown("data.source", options.source, SOURCES).replace("; did", f", {named.FORM}; did")
        return [line if "did you mean" in line else f"{line}, {named.FORM}; nearest: 'python', the default"]
    problems = unread(options)
    if options.validation_fraction >= 1:
        problems.append(
            f"data.validation_fraction: got {options.validation_fraction}; allowed: 0 to below 1; nearest: 0.5"
        )
    if options.source in PAIRS and options.num_held_out >= options.numbers_below:
        problems.append(
            f"data.num_held_out: got {options.num_held_out}; allowed: below data.numbers_below = "
            f"{options.numbers_below}; nearest: {options.numbers_below // 10}"
        )
    if not reads_data:
        return problems
    if is_own(options):
        problems += named.problems("data.source", options.source, SOURCES)
    if options.source in DOCUMENTS["source"] and options.tokenizer != "bytes":
        problems += file_problems(options.tokenizer)
    if options.source in CHATS:
        problems += chat_template.file_problems(options.chat_template)
    if options.source in READ_BY_FILE:
        files, found = find_files(options.path)
        problems += found
        if not found:
            problems += Problems(_KINDS[options.source](files)).lines()
    if options.source == "idx":
        problems += find_images(options.path, "data.path")[1]
        if options.validation_path:
            problems += find_images(options.validation_path, "data.validation_path")[1]
    return problems


def _sidecar_problems(files: Iterable[Path]) -> list[str]:
    problems: list[str] = []
    for path in files:
        try:
            read_sidecar(path)
        except UserError as error:
            problems += error.problems
    return problems


def _no_lines(files: Iterable[Path]) -> list[str]:
    """Returns one line for each file that holds no lines of JSON, judged by its name."""
    lines = "jq -c '.[]' FILE.json > FILE.jsonl, for a file with one list"
    return [
        f"data.path: got '{path}' with data.source=chat; allowed: .jsonl files; nearest: "
        f"{lines if path.suffix == '.json' else f'data.source={_source_of(str(path))}'}"
        for path in files
        if path.suffix != ".jsonl"
    ]


# Of each source in `READ_BY_FILE`: files -> one line for each of another kind.
_KINDS: Mapping[str, Callable[[Iterable[Path]], list[str]]] = {
    "text": tokens_as_text,
    "tokens": _sidecar_problems,
    "chat": _no_lines,
}
