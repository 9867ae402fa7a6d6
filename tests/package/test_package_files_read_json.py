"""JSON of others: numbers of any length, brackets of any depth."""

import json
import math

import pytest

from meshtrain.errors import is_finite
from meshtrain.files import read_json

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("digits", ["0", "-12", "9" * 308, "-" + "9" * 307])
def test_whole_numbers_that_float64_holds_stay_whole(digits):
    assert read_json(digits) == int(digits)
    assert is_finite(read_json(digits))


@pytest.mark.parametrize("digits", ["9" * 310, "-" + "9" * 4300, "9" * 5000, "1e400", "-1e400"])
def test_others_are_infinite(digits):
    assert read_json(f'{{"seconds": {digits}}}') == {"seconds": math.copysign(math.inf, float(digits))}
    assert not is_finite(read_json(digits))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "", b"\xff", "{", '{"a": 1'])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        read_json(text)


def test_everything_else_is_as_json_reads_it():
    text = '{"a": [1, 2.5, true, null, "x", NaN], "b": {"c": -3}}'
    assert repr(read_json(text)) == repr(json.loads(text))
