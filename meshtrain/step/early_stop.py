"""When a run stops before its last step: its evaluations have stopped getting better."""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.errors import Problem
from meshtrain.options import Except, option


@dataclasses.dataclass(frozen=True)
class EarlyStopOptions:
    """How long a run waits for a better evaluation."""

    patience: int = option(
        0, "consecutive evaluations without a new best after which a run saves and stops; 0: never", minimum=0
    )
    metric: str = option(
        "eval_loss",
        "evaluation metric that has to improve; lower is better, except in Task.higher_is_better",
        only_for={"patience": Except(0)},
    )


def check(options: EarlyStopOptions, eval_every: int) -> list[Problem]:
    """Returns one line if a run waits for evaluations that it does not make."""
    if not options.patience or eval_every:
        return []
    return [
        Problem(
            "early_stop.patience",
            got=f"{options.patience} with eval_every=0",
            allowed="evaluations during the run",
            nearest="eval_every=100",
            depends_on=["eval_every"],
        )
    ]


def reason(
    options: EarlyStopOptions, found: dict[int, float], step: int, values: Mapping[str, float], *, higher: bool
) -> str:
    """Returns why a run stops after an evaluation at a step; '' where it goes on.

    Args:
      options: patience and metric.
      found: step -> value of the metric, of all evaluations before; gets that of this one.
      step: of the evaluation.
      values: its metrics, the same in all processes; what is not finite is no best one.
      higher: whether a larger value is a better one.
    """
    if not options.patience:
        return ""
    found[step] = values[options.metric]
    rated = {one: -value if higher else value for one, value in found.items() if math.isfinite(value)}
    best = min(rated, key=lambda one: (rated[one], one), default=0)
    num_since = sum(one > best for one in found)
    if num_since < options.patience:
        return ""
    of_best = f"{found[best]:.6g} at step {best}" if rated else "nothing finite"
    return f"early stop at step {step}: {options.metric} is not better than {of_best} in {num_since} evaluations"
