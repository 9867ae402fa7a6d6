"""Where examples come from: options -> Corpus (train and validation, random access, fingerprint, text <-> ids)."""

import dataclasses

from meshtrain.options import option

SOURCES = ("python", "text", "tokens", "synthetic")
PACKINGS = ("stream", "first_fit")


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What the model reads. Each field is one line of `python -m meshtrain.config`."""

    source: str = option(
        "python",
        "python (source text of the running Python's standard library), text (files), tokens (prepared .bin), synthetic",
        choices=SOURCES,
    )
    path: str = option("", "files or globs, comma separated: .txt, .py, .jsonl for text; .bin for tokens; '' otherwise")
    text_field: str = option("text", "the field of a .jsonl line that holds the document")
    tokenizer: str = option("bytes", "bytes, or the path of a tokenizer.json (tokens bring their own)")
    end_token: str = option("", "the token that ends a document; '' takes a well-known one, or adds one id")
    packing: str = option(
        "stream",
        "stream (documents end to end, cut into windows) or first_fit (whole documents packed into padded rows)",
        choices=PACKINGS,
    )
    validation_fraction: float = option(0.05, "share of the documents kept for validation, 0 to below 1", minimum=0)
    num_threads: int = option(2, "threads that read ahead; 0 reads when asked", minimum=0)
    num_prefetch_batches: int = option(4, "batches read ahead, on the host", minimum=1)
