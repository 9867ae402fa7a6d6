"""Stops a run before its last step if its evaluations no longer improve."""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.errors import Problem
from meshtrain.options import Except, option


@dataclasses.dataclass(frozen=True)
class EarlyStopOptions:
    """When a run stops early: the metric, and the number of evaluations without improvement."""

    patience: int = option(
        0, "consecutive evaluations without a new best after which a run saves and stops; 0: never", minimum=0
    )
    metric: str = option(
        "eval_loss",
        "evaluation metric that has to improve; lower is better, except in Task.higher_is_better",
        only_for={"patience": Except(0)},
    )


def check(options: EarlyStopOptions, eval_every: int) -> list[Problem]:
    """Returns an error line if early stopping is on but the run makes no evaluations before its last step, else [].

    Args:
      options: the options of early stopping.
      eval_every: the number of steps between two evaluations; 0: none before the last step.
    """
    if not options.patience or eval_every:
        return []
    return [
        Problem(
            "early_stop.patience",
            got=f"{options.patience} with eval_every=0",
            allowed="an eval_every above 0",
            nearest="eval_every=100",
            depends_on=["eval_every"],
        )
    ]


def reason(
    options: EarlyStopOptions, found: dict[int, float], step: int, values: Mapping[str, float], *, higher: bool
) -> str:
    """Returns the message with which a run stops early after an evaluation; empty if the run continues.

    Args:
      options: the patience and the metric.
      found: step -> value of the metric in each earlier evaluation; this function adds the value of this evaluation.
      step: the step of the evaluation.
      values: metric name -> value in this evaluation, the same in all processes. A non-finite value counts as no
        improvement.
      higher: whether a higher value of the metric is better.
    """
    if not options.patience:
        return ""
    found[step] = values[options.metric]
    rated = {one: -value if higher else value for one, value in found.items() if math.isfinite(value)}
    best = min(rated, key=lambda one: (rated[one], one), default=0)
    num_since = sum(one > best for one in found)
    if num_since < options.patience:
        return ""
    verdict = f"not better than {found[best]:.6g} at step {best}" if rated else "not finite"
    return f"early stop at step {step}: {options.metric} is {verdict} in {num_since} evaluations"
