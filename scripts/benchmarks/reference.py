"""Writes the reference of this version: commands, fields, exit codes, and the API for custom code.

    scripts/bench reference [FOLDER]     # docs/reference unless given

Each page is generated from the program: the output of `--help`, the declared fields, the table of exit codes, and
signatures and docstrings of the functions and classes that custom code imports.
"""

import argparse
import contextlib
import inspect
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import meshtrain
from meshtrain.__main__ import COMMANDS
from meshtrain.__main__ import main as command
from meshtrain.cli import flags
from meshtrain.config import data_sources, tasks
from meshtrain.config.schema import Config
from meshtrain.data.dataset import Dataset
from meshtrain.errors import EXIT_CODES, run
from meshtrain.examples.pairs import pack_pairs
from meshtrain.harness import language_model
from meshtrain.models.cost import Cost, Kernel
from meshtrain.models.metrics import Count, Largest, Load, Ratio
from meshtrain.models.task import Decode, Entry, Stages, Task, loss_of_stages, sequence_keys, token_batch
from meshtrain.models.vocabulary import cross_entropy, look_up, without_padding
from meshtrain.observe.trackers import Tracker
from meshtrain.options import add_user_options, option
from meshtrain.pipeline.schedules import Action, Schedule
from meshtrain.sharding.param_kinds import decays, matrix_dims
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.reduction import NAMES, Reduction, ReductionOptions
from meshtrain.sharding.rules import Rule, Rules, default_rules, extend

API: dict[str, tuple[Any, ...]] = {
    "Scripts and notebooks": (
        meshtrain.train, meshtrain.Result, meshtrain.default, meshtrain.resolve, meshtrain.simulate, language_model,
    ),
    "Models": (
        Task, Stages, loss_of_stages, Entry, token_batch, sequence_keys, Decode, Ratio, Count, Load, Largest, Cost,
        Kernel, cross_entropy, without_padding, look_up, option,
    ),
    "Placement": (Placement.weight, Placement.activation, Rule, Rules, default_rules, extend),
    "Sources": (Dataset, pack_pairs),
    "Pipeline schedules": (Action, Schedule),
    "Optimizers and trackers": (decays, matrix_dims, Tracker),
    "Reductions": (Reduction, ReductionOptions),
}  # fmt: skip


def commands_page() -> str:
    """Returns a section for each command: its line of text and its `--help`."""
    sections = ["# Commands"]
    for name, (_, text) in COMMANDS.items():
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            command([name, "--help"])
        sections.append(f"## {name}\n\n{text}\n\n```\n{shown.getvalue().rstrip()}\n```")
    return "\n\n".join(sections)


def fields_page() -> str:
    """Returns a table of all fields, and a table for each task, source or reduction with other options."""
    sections, reduction = ["# Fields of a configuration", _fields_table(flags.schema(Config()))], ReductionOptions()
    for key, group, kinds in (
        ("task", "model", {name: tasks.find(name).options for name in tasks.names()}),
        ("data.source", "data", {name: data_sources.find(name).options for name in data_sources.names()}),
        ("reduction.name", "reduction", {name: type(add_user_options(reduction, "reduction", name)) for name in NAMES}),
    ):
        for kind in dict.fromkeys(kinds.values()):
            entries = flags.schema(Config(**{group: kind()}))
            if entries.keys() != flags.schema(Config()).keys():
                names = " or ".join(name for name, its in kinds.items() if its is kind)
                shown = {field: entry for field, entry in entries.items() if field.startswith(f"{group}.")}
                sections += [f"## {key}={names}", _fields_table(shown)]
    return "\n\n".join(sections)


def _fields_table(entries: Mapping[str, flags.Entry]) -> str:
    rows = [
        f"| `{key}` | {entry.kind.__name__} | `{json.dumps(entry.default)}` | {_cell(_meaning(entry))} |"
        for key, entry in entries.items()
    ]
    return "\n".join(["| field | type | default | meaning |", "| --- " * 4 + "|", *rows])


def exit_codes_page() -> str:
    """Returns the table of exit codes."""
    rows = [f"| {code} | {_cell(text)} |" for code, text in EXIT_CODES.items()]
    return "\n".join(["# Exit codes", "", "| code | meaning |", "| --- | --- |", *rows])


def api_page() -> str:
    """Returns a section for each function and class that custom code imports, with its docstring."""
    sections = ["# API"]
    for title, things in API.items():
        sections.append(f"## {title}")
        for thing in things:
            shown = f"{thing.__module__}.{thing.__qualname__}{inspect.signature(thing)}"
            sections.append(f"### {thing.__qualname__}\n\n```\n{shown}\n\n{inspect.getdoc(thing)}\n```")
    return "\n\n".join(sections)


PAGES = {"commands.md": commands_page, "fields.md": fields_page, "exit_codes.md": exit_codes_page, "api.md": api_page}


def _meaning(entry: Any) -> str:
    missing = [choice for choice in entry.choices if choice and choice not in entry.text]
    return f"{entry.text} ({', '.join(missing)})" if missing else entry.text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    """Creates the folder, writes the pages into it, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="scripts/bench reference", description=main.__doc__)
    parser.add_argument("folder", nargs="?", default="docs/reference", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page() + "\n", encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
