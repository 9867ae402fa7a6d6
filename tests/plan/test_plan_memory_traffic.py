"""Bytes that operations move: of arrays that they slice, the slice."""

import pytest

from meshtrain.plan.cost import memory
from meshtrain.plan.hlo import memory_traffic, parse
from meshtrain.plan.timing import streams
from tests.plan import recorded
from tests.plan.conftest import H100

SPEED = H100.memory_bytes_per_second * streams.Assumptions().memory_efficiency


def seconds(text):
    return streams.Streams(parse.read(text), H100, {}, streams.Assumptions(launch_seconds=0.0)).step()[0]


def test_a_slice_of_a_large_array_moves_the_slice():
    text = recorded.entry(
        "%w = f32[1024,1024]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%dynamic-slice = f32[1,1024]{1,0} dynamic-slice(%w, %i, %i), dynamic_slice_sizes={1,1024}",
    )
    assert seconds(text) == pytest.approx(2 * 4096 / SPEED)


STACK = "f32[4,65536]{1,0}"
SLICED = f"""\
%sliced (p: f32[], i: s32[]) -> f32[] {{
  %stack = {STACK} parameter(0)
  %index = s32[] parameter(1)
  ROOT %slice = f32[1,65536]{{1,0}} dynamic-slice(%stack, %index, %index), dynamic_slice_sizes={{1,65536}}
}}
"""


@pytest.mark.parametrize(
    "lines",
    [
        ("%layer = f32[1,65536]{1,0} fusion(%p, %i), kind=kLoop, calls=%sliced",),
        (
            f"%layer = (({STACK}, s32[]), f32[1,65536]{{1,0}}, u32[]) fusion-start(%p, %i), kind=kLoop, calls=%sliced",
            "%done = f32[1,65536]{1,0} fusion-done(%layer)",
        ),
    ],
    ids=["fusion", "fusion-start"],
)
def test_a_fusion_that_slices_moves_the_slice_however_it_is_started(lines):
    text = recorded.entry(f"%p = {STACK} parameter(0)", "%i = s32[] parameter(1)", *lines, before=SLICED)
    assert seconds(text) == pytest.approx((2 * 4 * 65536 + 4) / SPEED)  # and the index
    # What happens inside of it makes no array.
    assert "slice" not in [buffer.name for buffer in memory.largest_buffers(parse.read(text))]


def test_a_slice_behind_a_bitcast_moves_the_slice():
    """As a fusion of GPUs reads one layer of a stack; what is read otherwise as well is read whole."""
    lines = (
        "%p = f32[4,256,256]{2,1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%bitcast = f32[4,65536]{1,0} bitcast(%p)",
        "%slice = f32[1,65536]{1,0} dynamic-slice(%bitcast, %i, %i), dynamic_slice_sizes={1,65536}",
    )
    line = "%fusion = f32[1,65536]{1,0} fusion(%p, %i), kind=kLoop, calls=%fused"

    def bytes_of(*body):
        fused = "%fused (p: f32[]) -> f32[] {\n" + "".join(f"  {one}\n" for one in body) + "}\n"
        program = parse.read(recorded.entry(*lines[:2], line, before=fused))
        [fusion] = [one for one, _, _ in program.instructions("fusion")]
        return memory_traffic.bytes_moved(fusion, program.computations["fused"], {})

    layer = 4 * 65536
    assert bytes_of(*lines, "ROOT %copy = f32[1,65536]{1,0} negate(%slice)") == 2 * layer + 4  # the index
    whole = "%sum = f32[4]{0} reduce(%bitcast, %i), dimensions={1}, to_apply=%add"
    assert bytes_of(*lines, whole, "ROOT %t = (f32[1,65536]{1,0}, f32[4]{0}) tuple(%slice, %sum)") > 4 * layer


def test_a_kernel_of_experts_moves_one_layer_of_a_stack():
    def bytes_of(weights):
        text = recorded.entry(
            "%owners = s32[8]{0} parameter(0)",
            "%rows = bf16[1024,256]{1,0} parameter(1)",
            f"%weights = bf16[{weights}] parameter(2)",
            "%call = bf16[1024,128]{1,0} custom-call(%owners, %rows, %weights), "
            'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/times_of_blocks/pallas_call"}',
        )
        program = parse.read(text)
        [(call, where, _)] = program.instructions("custom-call")
        shapes = {line.name: line.shape for line in program.computations[where]}
        return memory_traffic.bytes_moved(call, [call], shapes)

    assert bytes_of("12,4,256,128") == bytes_of("4,256,128") == 4 * 8 + 2 * (1024 * (256 + 128) + 4 * 256 * 128)


@pytest.mark.parametrize("last", ["convert", "bitcast"])
def test_a_fusion_writes_the_dtype_of_its_result(last):
    """The gradient of logits is computed in float32 and written in bfloat16."""
    result = "bf16[1024]{0}" if last == "convert" else "f32[1024]{0}"
    fused = (
        "%fused (p: bf16[1024]) -> bf16[1024] {\n"
        "  %p = bf16[1024]{0} parameter(0)\n"
        "  %wide = f32[1024]{0} convert(%p)\n"
        "  %squares = f32[1024]{0} multiply(%wide, %wide)\n"
        f"  ROOT %result = {result} {last}(%squares)\n"
        "}\n"
    )
    program = parse.read(
        recorded.entry("%x = bf16[1024]{0} parameter(0)", f"%y = {result} fusion(%x), calls=%fused", before=fused)
    )
    [fusion] = [one for one, _, _ in program.instructions("fusion")]
    moved = memory_traffic.bytes_moved(fusion, program.computations["fused"], {})
    assert moved == 2 * 1024 + (2 if last == "convert" else 4) * 1024
