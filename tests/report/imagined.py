"""Steps that are imagined rather than compiled: their programs are written here, for any mesh of data and fsdp."""

import math

from meshtrain.plan.hlo import parse
from meshtrain.plan.timing.streams import timing
from meshtrain.report.scaling.efficiency import Row, spent
from meshtrain.sharding.mesh import make_mesh
from tests.plan import recorded

PRODUCT = "%dot.{0} = f32[{1},4096]{{1,0}} dot(%a.{0}, %w.{0}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
LOOP = """\
%body (p: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %p = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %a.1 = f32[{rows},4096]{{1,0}} constant({{...}})
  %w.1 = f32[4096,4096]{{1,0}} constant({{...}})
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64,64]{{1,0}} get-tuple-element(%p), index=1
  {product}
  {gather}
  ROOT %t = (s32[], f32[64,64]{{1,0}}) tuple(%i, %x)
}}

%condition (p.1: (s32[], f32[64,64])) -> pred[] {{
  %p.1 = (s32[], f32[64,64]{{1,0}}) parameter(0)
  ROOT %true = pred[] constant(true)
}}
"""


def text(shape, microbatch, num_microbatches):
    """A step: microbatches that multiply and gather over fsdp, and then a sum over data."""
    data, fsdp = shape["data"], shape["fsdp"]
    gather = ""
    if fsdp > 1:
        gather = (
            f"%all-gather = f32[{512 * fsdp // fsdp},4096]{{1,0}} all-gather(%w.1), "
            f"replica_groups=[{data},{fsdp}]<=[{data * fsdp}], dimensions={{0}}"
        )
    loop = LOOP.format(rows=64 * microbatch, product=PRODUCT.format(1, 64 * microbatch), gather=gather)
    lines = [
        "%q = (s32[], f32[64,64]{1,0}) parameter(0)",
        "%g = f32[2048,4096]{1,0} parameter(1)",
        "%while.1 = (s32[], f32[64,64]{1,0}) while(%q), condition=%condition, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{num_microbatches}"}}}}',
    ]
    if data > 1:
        groups = f"replica_groups=[{fsdp},{data}]<=[{data},{fsdp}]T(1,0)"
        lines.append(f"%all-reduce = f32[2048,4096]{{1,0}} all-reduce(%g), {groups}, to_apply=%sum")
    return recorded.entry(*lines, before=recorded.SUM + "\n" + loop)


def row(point, cluster, assumptions):
    """A point as if it had been planned."""
    assert math.prod(point.shape.values()) == point.num_devices == len(cluster.devices)
    program = parse.read(text(point.shape, point.microbatch, point.num_microbatches))
    mesh = make_mesh(point.shape, cluster.devices)
    seconds = timing(mesh, cluster, program, assumptions)
    return Row(point, "", seconds, spent(program, mesh, cluster, assumptions, 0.0), 2**20, fits=True)
