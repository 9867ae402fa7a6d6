"""Reads the folders of runs for a report: configuration, metrics, memory of a device, and generated texts."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from meshtrain.errors import Problem, UserError, nearest
from meshtrain.files import Json, JsonObject, expand_user, is_utf8, read_json, what_is_at
from meshtrain.observe.run_files import CONFIG_FILE, DEVICE_FILE, PROMPTED_FILE, SAMPLES_FILE, row_of
from meshtrain.observe.trackers import METRICS_FILE
from meshtrain.report import logs

_WORKDIR = "a workdir of meshtrain"


@dataclasses.dataclass(frozen=True)
class Run:
    """The files in a run's folder, parsed.

    Attributes:
      name: the shortest end of the folder's path that is unique in the report.
      config: the nested dict of config.json.
      log: the metrics of the run.
      device: the entries of device.json; empty if the file is missing.
      sample: the text generated at the end of the run; empty if there is none.
      texts: (step, prompt, generated text) of each sample that evaluations of the run generated.
    """

    name: str
    config: Mapping[str, Json]
    log: logs.Log
    device: Mapping[str, Json]
    sample: str
    texts: Sequence[Sequence[str]] = ()


def open_runs(paths: Sequence[str]) -> tuple[list[Run], list[Problem]]:
    """Returns the runs in some folders, and an error for each folder that cannot be read.

    Args:
      paths: folders of runs, as the user wrote them; an empty sequence gives an error.
    """
    if not paths:
        return [], [Problem("RUN", got="nothing", allowed=f"{_WORKDIR}, or several", nearest="runs/3d")]
    found, problems = list[Run](), list[Problem]()
    names = _names(paths)
    seen = set[pathlib.Path]()
    for path, name in zip(paths, names, strict=True):
        folder = expand_user(path)
        try:
            _refuse_outside_paths(path, folder)
            if (real := folder.resolve()) in seen:
                raise UserError(Problem("RUN", got=f"'{path}' twice", allowed="each run once", nearest="leave one out"))
            seen.add(real)
            found.append(_run(path, name, folder))
        except UserError as error:
            problems += error.problems
        except OSError as error:
            got = f"'{path}', which cannot be read: {error}"
            problems.append(Problem("RUN", got=got, allowed=_WORKDIR, nearest="a folder that you can read"))
    return found, problems


def _refuse_outside_paths(path: str, folder: pathlib.Path) -> None:
    """Raises UserError unless a path is a folder with the files of a run.

    Args:
      path: the path as the user wrote it.
      folder: the same path, with `~` expanded.
    """
    if not path or not is_utf8(path):
        raise UserError(Problem("RUN", got=f"'{path}'", allowed=f"{_WORKDIR}, a path in UTF-8", nearest="runs/3d"))
    if (what := what_is_at(folder)) != "a folder":
        others = folder.parent.iterdir() if what_is_at(folder.parent) == "a folder" else ()
        runs = [str(one) for one in others if what_is_at(one / METRICS_FILE) == "a file"]
        fix = nearest(str(folder), runs)
        raise UserError(Problem("RUN", got=f"'{path}', {what}", allowed=_WORKDIR, fix=fix, nearest="runs/3d"))
    for name in (CONFIG_FILE, METRICS_FILE):
        if (what := what_is_at(folder / name)) != "a file":
            inside = [one.name for one in sorted(folder.iterdir()) if what_is_at(one / METRICS_FILE) == "a file"]
            fix = f"{path.rstrip('/')}/{inside[0]}" if inside else "runs/3d"
            got = f"'{path}' with {what} at {name}"
            raise UserError(Problem("RUN", got=got, allowed=f"{_WORKDIR} whose run has started", nearest=fix))


def _run(path: str, name: str, folder: pathlib.Path) -> Run:
    config = _json(folder / CONFIG_FILE)
    device = _json(folder / DEVICE_FILE) if what_is_at(folder / DEVICE_FILE) == "a file" else {}
    log = logs.read(folder / METRICS_FILE)
    if log is None or not log.curves:
        raise UserError(
            Problem(
                "RUN",
                got=f"'{path}', whose {METRICS_FILE} has no row",
                allowed=f"{_WORKDIR} that has logged a step",
                nearest="wait for its first step",
            )
        )
    sample = ""
    if what_is_at(folder / SAMPLES_FILE) == "a file":
        sample = (folder / SAMPLES_FILE).read_text(encoding="utf-8", errors="replace")
    drawn = dict[tuple[int, str], str]()  # a resumed run may repeat a step's samples
    if what_is_at(folder / PROMPTED_FILE) == "a file":
        for row in filter(None, map(row_of, (folder / PROMPTED_FILE).read_bytes().splitlines(True))):
            drawn[row["step"], str(row.get("prompt"))] = str(row.get("text"))
    texts = [(f"{step:,}", prompt, text) for (step, prompt), text in drawn.items()]
    return Run(name, config, log, device, sample, texts)


def _json(path: pathlib.Path) -> JsonObject:
    try:
        result = read_json(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise ValueError("not an object")
        return result
    except ValueError as error:
        raise UserError(
            Problem(
                path,
                got=f"no JSON object ({error})",
                allowed="the unchanged file of the run",
                nearest="a report without this run",
            )
        ) from None


def _names(paths: Sequence[str]) -> list[str]:
    """Returns for each path its shortest end that no other path has.

    >>> _names(["runs/3d", "old/3d", "runs/tiny"])
    ['runs/3d', 'old/3d', 'tiny']
    """
    parts = [expand_user(path).absolute().parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        lengths = range(1, len(own) + 1)
        length = next((n for n in lengths if all(other[-n:] != own[-n:] for other in others)), len(own))
        names.append("/".join(own[-length:]).replace("//", "/"))
    return names
