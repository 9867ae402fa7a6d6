"""Rates of a run: units (tokens, images, ...) a second, model FLOPs a second, and MFU."""

import dataclasses

from meshtrain.observe.step_times import StepClock, mfu, model_flops_per_second


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

        Args:
          step: number of the completed step.
          clock: has timed the steps; its averages start again after this call.
        """
        values: dict[str, float | None] = {self.unit: step * self.units_per_step}
        values |= clock.averages(self.units_per_step, self.unit)
        name = f"{self.unit}_per_second"
        if name in values and self.flops_per_unit:
            rate = values[name]
            assert rate is not None
            flops = model_flops_per_second(self.flops_per_unit, rate)
            values["model_flops_per_second"] = flops
            values["mfu"] = mfu(flops, self.num_devices, self.peak_flops_per_second)
        return values
