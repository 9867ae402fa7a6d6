"""The interface of a built-in data source, the options in `config.data`, and the checks of options and files."""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

from meshtrain.data import chat_template
from meshtrain.data.dataset import Dataset
from meshtrain.data.encoding.special_tokens import ENCODE, MODES
from meshtrain.data.loader import Examples, Shaped
from meshtrain.data.text import TABLES, is_table, tokens_as_text
from meshtrain.data.token_files import read_sidecar
from meshtrain.data.tokenizer import Tokenizer, file_problems, open_tokenizer
from meshtrain.data.weighted_paths import PATH, named_parts, shared_files
from meshtrain.errors import Problem, Problems, UserError, refusals, refuse
from meshtrain.files import url_problems
from meshtrain.options import Options, option, unused
from meshtrain.options import problems as option_problems
from meshtrain.store.buckets import Place

# Sources of packed tokens -> the options with files or a tokenizer that they read.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "python": ("tokenizer", "chat_template"),
    "text": ("path", "validation_path", "tokenizer", "chat_template"),
    "tokens": ("path", "validation_path", "chat_template"),
    "chat": ("path", "validation_path", "tokenizer", "chat_template"),
    "synthetic": (),
}
TOKENS = tuple(INPUTS)
PACKINGS = ("stream", "first_fit")
ALL_ANSWERS, LAST_ANSWER = ANSWERS = ("answers", "last_answer")
DOCUMENTS = {"source": ("python", "text", "chat")}  # sources whose documents are tokenized with data.tokenizer
READ = {"source": ("python", "text", "tokens")}
ANY_VOCABULARY = 2**31 - 1  # ids are int32: every id is legal if the task states no vocabulary


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The options that all data sources share: files, tokenizer, packing, validation split, and reading ahead."""

    source: str = option(
        "python",
        "python (the running Python's standard library), text (files), tokens (prepared .bin files), chat (prompts "
        "and answers, or messages), synthetic, digits (handwritten, 8 x 8 pixels), idx (images in MNIST's format), "
        "numbers (to be spelled out), or a custom package.module:function, see data/dataset.py",
        names="function",
    )
    path: str = option(
        "",
        "files or globs, comma separated: .txt, .py, .jsonl, .parquet, text formats also as .gz, .zst, for text; "
        ".bin for tokens; .jsonl, .parquet for chat; images for idx, with labels in the same folder; '' otherwise. "
        "FILES:WEIGHT, comma separated, mixes text, tokens or chat by shares of sequences. Text and chat may be in "
        "a bucket, gs://",
        names="path",
    )
    validation_path: str = option(
        "",
        "files for validation, comma separated, each with its own metric eval_loss/NAME: FILE, or NAME=FILES; '': a "
        "share of the data in data.path",
        names="path",
    )
    text_field: str = option(
        "text", "the field of a JSON line, or the column of a table, with the document", only_for={"source": ("text",)}
    )
    tokenizer: str = option(
        "bytes", "bytes, or the path of a tokenizer.json or of its folder (token files have their own)", names="path"
    )
    end_token: str = option(
        "", "the token that ends a document; '': the folder's, else a well-known token, else an added id",
        only_for=DOCUMENTS,
    )  # fmt: skip
    begin_token: str = option(
        "",
        "the token before a text that no chat template formats; '': the tokens that tokenizer.json's post-processor "
        "adds; none: no token",
        only_for=DOCUMENTS,
    )
    special_tokens: str = option(
        ENCODE, "encode: a special token's text in a document or message becomes this token; text: it is plain text",
        choices=MODES, only_for=DOCUMENTS,
    )  # fmt: skip
    chat_template: str = option(
        "", "a file with the Jinja template of conversations; '': the template in the tokenizer's folder", names="path"
    )
    loss_on: str = option(
        ALL_ANSWERS, "which answers of a conversation are trained: answers (all), or last_answer", choices=ANSWERS,
        only_for={"source": ("chat",)},
    )  # fmt: skip
    packing: str = option(
        "stream",
        "stream (documents joined, then cut into windows) or first_fit (complete documents packed into padded rows)",
        choices=PACKINGS,
        only_for=READ,
    )
    validation_fraction: float = option(
        0.05,
        "share of the data kept for validation, 0 to below 1",
        minimum=0,
        only_for={"source": (*READ["source"], "chat"), "validation_path": ("",)},
    )
    num_threads: int = option(2, "threads that read batches ahead; 0: no reading ahead", minimum=0, maximum=1024)
    num_prefetch_batches: int = option(4, "batches read ahead, on the host", minimum=1)


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """The requirements of a run for its data, which a data source gets when it is opened.

    Attributes:
      batch: name -> entry of the global batch, an object with shape [B, ...] and dtype.
      limits: name -> the exclusive upper bound of the integers in this entry.
      sequence_length: T, the number of tokens in an example.
      vocab_size: the task's vocabulary size, the exclusive upper bound of ids; 0: the task states no vocabulary size.
      seed: the seed of the run.
    """

    batch: Mapping[str, Shaped]
    limits: Mapping[str, int]
    sequence_length: int
    vocab_size: int
    seed: int

    @property
    def ids_below(self) -> int:
        """The exclusive upper bound of ids: `vocab_size`, or 2**31 - 1 if the task states no vocabulary size."""
        return self.vocab_size or ANY_VOCABULARY


@dataclasses.dataclass(frozen=True)
class Source:
    """The functions and options of a built-in data source. `data.source` selects the source by name.

    Attributes:
      open: (options, the run's `DataRequest`) -> the dataset. It raises UserError if the data are missing or invalid,
        or do not fit the task.
      check: (options, whether the files must exist on this machine) -> an error line for each problem that can be
        detected before the data are opened.
      tokenizer: (options, vocabulary size of the task) -> the tokenizer; it reads no examples.
      vocab_size: options -> the vocabulary size of the data, used if the user sets no `model.vocab_size`.
      options: the frozen dataclass of the options in `config.data`; each field is an `option(default, text)`.
      open_files: (options, the run's `DataRequest`) -> the examples of each file of `data.path`, by its path; None: the
        source reads no files.
    """

    open: Callable[[Options, DataRequest], Dataset]
    check: Callable[[Options, bool], list[Problem]]
    tokenizer: Callable[[Options, int], Tokenizer]
    vocab_size: Callable[[Options], int]
    options: type[DataOptions] = DataOptions
    open_files: Callable[[Options, DataRequest], Mapping[str, Examples]] | None = None


def is_own(options: DataOptions) -> bool:
    """Returns whether `data.source` names a user's function, `package.module:function`, not a built-in source."""
    return ":" in options.source


def reads_documents(options: DataOptions) -> bool:
    """Returns whether the data source tokenizes documents with `data.tokenizer`."""
    return "end_token" not in unused(options, "")


def tokenizer_of(options: DataOptions) -> Tokenizer:
    """Opens the tokenizer that `tokenizer`, `end_token`, `begin_token` and `special_tokens` of the options define.

    Raises:
      UserError: the tokenizer is missing or invalid, or lacks a token.
    """
    return open_tokenizer(options.tokenizer, options.end_token, options.begin_token, options.special_tokens)


def source_of(path: str) -> str:
    """Returns the name of the data source that reads a file: `tokens` if its name ends in .bin, else `text`."""
    return "tokens" if path.endswith(".bin") else "text"


def unread(options: DataOptions, inputs: Container[str], source_of: Callable[[str], str] = source_of) -> list[Problem]:
    """Returns an error line for each option that names files which the data source would not read.

    Args:
      options: the options of the source.
      inputs: the options, of `path`, `validation_path`, `tokenizer` and `chat_template`, that the source reads. Each
        other option must have its default.
      source_of: path of a file -> name of the data source that reads it, for the error lines.
    """
    problems, got = [], f"with data.source={options.source}"
    if "path" not in inputs and options.path:
        problems.append(
            Problem(
                "data.path",
                got=f"'{options.path}' {got}, which reads no files",
                allowed="''",
                nearest=f"data.source={source_of(options.path)}",
            )
        )
    if "validation_path" not in inputs and options.validation_path:
        problems.append(
            Problem(
                "data.validation_path",
                got=f"'{options.validation_path}' {got}, which takes its validation data from data.path or has its own",
                allowed="''",
                nearest="leave it out",
                depends_on=["data.path"],
            )
        )
    if "tokenizer" not in inputs and options.tokenizer != "bytes":
        why = "its token files have their own tokenizer" if options.source == "tokens" else "it reads no text"
        problems.append(
            Problem(
                "data.tokenizer",
                got=f"'{options.tokenizer}' {got}: {why}",
                allowed="bytes, the default",
                nearest="leave it out",
            )
        )
    if "chat_template" not in inputs and options.chat_template:
        problems.append(
            Problem(
                "data.chat_template",
                got=f"'{options.chat_template}' {got}, whose models do not answer messages",
                allowed="''",
                nearest="data.source=chat",
            )
        )
    return problems


def url_problems_of(options: DataOptions) -> list[Problem]:
    """Returns an error line for each URL in the paths of the options, for a source that reads only local files."""
    paths = {"data.path": options.path, "data.validation_path": options.validation_path}
    return [line for key, path in paths.items() for line in url_problems(key, path, f"data.source={options.source}")]


def fraction_problems(options: DataOptions) -> list[Problem]:
    """Returns an error line if `data.validation_fraction` is 1 or more, which leaves no training data."""
    if options.validation_fraction < 1:
        return []
    return [Problem("data.validation_fraction", got=options.validation_fraction, allowed="0 to below 1", nearest="0.5")]


def check(options: DataOptions, reads_data: bool = True, like: str = "") -> list[Problem]:
    """Checks options, paths, file sizes and token files' descriptions; returns an error line for each problem.

    No tokens are read.

    Args:
      options: the options of a source of packed tokens, each within its bounds.
      reads_data: whether the files must exist on this machine; if not, only the options themselves are checked.
      like: the built-in source with the same file format, for the source of an optional package; '': `options.source`.
    """
    like = like or options.source
    inputs = INPUTS[like]
    urls = url_problems_of(options) if like == "tokens" else []
    problems = unread(options, inputs) + fraction_problems(options) + urls
    if not reads_data:
        return problems
    if "tokenizer" in inputs and options.tokenizer != "bytes":
        problems += file_problems(options.tokenizer)
    if "chat_template" in inputs:
        problems += chat_template.file_problems(options.chat_template)
    if "path" in inputs and not urls:
        parts, found = named_parts(options.path, options.validation_path)
        problems += Problems(found).lines()
        if not found:
            kind = _KINDS[like]
            found = [
                problem.with_parts(key=problem.key.replace(PATH, part.key, 1))
                for part in parts
                for problem in kind(part.files)
            ]
            if like == "tokens" and not found:
                found = shared_files(parts, _text_of, "whose text is also in {}")
            problems += Problems(found).lines()
    return problems


def check_files(options: DataOptions, like: str = "") -> list[Place]:
    """Checks the options of a data source, and returns the files of `data.path`, which must not be a mixture.

    Args:
      options: the options of a source of packed tokens.
      like: the built-in source with the same file format, for the source of an optional package; '': `options.source`.

    Raises:
      UserError: has one line for each problem of the options and files; or `data.path` is a mixture.
    """
    refuse(option_problems(options, "data") + check(options, like=like))
    first, *others = named_parts(options.path, "")[0]
    if others:
        raise UserError(
            Problem(
                PATH,
                got=f"weights in '{options.path}', although this command scores each file separately",
                allowed="files or globs",
                nearest=",".join(part.paths for part in (first, *others)),
            )
        )
    return list(first.files)


def _text_of(path: Path) -> list[tuple[str | int, ...]]:
    """Returns the identity of the file of text from which the token file `path` was prepared.

    The result is [(path, size in bytes, version, field of the documents)] of the file of text; [] if it is not
    recorded.
    """
    described = read_sidecar(path)
    text = (described.source, described.source_bytes, described.source_version, described.text_field)
    return [text] if described.source else []


def _sidecar_problems(files: Iterable[Path]) -> list[Problem]:
    return [line for path in files for line in refusals(read_sidecar, path)]


def _no_lines(files: Iterable[Place]) -> list[Problem]:
    """Returns an error line for each file whose name shows that it has no JSON lines or table rows."""
    lines = "jq -c '.[]' FILE.json > FILE.jsonl, if the file contains one list"
    return [
        Problem(
            "data.path",
            got=f"'{path}', which is not a file of lines or rows",
            allowed=f"files that end in {', '.join(TABLES)}",
            nearest=lines if path.suffix == ".json" else f"data.source={source_of(str(path))}",
        )
        for path in files
        if not is_table(path)
    ]


# For each source that reads `path`: a function that returns an error line for each file that the source cannot read.
_KINDS: Mapping[str, Callable[[Iterable[Place]], list[Problem]]] = {
    "text": tokens_as_text,
    "tokens": _sidecar_problems,
    "chat": _no_lines,
}
