"""A run stops once enough evaluations in a row have found nothing better than the best before them."""

import math

import pytest

from meshtrain.step.early_stop import EarlyStopOptions, reason

pytestmark = pytest.mark.quick

CASES = {  # values of the evaluations, patience, whether higher is better -> how many are made
    "better each time": ([3.0, 2.0, 1.0, 0.5], 1, False, None),
    "worse at once": ([1.0, 2.0, 3.0], 1, False, 2),
    "equal is not better": ([1.0, 1.0, 1.0, 1.0], 2, False, 3),
    "better than the one before is not the best": ([1.0, 3.0, 2.0, 1.5, 0.5], 3, False, 4),
    "better just in time": ([1.0, 3.0, 0.9, 3.0, 0.8], 2, False, None),
    "accuracy": ([0.5, 0.6, 0.6, 0.55], 2, True, 4),
    "not a number": ([2.0, math.nan, 1.0, math.inf, math.nan], 2, False, 5),
    "never finite": ([math.nan, math.nan], 2, False, 2),
    "without patience": ([1.0, 2.0, 3.0, 4.0], 0, False, None),
}


@pytest.mark.parametrize("case", CASES)
def test_patience_counts_evaluations_since_the_best(case):
    values, patience, higher, expected = CASES[case]
    options, found, said = EarlyStopOptions(patience=patience), {}, ""
    for number, value in enumerate(values, start=1):
        said = reason(options, found, 10 * number, {"eval_loss": value, "eval_accuracy": 0.0}, higher=higher)
        if said:
            break
    assert (number if said else None) == expected


def test_the_reason_names_the_best_one():
    options, found = EarlyStopOptions(patience=2), {10: 0.25, 20: 0.5}
    said = reason(options, found, 30, {"eval_loss": 0.375}, higher=False)
    assert said == "early stop at step 30: eval_loss is not better than 0.25 at step 10 in 2 evaluations"
    assert found == {10: 0.25, 20: 0.5, 30: 0.375}
