"""Any mesh to any mesh: each of eight settings resumes from every setting's save (docs/results/agreement.md).

A setting is a mesh of eight simulated devices, a number of processes, a pipeline schedule and a ZeRO level. Each
setting trains six uninterrupted steps and saves after three; the cells of its row are compared with that run. A cell
resumes from a copy of that save, with the processes and the mesh of its column. It checks:

- each shard of each array of the state, on each device of each process, equals the file bitwise;
- each row of the batches of steps 4 to 6 equals the uninterrupted run's row;
- the losses of these steps agree to 1e-5.

witness.py records the processes' arrays; this program compares them with the saved files.
"""

import argparse
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshtrain.checkpoint.checkpoint import leaves_by_path
from meshtrain.errors import UserError, run, unknown
from scripts.benchmarks.witness import WORKDIR, hashed

ROOT = Path(__file__).parents[2]
WITNESS = "scripts.benchmarks.witness"
NUM_DEVICES, NUM_STEPS, SAVED_STEP = 8, 6, 3
TOLERANCE = 1e-5
LIMIT_SECONDS = 3600  # for one start; a hang must end
COMMON = {
    "num_steps": NUM_STEPS, "checkpoint.every": SAVED_STEP, "batch_size": 16, "sequence_length": 32,
    "accumulation_steps": 2, "pipeline.num_microbatches": 2, "model.num_layers": 4, "model.embed_dim": 32,
    "model.mlp_dim": 64, "model.dropout_rate": 0.1, "learning_rate.warmup_steps": 2, "data.source": "synthetic",
    "log_every": 1, "num_eval_batches": 1, "observe.tensorboard": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting: the mesh, processes, schedule and ZeRO level of a run.

    Attributes:
      mesh: axis -> size; other axes have size 1.
      processes: the number of processes that share the devices.
      schedule: the pipeline schedule; empty without a pipeline.
      zero: the ZeRO level, or a strategy.
    """

    mesh: Mapping[str, int]
    processes: int
    schedule: str = ""
    zero: int | str = 0

    def words(self, also: Mapping[str, Any] | None = None) -> list[str]:
        """Returns the command line, with further fields of the configuration."""
        own: dict[str, Any] = {f"mesh.{axis}": size for axis, size in self.mesh.items()}
        own[f"zero.{'strategy' if isinstance(self.zero, str) else 'level'}"] = self.zero
        if self.schedule:
            own["pipeline.schedule"] = self.schedule
        if "interleaved" in self.schedule:
            own["pipeline.num_chunks"] = 2
        fields = COMMON | own | dict(also or {})
        return [f"--config={ROOT}/configs/tiny.py", *(f"--config.{name}={value}" for name, value in fields.items())]


SETTINGS = {
    "A": Setting({"data": 8}, processes=1),
    "B": Setting({"data": 8}, processes=2, zero=3),
    "C": Setting({"fsdp": 8}, processes=4),
    "D": Setting({"tensor": 8}, processes=1),
    "E": Setting({"data": 4, "tensor": 2}, processes=2, zero=2),
    "F": Setting({"fsdp": 2, "pipeline": 4}, processes=1, schedule="gpipe"),
    "G": Setting({"data": 2, "pipeline": 2, "tensor": 2}, processes=4, schedule="1f1b", zero=1),
    "H": Setting(
        {"data": 2, "pipeline": 2, "fsdp": 2}, processes=2, schedule="interleaved_1f1b", zero="hybrid_shard"
    ),
}  # fmt: skip
# More and fewer processes; into a schedule, out of one, and into another; higher and lower ZeRO levels. In this order
# each setting starts only once: it trains, and resumes from the save of the previous setting.
SAMPLE = (("G", "F"), ("F", "H"), ("H", "C"))


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of a pair: a line for each failed comparison, and the largest relative difference of a loss."""

    problems: list[str]
    difference: float

    def __str__(self) -> str:
        size = "0" if self.difference == 0 else f"{self.difference:.0e}"
        return f"**{len(self.problems)} differ** {size}" if self.problems else f"= {size}"


def start(setting: Setting, workdirs: Sequence[Path], cache: Path) -> None:
    """Trains in each workdir, one after the other, in one start with the setting's number of processes.

    Raises:
      RuntimeError: the runs failed; the message is the end of their output.
    """
    devices = NUM_DEVICES // setting.processes
    launch = [sys.executable, "-m", "meshtrain.launch", f"--processes={setting.processes}", f"--devices={devices}"]
    done = subprocess.run(
        [*launch, "--", "-m", WITNESS, *(f"{WORKDIR}{path}" for path in workdirs), *setting.words()],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{setting} ended with {done.returncode}:\n{done.stdout[-5000:]}")


def copy_save(source: Path, target: Path) -> Path:
    """Copies a run up to its save: its configuration, its data's fingerprint and its checkpoint."""
    step = f"checkpoints/{SAVED_STEP}"
    shutil.copytree(source / step, target / step)
    for name in ("config.json", "corpus.json"):
        shutil.copy(source / name, target)
    return target


def stored(workdir: Path) -> dict[str, np.ndarray]:
    """Returns path -> complete array of a save, read only with Orbax."""
    directory = workdir / "checkpoints" / str(SAVED_STEP) / "state"
    reader = ocp.PyTreeCheckpointer()
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(directory).item_metadata.tree
    )
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(reader.restore(directory, as_numpy)).items()}


