"""Rates of a run: units (tokens, images, ...) and model FLOPs per second, MFU; and a warning about uneven experts."""

import dataclasses
from collections.abc import Mapping

from meshtrain.observe.step_times import StepClock

NUM_UNEVEN = 100  # steps of uneven load after which the warning is printed


@dataclasses.dataclass(frozen=True)
class Throughput:
    """The constants that convert seconds per step to rates.

    Attributes:
      unit: the name of the counted unit: tokens, images, ...
      units_per_step: the number of units in a global batch, including padding.
      flops_per_unit: the model FLOPs for one unit, 0 if unknown.
      num_devices: the number of devices in the mesh.
      peak_flops_per_second: the peak of one device in the compute dtype, None if unknown.
    """

    unit: str
    units_per_step: int
    flops_per_unit: float
    num_devices: int
    peak_flops_per_second: float | None

    def since_last_row(self, step: int, clock: StepClock) -> dict[str, float | None]:
        """Returns metrics for a row: the number of units up to a step, and averages and rates since the previous row.

        `mfu` (0 to 1, None if the peak is unknown) is the useful FLOP/s of all devices divided by their peak. Chowdhery
        et al. 2022 (PaLM), appendix B, defines it as the observed tokens per second divided by the rate at peak FLOP/s,
        which is the same ratio.

        Args:
          step: number of the completed step.
          clock: the clock that timed the steps; its averages start again after this call.
        """
        averages = clock.averages(self.units_per_step, self.unit)
        values: dict[str, float | None] = {self.unit: step * self.units_per_step, **averages}
        rate, peak = f"{self.unit}_per_second", self.peak_flops_per_second
        if rate in averages and self.flops_per_unit:
            flops = self.flops_per_unit * averages[rate]
            values["model_flops_per_second"] = flops
            values["mfu"] = None if peak is None else flops / (self.num_devices * peak)
        return values


@dataclasses.dataclass
class Uneven:
    """Warns once if the load of experts was uneven for a long time.

    If a device has many more tokens than under an even load, it processes them in several parts, one after the other.
    So steps take longer.

    Attributes:
      metric: the name of the metric with the number of these parts; 1 under an even load.
      since: the first logged step of the current period with several parts; None: the last logged step had one part.
    """

    metric: str
    since: int | None = None
    _has_said: bool = False

    def line(self, step: int, values: Mapping[str, float | None]) -> str:
        """Returns the warning to print after the row of a logged step, or ''.

        The warning is returned once, when the load has been uneven for `NUM_UNEVEN` steps.

        Args:
          step: the number of the logged step.
          values: metric name -> value, the row of this step.
        """
        parts = values[self.metric] if self.metric in values else None
        if parts is None or parts <= 1:
            self.since = None
            return ""
        self.since = step if self.since is None else self.since
        if self._has_said or step - self.since < NUM_UNEVEN:
            return ""
        self._has_said = True
        return (
            f"{self.metric} is {parts:.0f} and has been above 1 since step {self.since}: a device has many more "
            "tokens than under an even load of experts, so steps take longer; a larger model.moe.balance_weight or "
            "optimizer.balance_rate balances the load"
        )
