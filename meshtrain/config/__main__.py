"""Prints a configuration's fields, or copies an example: `python -m meshtrain config [--config=FILE] [--copy=NAME]`."""

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Sequence

from meshtrain.cli import flags, output_files
from meshtrain.cli.tables import align
from meshtrain.config.build import defaults_of
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError, refuse, run, unknown

WIDTH = 120  # characters in a line if the terminal's width is unknown
LEAST_TEXT = 30  # minimum width of the column "meaning", in characters


def table(config: Config, width: int) -> str:
    """Returns a table with a row for each field: key, type, default, its value if it is not the default, and meaning.

    Args:
      config: the configuration.
      width: the maximum number of characters in a line; longer meanings are wrapped.
    """
    values = flags.flatten(config)
    defaults = dataclasses.replace(defaults_of(config), task=Config.task)
    rows = []
    for key, entry in flags.schema(defaults).items():
        text = entry.text
        if not all(choice in text for choice in entry.choices):
            text += f" ({', '.join(choice for choice in entry.choices if choice)})"
        value = "" if values[key] == entry.default else json.dumps(values[key])
        rows.append((key, entry.kind.__name__, json.dumps(entry.default), value, text))
    header = ("field", "type", "default", "here", "meaning")
    shown = [i for i in range(len(header)) if header[i] != "here" or any(row[i] for row in rows)]
    room = width - sum(max(len(row[i]) for row in (header, *rows)) + 2 for i in shown[:-1])
    lines = []
    for row in rows:
        first, *more = textwrap.wrap(row[-1], max(room, LEAST_TEXT), break_on_hyphens=False)
        lines.append([*(row[i] for i in shown[:-1]), first])
        lines += [[*("" for _ in shown[:-1]), text] for text in more]
    return align(lines, [header[i] for i in shown])


def copy(name: str) -> pathlib.Path:
    """Copies an example configuration of meshtrain into the working directory and returns the path of the copy.

    Args:
      name: the name of the example, such as `3d` for `configs/3d.py`.

    Raises:
      UserError: there is no configuration of this name, the file exists, or the folder is not writable.
    """
    own, file = flags.example_files(), pathlib.Path(f"{name}.py")
    if name not in own:
        raise UserError(unknown("--copy", name, list(own), "3d"))
    if file.exists():
        raise UserError(
            Problem(
                "--copy",
                got=f"'{name}', but {file} already exists in this folder",
                allowed="a new file",
                nearest="another folder",
            )
        )
    refuse(output_files.unwritable(pathlib.Path(), "--copy", "another folder"))
    output_files.write("--copy", str(file), own[name].read_bytes())
    return file


def main(argv: Sequence[str]) -> int:
    """Prints every field of the configuration that the arguments name, or of the default configuration."""
    extra = argparse.ArgumentParser(prog="python -m meshtrain config", description=main.__doc__, add_help=False)
    extra.add_argument(
        "--copy",
        metavar="NAME",
        help=f"copy one of meshtrain's configurations into this folder, to edit it: {', '.join(flags.example_files())}",
    )
    config, arguments = parse(argv, extra, reads_data=False)
    if arguments.copy is not None:
        file = copy(arguments.copy)
        print(f"{file}: edit it, then run {flags.program()} train --config={file}")
        return 0
    if arguments.config is None and not arguments.overrides:
        config = Config()  # the declared defaults, because `parse` has filled in the vocabulary of the data
    print(table(config, shutil.get_terminal_size((WIDTH, 0)).columns))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
