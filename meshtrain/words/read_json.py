"""JSON that others may have written: whole numbers of any length, brackets of any depth."""

import json
import sys
from typing import Any


def read_json(text: str | bytes) -> Any:
    """Returns what a text of JSON holds; a whole number beyond float64, which would overflow later, is infinite.

    Raises:
      ValueError: it is no JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= sys.float_info.max_10_exp else float(digits)
