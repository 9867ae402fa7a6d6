"""Rates of a run: units (tokens, images, ...) a second, model FLOPs a second, MFU; and what lowers them for long."""

import dataclasses
from collections.abc import Mapping

from meshtrain.observe.step_times import StepClock

NUM_UNEVEN = 100  # steps in which experts have more than their part


@dataclasses.dataclass(frozen=True)
class Throughput:
    """The constants that turn seconds a step into rates.

    Attributes:
      unit: what is counted: tokens, images, ...
      units_per_step: units in a global batch, padding included.
      flops_per_unit: model FLOPs for one unit, 0 where unknown.
      num_devices: devices in the mesh.
      peak_flops_per_second: of one device in the compute dtype, None where unknown.
    """

    unit: str
    units_per_step: int
    flops_per_unit: float
    num_devices: int
    peak_flops_per_second: float | None

    def since_last_row(self, step: int, clock: StepClock) -> dict[str, float | None]:
        """Returns the units up to a step, and the clock's averages and rates since the row before.

        `mfu` (0 to 1, None where no peak is known) is the useful work of all devices over their peak. Chowdhery et al.
        2022 (PaLM), appendix B, defines it as observed tokens per second over those at peak FLOP/s: the same ratio.

        Args:
          step: number of the completed step.
          clock: has timed the steps; its averages start again after this call.
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
    """Says once that devices have computed more than one part of their experts' rows at all logged steps for long.

    Attributes:
      metric: the number of parts, in a row of metrics.
      since: the first logged step of them; None: the last one had one part.
    """

    metric: str
    since: int | None = None
    _has_said: bool = False

    def line(self, step: int, values: Mapping[str, float | None]) -> str:
        """Returns what to print after the row of a logged step; mostly an empty text."""
        parts = values[self.metric] if self.metric in values else None
        if parts is None or parts <= 1:
            self.since = None
            return ""
        self.since = step if self.since is None else self.since
        if self._has_said or step - self.since < NUM_UNEVEN:
            return ""
        self._has_said = True
        return (
            f"{self.metric} is {parts:.0f} and has been above 1 since step {self.since}: a device has many more tokens "
            "than an even load of experts, and steps take longer; a larger model.balance_weight or "
            "optimizer.balance_rate evens it out"
        )
