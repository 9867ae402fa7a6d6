"""Prints what tests cost as a Markdown table: a row for each folder of tests, a column for each stage.

    python scripts/cost_table.py fast=FILE slow=FILE ...    files that `pytest --cost-file=FILE` has written

`scripts/test_cost --all` runs every stage and prints the table.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

CORES = 2


def rows(costs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns the lines of the table, the most expensive folder first, then the sums and the minutes on two cores.

    Args:
      costs: stage -> folder -> CPU seconds of all processes.
    """
    totals: dict[str, float] = {}
    for folders in costs.values():
        for folder, seconds in folders.items():
            totals[folder] = totals.get(folder, 0.0) + seconds
    lines = [f"| CPU seconds of | {' | '.join(costs)} |", "|---|" + "---:|" * len(costs)]
    for folder in sorted(totals, key=lambda name: -totals[name]):
        cells = [f"{folders[folder]:.0f}" if folder in folders else "" for folders in costs.values()]
        lines.append(f"| {folder} | {' | '.join(cells)} |")
    sums = [sum(folders.values()) for folders in costs.values()]
    lines.append(f"| all | {' | '.join(f'{seconds:.0f}' for seconds in sums)} |")
    lines.append(f"| minutes over two cores | {' | '.join(f'{seconds / CORES / 60:.1f}' for seconds in sums)} |")
    return lines


def main(argv: Sequence[str]) -> int:
    """Prints the table of the files that `argv` names, STAGE=FILE each."""
    named = [word.partition("=") for word in argv]
    print("\n".join(rows({stage: json.loads(pathlib.Path(path).read_text("utf-8")) for stage, _, path in named})))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
