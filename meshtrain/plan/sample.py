"""One compiled point of a scaling: its program, and what prices it for other numbers of devices."""

import dataclasses
from collections.abc import Sequence

from meshtrain.plan.collectives import Collective, collectives
from meshtrain.plan.compile import Compiled, compile_step, program_of
from meshtrain.plan.hlo import Program
from meshtrain.plan.minimum import idle_share
from meshtrain.plan.topology import Cluster
from meshtrain.plan.waiting import waiting_for
from meshtrain.plan.ways import Point


@dataclasses.dataclass(frozen=True)
class Sample:
    """A compiled point.

    Attributes:
      point: what was compiled.
      program: its scheduled program; None if the compiler gave up for lack of memory.
      found: its collectives, on the mesh it was compiled for.
      idle_share: share of a pipeline's rows in which a stage idles.
      peak_bytes: of a device, by the compiler; 0 without a program.
      refusal: the compiler's message if there is no program.
    """

    point: Point
    program: Program | None
    found: Sequence[Collective]
    idle_share: float
    peak_bytes: int
    refusal: str = ""


def sample_of(point: Point, compiled: Compiled) -> Sample:
    """Returns a sample of a step that was compiled for a point."""
    program = program_of(compiled)
    return Sample(
        point=point,
        program=program,
        found=collectives(program, point.shape) if program else (),
        idle_share=idle_share(compiled.assembly),
        peak_bytes=compiled.statistics.peak_bytes if compiled.statistics else 0,
        refusal=compiled.refusal.strip().partition("\n")[0],
    )


def compile_point(point: Point, cluster: Cluster) -> Sample:
    """Compiles a point, while the terminal shows the seconds.

    Raises:
      UserError: what `assemble` refuses.
    """
    assert point.config is not None
    config, what = point.config, f"{point.way.name} on {point.num_devices:,} devices"
    return sample_of(point, waiting_for(what, lambda: compile_step(config, point.shape, cluster)))
