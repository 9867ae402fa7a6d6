"""JSON that others may have written: whole numbers of any length, brackets of any depth."""

import json
import sys
from typing import Any


def read_json(text: str | bytes) -> Any:
    """Returns what a text of JSON holds. A whole number beyond float64 becomes infinite, as `1e400` does.

    Otherwise its first use beside a float would raise OverflowError, and Python refuses more than 4,300 digits.

    Raises:
      ValueError: it is no JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= sys.float_info.max_10_exp else float(digits)
