"""Prints every field of a configuration: `python -m meshtrain config [--config=FILE]`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from meshtrain.config.config import Config, defaults_of, parse
from meshtrain.words import flags
from meshtrain.words.errors import run
from meshtrain.words.tables import aligned


def table(config: Config) -> str:
    """Returns a line for each field: key, type, default, one line of text; and its value where that differs."""
    values = flags.flatten(dataclasses.asdict(config))
    defaults = dataclasses.replace(defaults_of(config), task=Config.task)
    rows = []
    for key, entry in flags.schema(defaults).items():
        text = entry.text
        if not all(choice in text for choice in entry.choices):
            text += f" ({', '.join(entry.choices)})"
        value = "" if values[key] == entry.default else json.dumps(values[key])
        rows.append((key, entry.kind.__name__, json.dumps(entry.default), value, text))
    header = ("field", "type", "default", "here", "meaning")
    shown = [i for i in range(len(header)) if header[i] != "here" or any(row[i] for row in rows)]
    return aligned([[row[i] for i in shown] for row in rows], [header[i] for i in shown])


def main(argv: Sequence[str]) -> int:
    """Prints every field of the configuration that the arguments name, or of the default one."""
    extra = argparse.ArgumentParser(prog="python -m meshtrain config", description=main.__doc__, add_help=False)
    config, _ = parse(argv, extra, reads_data=False)
    print(table(config))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
