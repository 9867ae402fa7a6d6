"""Gradients of a chunk are reduced over data after the chunk's last backward row, and beside the rows that follow."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.pipeline import executor, stages
from meshtrain.pipeline.program import Segment, executable, finished, segments
from meshtrain.pipeline.schedules import build
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.parse import read
from meshtrain.sharding.gradients import Replicas
from meshtrain.sharding.rules import DATA, PIPELINE
from meshtrain.sharding.stored import Stored
from tests.pipeline import test_pipeline_executor as toy
from tests.pipeline.test_pipeline_program import CASES, program_of, show

NUM_STAGES, NUM_CHUNKS, NUM_MICROBATCHES = 2, 3, 4
NUM_LAYERS = 2 * NUM_STAGES * NUM_CHUNKS
FLOAT32_BYTES = 4


def events(parts):
    """The order of a program's rows and reductions: "row", or "begin" and "end" of a turn that reduces."""
    for part in parts:
        if not isinstance(part, Segment):
            yield "row"
            continue
        for _ in range(part.count):
            yield from ["begin"] * part.reduces
            yield from events(part.body)
            yield from ["end"] * part.reduces


@pytest.mark.parametrize("case", CASES)
def test_each_chunk_is_reduced_once_and_right_after_its_last_row(case):
    program = program_of(*case)
    order, row = finished(program), 0
    begun = []
    for event in events(segments(program, reduces=True)):
        row += event == "row"
        begun += [row] * (event == "begin")
    assert row == len(program.kinds)
    assert sorted(chunk for _, chunk in order) == list(range(case[3]))
    for (last, chunk), first_without in zip(order, begun, strict=True):
        works = program.active & (program.chunk == chunk) & (np.array(program.kinds) == "B")[:, None]
        assert works[:first_without].sum() == works.sum()
        assert works[last].any()
        assert first_without == last + 1


@pytest.mark.parametrize(
    "case, expected",
    [
        (("interleaved_1f1b", 8, 24, 6), "R((B)x8)x4 R((Bd)x8)x1 R()x1"),
        (("interleaved_1f1b", 4, 4, 2), "R((Bd)x4)x1 R()x1"),
        (("1f1b", 4, 16), "R()x1"),
    ],
)
def test_chunks_that_finish_equally_far_apart_share_a_loop(case, expected):
    found = [f"R{show(part)}" for part in segments(program_of(*case), reduces=True) if part.reduces]
    assert " ".join(found) == expected


@functools.cache
def compiled(level):
    """The toy model on two replicas of two stages, three chunks each: (compiled step, parameters as it takes them)."""
    params = toy.parameters(NUM_LAYERS)
    params["layers"] = stages.chunked(params["layers"], NUM_CHUNKS)
    over_stages = PartitionSpec(None, PIPELINE)
    specs = {"table": PartitionSpec(PIPELINE), "layers": over_stages, "head": PartitionSpec(None, PIPELINE)}
    stored = {
        name: jax.tree.map(lambda x, name=name: Stored.alike(specs[name], x.ndim), params[name]) for name in specs
    }
    if level:
        kernel = PartitionSpec(None, PIPELINE, None, DATA)
        stored["layers"]["kernel"] = Stored(over_stages, over_stages, kernel, 4, -1)
    schedule = build(
        "interleaved_1f1b", num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, num_chunks=NUM_CHUNKS
    )
    replicas = Replicas(toy.mesh_of(NUM_STAGES, 2), stored, level)
    compute = functools.partial(executor.gradients, toy.model(NUM_LAYERS), executable(schedule), replicas)
    arguments = params, toy.batch_of(NUM_MICROBATCHES), jax.random.key(3)
    return jax.jit(compute).lower(*arguments).compile(), arguments


@pytest.mark.parametrize("level", [0, 1])
def test_sums_are_those_of_one_device(level):
    step, arguments = compiled(level)
    sums = jax.device_get(step(*arguments))
    layers = jax.tree.map(lambda leaf: leaf.reshape(NUM_LAYERS, *leaf.shape[2:]), sums.gradients["layers"])
    expected = toy.reference(NUM_LAYERS, NUM_MICROBATCHES)
    np.testing.assert_allclose(sums.loss, expected.loss, rtol=toy.SCALAR_BOUND)
    toy.assert_gradients(toy.leaves({**sums.gradients, "layers": layers}), toy.leaves(expected.gradients))


def test_each_chunk_crosses_data_by_itself():
    """As many bytes as behind the last row, in a collective for each chunk: the compiler joins none of them."""
    step, _ = compiled(1)
    found = collectives(read(step.as_text()), toy.mesh_of(NUM_STAGES, 2).shape)
    of_kernels = [one.wire_bytes for one in found if one.kind == "reduce-scatter"]
    assert of_kernels == [toy.WIDTH**2 * 2 * FLOAT32_BYTES / 2] * NUM_CHUNKS
