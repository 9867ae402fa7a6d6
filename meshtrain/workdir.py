"""A run's own folder: config.json, corpus.json, layout.txt, metrics.jsonl, tensorboard/, checkpoints/."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from meshtrain.config import CONFIG_FILE, Config, difference, to_json
from meshtrain.errors import UserError

CORPUS_FILE = "corpus.json"


def opened(directory: pathlib.Path, config: Config, *, writes: bool) -> pathlib.Path:
    """Returns the folder, made where it is missing, with the configuration in it.

    Args:
      directory: any path.
      config: what the run is told.
      writes: whether this process is the one that writes (process 0).

    Raises:
      UserError: it cannot be written, or it holds a run whose configuration differs in what may not change.
    """
    run = directory.expanduser().absolute()
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not os.access(run, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
        before = _read_json(run / CONFIG_FILE)
        changed = difference(before, json.loads(to_json(config))) if before else []
        if changed:
            raise UserError(
                *(f"workdir {run} holds another run: {line}" for line in changed),
                f"workdir {run}: allowed: the run's own configuration; nearest: another --workdir",
            )
        if writes:
            write_text(run, CONFIG_FILE, to_json(config))
    except OSError as error:
        raise UserError(
            f"--workdir: cannot write {run} ({error.strerror}); allowed: a folder that can be made and written"
        ) from None
    return run


def write_text(run: pathlib.Path, name: str, text: str) -> None:
    """Writes one of the run's small files whole: whoever reads it sees the old one or the new one."""
    new = run / f".{name}.new"
    new.write_text(text, encoding="utf-8")
    new.replace(run / name)


def refuse_other_corpus(run: pathlib.Path, fingerprint: str, *, writes: bool) -> None:
    """Notes which data the run learns from.

    Raises:
      UserError: the folder holds a run on other data.
    """
    kept = _read_json(run / CORPUS_FILE).get("fingerprint")
    if kept not in (None, fingerprint):
        raise UserError(
            f"workdir {run}: its run learned from data with hash {kept[:12]}, and these have {fingerprint[:12]} "
            "(another Python, or files that changed); allowed: the same data; nearest: another --workdir"
        )
    if kept is None and writes:
        write_text(run, CORPUS_FILE, json.dumps({"fingerprint": fingerprint}))


def kept(run: pathlib.Path, name: str, compute: Callable[[], Any]) -> Any:
    """Returns a fact about the run's data that is computed once and then stands in corpus.json."""
    facts = _read_json(run / CORPUS_FILE)
    if name not in facts:
        facts[name] = compute()
        write_text(run, CORPUS_FILE, json.dumps(facts))
    return facts[name]


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the file's object; an empty one where there is no file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(
            f"{path}: not a JSON object; allowed: the file as the run wrote it; nearest: another --workdir"
        ) from None