def seen(workdir: Path, setting: Setting) -> list[dict[str, Any]]:
    """Returns the records of all processes, see witness.py."""
    paths = [workdir / f"seen.{process}.json" for process in range(setting.processes)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def losses(workdir: Path) -> dict[int, float]:
    """Returns step -> loss after the save."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row and row["step"] > SAVED_STEP}


def differing_arrays(expected: Mapping[str, np.ndarray], held: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each array whose shards, over all processes, differ from the file.

    Layers in chunks are [V, L / V, ...]; the file has [L, ...], the same numbers in the same order.

    Args:
      expected: path -> array.
      held: for each process, path -> `witness.pieces`.
    """
    found = [f"process {i}: other arrays" for i, own in enumerate(held) if own.keys() != expected.keys()]
    for path, array in expected.items():
        parts = [own[path] for own in held if path in own]
        if any((part["dtype"], np.prod(part["shape"], dtype=int)) != (array.dtype.name, array.size) for part in parts):
            found.append(f"{path}: another dtype or size")
            continue
        is_covered = np.zeros(array.shape, bool)
        for part in parts:
            whole, covered = array.reshape(part["shape"]), is_covered.reshape(part["shape"])
            for bounds, own in part["pieces"]:
                index = tuple(slice(*ends) for ends in bounds)
                covered[index] = True
                if hashed(whole[index]) != own:
                    found.append(f"{path}: another value in {bounds}")
        if not is_covered.all():
            found.append(f"{path}: no process has the complete array")
    return found


def batch_rows(processes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """Returns step -> row -> hashes for the steps after the save: one hash, or several if devices disagree."""
    together: dict[str, dict[str, set[str]]] = {}
    for own in processes:
        for step, rows in own["rows"].items():
            if int(step) > SAVED_STEP:
                for row, hashes in rows.items():
                    together.setdefault(step, {}).setdefault(row, set()).update(hashes)
    return together


def compare(writer: Path, wrote: Setting, reader: Path, reads: Setting) -> Cell:
    """Compares a run that resumed from another setting's save with the run that wrote the save.

    Args:
      writer: the uninterrupted run.
      wrote: its setting.
      reader: the run that resumed from a copy of its save.
      reads: its setting.
    """
    before, after, expected = seen(writer, wrote), seen(reader, reads), stored(writer)
    problems = [
        f"{when}: {line}"
        for when, processes in (("saved", before), ("restored", after))
        for line in differing_arrays(expected, [own[when].get(str(SAVED_STEP), {}) for own in processes])
    ]
    rows, expected_rows = batch_rows(after), batch_rows(before)
    if rows != expected_rows or any(len(hashes) != 1 for of_step in rows.values() for hashes in of_step.values()):
        problems.append("other rows of data")
    got, wanted = losses(reader), losses(writer)
    if list(got) != list(range(SAVED_STEP + 1, NUM_STEPS + 1)) or got.keys() != wanted.keys():
        return Cell([*problems, f"losses of steps {list(got)} instead of {list(wanted)}"], float("inf"))
    difference = max(abs(got[step] - wanted[step]) / abs(wanted[step]) for step in got)
    if not difference <= TOLERANCE:
        problems.append(f"a loss differs by {difference:.1e}")
    return Cell(problems, difference)


def cells(pairs: Sequence[tuple[str, str]], work: Path) -> dict[tuple[str, str], Cell]:
    """Trains the runs of these pairs (writer, reader) in the folder `work`, and returns the result of each pair."""
    found: dict[tuple[str, str], Cell] = {}
    saved: set[str] = set()
    # First the settings that save; they also resume from existing saves. Then all other pairs.
    for name in [*dict.fromkeys(writer for writer, _ in pairs), *dict.fromkeys(reader for _, reader in pairs)]:
        saves = name not in saved and any(writer == name for writer, _ in pairs)
        writers = [
            writer for writer, reader in pairs if reader == name and writer in saved and (writer, name) not in found
        ]
        if not saves and not writers:
            continue
        does = ["trains and saves"] * saves + [f"resumes the checkpoints of {', '.join(writers)}"] * bool(writers)
        say(f"{name} {'; '.join(does)}")
        copies = [copy_save(work / writer, work / f"{writer}{name}") for writer in writers]
        start(SETTINGS[name], [*([work / name] if saves else []), *copies], work / "cache")
        if saves:
            saved.add(name)
        for writer, copy in zip(writers, copies, strict=True):
            found[writer, name] = cell = compare(work / writer, SETTINGS[writer], copy, SETTINGS[name])
            say(f"{writer} to {name}: {cell}", *cell.problems[:5])
    return found


def legend() -> list[str]:
    """Returns the lines of the table of settings."""
    lines = ["| | mesh | processes x devices | schedule | ZeRO |", "| --- | --- | --- | --- | --- |"]
    for name, own in SETTINGS.items():
        mesh = " x ".join(f"{axis} {size}" for axis, size in own.mesh.items())
        level = f"`{own.zero}`" if isinstance(own.zero, str) else f"level {own.zero}"
        schedule = f"`{own.schedule}`" if own.schedule else ""
        lines.append(f"| {name} | {mesh} | {own.processes} x {NUM_DEVICES // own.processes} | {schedule} | {level} |")
    return lines


def table(found: Mapping[tuple[str, str], Cell]) -> list[str]:
    """Returns the lines of the table: a row for each writer, a column for each reader."""
    writers = [name for name in SETTINGS if any(writer == name for writer, _ in found)]
    readers = [name for name in SETTINGS if any(reader == name for _, reader in found)]
    lines = [f"| saved under | {' | '.join(readers)} |", f"|{' --- |' * (len(readers) + 1)}"]
    for writer in writers:
        row = (str(found[writer, reader]) if (writer, reader) in found else "" for reader in readers)
        lines.append(f"| **{writer}** | {' | '.join(row)} |")
    return lines


def say(*lines: str) -> None:
    """Prints progress on standard error."""
    print(*lines, sep="\n    ", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Prints the two tables; returns 1 if a comparison fails.

    Raises:
      UserError: an unknown setting.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench mesh", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--from", dest="writers", default="".join(SETTINGS), help="letters of the settings that save, such as ABC"
    )
    parser.add_argument("--to", dest="readers", default="".join(SETTINGS), help="letters of the settings that resume")
    parser.add_argument("--sample", action="store_true", help="only the three pairs of the tests")
    given = parser.parse_args(argv)
    asked = [
        (flag, name) for flag, names in (("--from", given.writers), ("--to", given.readers)) for name in names or " "
    ]
    if wrong := [(flag, name.strip()) for flag, name in asked if name not in SETTINGS]:
        raise UserError(*(unknown(flag, name, list(SETTINGS)) for flag, name in wrong))
    pairs = list(SAMPLE) if given.sample else [(writer, reader) for writer in given.writers for reader in given.readers]
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of missing metadata
    with tempfile.TemporaryDirectory() as work:
        found = cells(pairs, Path(work))
        num_arrays = len(stored(Path(work) / pairs[0][0]))
    print(*legend(), "", *table(found), "", sep="\n")
    kept = sum(not cell.problems for cell in found.values())
    print(f"{kept} of {len(found)} pairs as promised; {num_arrays} arrays each; JAX {jax.__version__}")
    return int(kept < len(found))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
