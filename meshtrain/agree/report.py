"""The output of `agree`: a row for each side, the differences of a side, and the certificate in JSON."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

import meshtrain
from meshtrain.agree import comparison
from meshtrain.agree.comparison import (
    BATCH,
    CHANGE,
    COUNT,
    EVALUATION,
    EXACT,
    GRADIENT,
    INITIAL,
    KINDS,
    LOSS,
    METRIC,
    NORM,
    STEP_LOSS,
    Excess,
    Figure,
    Key,
)
from meshtrain.agree.covering import Case, describe
from meshtrain.agree.record import Record
from meshtrain.files import Json, hash_of_sources

# Columns of the table: heading -> kinds of quantities whose worst difference the column shows.
COLUMNS: Mapping[str, Sequence[str]] = {
    "inputs": (BATCH, INITIAL),
    "losses, norms": (COUNT, LOSS, METRIC, STEP_LOSS, NORM, EVALUATION),
    "gradients": (GRADIENT,),
    "changes": (CHANGE,),
}
_NAME, _VERDICT, _CELL = 56, 13, 16  # widths
_MOST_LINES = 3  # differences that are printed for a side


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one side.

    Attributes:
      case: the side.
      figures: the result of `comparison.figures`; empty if the side does not run.
      excess: the differences above their bounds.
      error: the error with which the side ended; '' for none.
      zeros: places of gradients that are zero in exact arithmetic.
      parts: for a side that differs, name of a part -> the verdict of the part.
    """

    case: Case
    figures: Mapping[Key, Figure]
    excess: Sequence[Excess]
    error: str
    zeros: Sequence[str] = ()
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether the side ran, and no difference is above its bound."""
        return not self.excess and not self.error

    @property
    def verdict(self) -> str:
        """The verdict as text."""
        return "does not run" if self.error else "differs" if self.excess else "agrees"


class Printer:
    """Prints the report, in the main process only."""

    def __init__(self, *, notes: Sequence[str], cuts: Sequence[str], prints: bool) -> None:
        self._prints = prints
        for note in notes:
            self.line(f"note         {note}")
        if cuts:
            self.line(f"cut          {'; '.join(cuts)}")

    def line(self, text: str) -> None:
        """Prints a line at once: a side may take a minute."""
        if self._prints:
            print(text, flush=True)

    def header(self, rounding: Mapping[Key, Figure], unit: float) -> None:
        """Prints the meaning of the figures, and the heading of the table.

        Args:
          rounding: the yardstick.
          unit: the unit in the last place of the compute dtype, relative to float32.
        """
        self.line(f"yardstick    in brackets: weights nudged by one unit in the last place ({unit * 2.0**-23:.1e})")
        if zeros := comparison.zero_gradients(rounding, unit):
            shown = f"{', '.join(zeros[:_MOST_LINES])}{' ...' if len(zeros) > _MOST_LINES else ''}"
            self.line(f"zero         {len(zeros)} exact gradients are zero, of {shown}")
        cells = "".join(f"{heading:>{_CELL}}" for heading in COLUMNS)
        self.line(f"\n{'worst relative differences from one device':<{_NAME}}{'':<{_VERDICT}}{cells}")

    def row(self, row: Row, rounding: Mapping[Key, Figure]) -> None:
        """Prints the row of a side, and its differences above their bounds.

        Args:
          row: the side.
          rounding: the yardstick.
        """
        cells = [_cell(row, kinds, rounding) for kinds in COLUMNS.values()] if not row.error else []
        text = f"{row.case.name:<{_NAME}}{row.verdict:<{_VERDICT}}{''.join(f'{cell:>{_CELL}}' for cell in cells)}"
        self.line(text.rstrip())
        if row.error:
            self.line(f"    {row.error}")
        for one in row.excess[:_MOST_LINES]:
            self.line(f"    {_excess_text(one)}")
        if len(row.excess) > _MOST_LINES:
            self.line(f"    and {len(row.excess) - _MOST_LINES} more of {len(row.figures)} figures")

    def parts(self, parts: Mapping[str, str]) -> None:
        """Prints the verdicts of the parts of a differing side."""
        if parts:
            self.line(f"    {'; '.join(f'{name}: {verdict}' for name, verdict in parts.items())}")

    def verdict(self, rows: Sequence[Row]) -> int:
        """Prints the verdict of all sides; returns the exit code."""
        differing = [row.case.name for row in rows if not row.agrees]
        if differing:
            self.line(f"\ndiffers: {len(differing)} of {len(rows)} sides")
            return 1
        sides = "1 side" if len(rows) == 1 else f"{len(rows)} sides"
        self.line(f"\nagrees: {sides}, {sum(len(row.figures) for row in rows)} figures")
        return 0


def certificate(reference: Record, rows: Sequence[Row], cuts: Sequence[str]) -> str:
    """Returns the content of `--json`: the reference, and for each side its options, verdict and worst figures.

    Numbers that are not finite become null.

    Args:
      reference: the reference.
      rows: the results of all sides.
      cuts: the texts of all cuts.
    """
    config = json.dumps(reference.about["config"], sort_keys=True)
    content: dict[str, Json] = {
        "meshtrain": meshtrain.__version__,
        "sources": hash_of_sources(Path(meshtrain.__file__).parent),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "reference": {key: value for key, value in reference.about.items() if key != "config"},
        "cuts": list(cuts),
        "agrees": all(row.agrees for row in rows),
        "sides": [_side(row, reference.rounding) for row in rows],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _side(row: Row, rounding: Mapping[Key, Figure]) -> dict[str, Json]:
    worst = {}
    for kind in KINDS:
        key = comparison.worst(row.figures, kind, row.zeros)
        if key is not None:
            worst[kind] = {
                "where": key[1],
                "value": _number(row.figures[key].relative if kind not in EXACT else row.figures[key].error),
                "yardstick": _number(rounding[key].relative) if key in rounding else 0.0,
            }
    differs = [
        {"kind": one.key[0], "where": one.key[1], "value": _number(one.value), "bound": one.bound} for one in row.excess
    ]
    return {
        "name": row.case.name,
        **describe(row.case.config, row.case.shape),
        "verdict": row.verdict,
        "error": row.error or None,
        "worst": worst,
        "differs": differs,
        "parts": dict(row.parts),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cell(row: Row, kinds: Sequence[str], rounding: Mapping[Key, Figure]) -> str:
    if set(kinds) <= set(EXACT):
        errors = [figure.relative for key, figure in row.figures.items() if key[0] in kinds and figure.error]
        return f"{max(errors):.0e}" if errors else "same bits"
    keys = [comparison.worst(row.figures, kind, row.zeros) for kind in kinds]
    key = max((key for key in keys if key), key=lambda key: _value(row.figures[key]), default=None)
    if key is None:
        return "-"
    yardstick = rounding[key].relative if key in rounding else 0.0
    return f"{_value(row.figures[key]):.0e} ({yardstick:.0e})"


def _value(figure: Figure) -> float:
    return figure.relative if figure.error else 0.0


def _excess_text(one: Excess) -> str:
    kind, where = one.key
    if kind in EXACT and one.bound == 0:
        return f"{kind}: {where}: not the same bits"
    return f"{kind}: {where}: differs by {one.value:.1e}; bound {one.bound:.1e}, yardstick {one.yardstick:.1e}"
