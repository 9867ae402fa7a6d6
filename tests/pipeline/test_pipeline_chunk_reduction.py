"""Gradients of a chunk are reduced over data after the chunk's last backward row, and beside the rows that follow."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import parse
from meshtrain.hardware.compiler_options import CHUNK_GPU_OPTIONS
from meshtrain.pipeline import executor, stages
from meshtrain.pipeline.program import LEAST_HIDDEN, Segment, chunk_ends, executable, segments, worth_reducing_early
from meshtrain.pipeline.schedules import build
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.parse import read
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.mesh import mesh_shape, num_needed
from meshtrain.sharding.param_sharding import ParamSharding
from meshtrain.sharding.rules import DATA, PIPELINE
from tests.golden.test_golden_placements import ROOT, AbsentDevice
from tests.pipeline import test_pipeline_executor as toy
from tests.pipeline.test_pipeline_program import CASES, program_of, show

NUM_STAGES, NUM_CHUNKS, NUM_MICROBATCHES = 2, 3, 4
NUM_LAYERS = 2 * NUM_STAGES * NUM_CHUNKS
FLOAT32_BYTES = 4


def reducing(program):
    return dataclasses.replace(program, reduces_chunks=True)


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
    order, row = chunk_ends(program), 0
    begun = []
    for event in events(segments(reducing(program))):
        row += event == "row"
        begun += [row] * (event == "begin")
    assert row == len(program.kinds)
    assert sorted(chunk for _, chunk in order) == list(range(case[3]))
    for (last, chunk), first_without in zip(order, begun, strict=True):
        works = program.cells.active & (program.cells.chunk == chunk) & (np.array(program.kinds) == "B")[:, None]
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
    found = [f"R{show(part)}" for part in segments(reducing(program_of(*case))) if part.reduces]
    assert " ".join(found) == expected


SHARE = {"is hidden": 1.01 * LEAST_HIDDEN, "is not hidden": 0.99 * LEAST_HIDDEN}


@pytest.mark.parametrize(
    "case, hides", [(("interleaved_1f1b", 4, 8, 2), 1 / 2), (("interleaved_1f1b", 8, 24, 6), 5 / 6)]
)
def test_chunks_are_reduced_early_where_that_hides_enough_of_a_step(case, hides):
    program = program_of(*case)
    assert worth_reducing_early(program, 10 * SHARE["is hidden"] / hides, 10.0)
    assert not worth_reducing_early(program, 10 * SHARE["is not hidden"] / hides, 10.0)


@pytest.mark.parametrize("case", [("1f1b", 4, 16), ("interleaved_1f1b", 1, 3, 2)])
def test_where_no_loop_of_rows_follows_a_chunk_nothing_is_reduced_early(case):
    """One chunk is the last one; on one stage a single row follows."""
    assert not worth_reducing_early(program_of(*case), 1e9, 1.0)


@pytest.mark.parametrize(
    "name, kind, is_early",
    [
        ("gpt3_175b", "NVIDIA A100-SXM4-80GB", True),
        ("mtnlg_530b", "NVIDIA A100-SXM4-80GB", False),
        ("llama3_405b", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_which_of_the_large_configurations_reduce_early(name, kind, is_early):
    found = []
    config, _ = parse([f"--config={ROOT / 'configs' / name}.py"], reads_data=False)
    shape = mesh_shape(config.mesh, num_needed(config.mesh), simulated=True)
    for one in (kind, "absent"):  # as a CPU, whose peak is not known
        devices = [AbsentDevice(i, device_kind=one) for i in range(num_needed(config.mesh))]
        found.append(assemble(config, shape, devices).placed.program.reduces_chunks)
    assert found == [is_early, is_early]


@pytest.mark.parametrize("expert", [1, 2])
def test_options_for_collectives_beside_rows_go_with_experts_in_pipelines_too(expert):
    sizes = {"mesh.pipeline": 2, "mesh.expert": expert, "model.moe.num_experts": 4, "batch_size": 8}
    config, _ = parse([f"--config.{name}={size}" for name, size in sizes.items()], reads_data=False)
    devices = [AbsentDevice(i, device_kind="NVIDIA H100 80GB HBM3") for i in range(2 * expert)]
    assembly = assemble(config, mesh_shape(config.mesh, 2 * expert, simulated=True), devices)
    assert not assembly.placed.program.reduces_chunks
    given = {option.name for option in assembly.steps.compiling.options} & {option.name for option in CHUNK_GPU_OPTIONS}
    assert len(given) == (len(CHUNK_GPU_OPTIONS) if expert > 1 else 0)


@functools.cache
def compiled(level, reduces_chunks=True):
    """The toy model on two replicas of two stages, three chunks each: (compiled step, parameters as it takes them)."""
    params = toy.parameters(NUM_LAYERS)
    params["layers"] = stages.Stack(NUM_LAYERS, NUM_STAGES, NUM_CHUNKS).of_layers(params["layers"])
    over_stages = PartitionSpec(None, PIPELINE)
    specs = {"table": PartitionSpec(PIPELINE), "layers": over_stages, "head": PartitionSpec(None, PIPELINE)}
    stored = {
        name: jax.tree.map(lambda x, name=name: ParamSharding.same(specs[name], x.ndim), params[name]) for name in specs
    }
    if level:
        kernel = PartitionSpec(None, PIPELINE, None, DATA)
        stored["layers"]["kernel"] = ParamSharding(over_stages, over_stages, kernel, 4, -1)
    schedule = build(
        "interleaved_1f1b", num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, num_chunks=NUM_CHUNKS
    )
    replicas = GradientSync(toy.mesh_of(NUM_STAGES, 2), stored, level)
    program = dataclasses.replace(executable(schedule), reduces_chunks=reduces_chunks)
    compute = functools.partial(executor.gradients, toy.model(NUM_LAYERS), program, replicas)
    arguments = params, toy.batch_of(NUM_MICROBATCHES), jax.random.key(3)
    return jax.jit(compute).lower(*arguments).compile(), arguments


@pytest.mark.parametrize("level, reduces_chunks", [(0, True), (1, True), (1, False)])
def test_sums_are_those_of_one_device(level, reduces_chunks):
    step, arguments = compiled(level, reduces_chunks)
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
