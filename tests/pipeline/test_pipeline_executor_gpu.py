"""The step as the GPU compiler makes it for eight H100s that are not there: `scripts/test --plan` runs these.

D: embed dim, F: mlp dim, N: query heads, K: key and value heads, H: head dim, T: tokens a sequence.
"""

import dataclasses
import functools
import pathlib
import re
import runpy

import jax
import pytest

from meshtrain.config.resolve import resolve
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import text_report
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cluster import compile as compiling
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.rules import AXES, LayoutOptions
from meshtrain.step.precision import PrecisionOptions
from tests.plan import counted
from tests.plan.conftest import config as small
from tests.plan.conftest import planned

pytestmark = pytest.mark.gpu_compiler

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "llama3_8b.py"
NUM_STAGES, NUM_MICROBATCHES = 8, 32
# Of attention's products, each T x T x H a head: forward q k and p v; backward q k again, and four for the gradients.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@functools.cache
def config(schedule="1f1b", num_microbatches=NUM_MICROBATCHES, num_chunks=1, num_stages=NUM_STAGES):
    """Returns the 8B configuration with its layers over stages, a sequence a microbatch; tensor takes what is left."""
    given = resolve(runpy.run_path(str(CONFIG))["get_config"](), reads_data=False)
    return dataclasses.replace(
        given,
        mesh=MeshOptions(data=1, pipeline=num_stages, fsdp=1, tensor=8 // num_stages),
        batch_size=num_microbatches,
        accumulation_steps=1,
        pipeline=PipelineOptions(schedule=schedule, num_microbatches=num_microbatches, num_chunks=num_chunks),
    )


@functools.cache
def compiled(*chosen):
    """Returns the compiled step and the program that was read."""
    given = config(*chosen)
    shape = {axis: getattr(given.mesh, axis) for axis in AXES}
    step = compiling.compile_step(given, shape, clusters.open_cluster("h100:1x8"))
    return step, parse.read(step.text)


def one_device_flops():
    """Matrix products of the same batch on one device: a layer forward twice and backward (`full`), the head once.

    A layer's last product does not run again. Attention as if causality left nothing out.
    """
    options, tokens = config().model, config().sequence_length
    heads, kv_heads, width = options.num_heads, options.num_kv_heads, options.width_of_head
    projections = options.embed_dim * width * (2 * heads + 2 * kv_heads) + 3 * options.embed_dim * options.mlp_dim
    attention = 2 * tokens**2 * heads * width * (2 * FORWARD_PRODUCTS + BACKWARD_PRODUCTS)
    layer = 2 * tokens * (4 * projections - options.embed_dim * options.mlp_dim) + attention
    head = 3 * 2 * tokens * options.embed_dim * options.padded_vocab_size
    return NUM_MICROBATCHES * (options.num_layers * layer + head)


def accumulators():
    """(dtype, dims) of each array of gradients that one stage adds up: as it is stored, and as units of one layer."""
    params = compiled()[0].assembly.state.params
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)]
    return {("f32", shape) for dims in shapes for shape in (dims, (dims[0], 1, *dims[1:]))}


def test_work_is_an_eighth_of_one_device_s_and_the_bubble():
    _, program = compiled()
    rounds = (NUM_MICROBATCHES + NUM_STAGES - 1) / NUM_MICROBATCHES
    work = flops.matmul_flops(program)
    share = (work.products + work.attention_full) / (one_device_flops() / NUM_STAGES)
    assert 0.95 * rounds < share <= 1.05 * rounds


def test_no_gradient_accumulator_is_copied_in_a_loop():
    _, program = compiled()
    assert counted.copies_in_loops(program, accumulators()) == []


def test_two_transfers_for_a_forward_and_a_backward_row():
    _, program = compiled()
    num_pairs = NUM_MICROBATCHES + NUM_STAGES - 1
    assert counted.num_transfers(program, "collective-permute") == 2 * num_pairs


@pytest.mark.slow
@pytest.mark.parametrize("schedule, num_chunks", [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_memory_is_the_same_at_8_and_128_microbatches(schedule, num_chunks):
    """On four stages: the first has seven microbatches in flight, and eight are enough for that."""
    few, many = (compiled(schedule, number, num_chunks, 4)[0].statistics.temporary_bytes for number in (8, 128))
    assert many == pytest.approx(few, rel=0.01)


@pytest.mark.slow
def test_eight_stages_keep_their_layers_inputs_of_a_microbatch_in_flight_and_nothing_else():
    """15 are in flight on the first stage once there are so many; with 9 microbatches there are 9.

    With 8 no row would embed one beside a head, which takes some room of its own.
    """
    few, many = (compiled("1f1b", number)[0].statistics.temporary_bytes for number in (9, NUM_MICROBATCHES))
    inputs = 2 * config().sequence_length * config().model.embed_dim * config().model.num_layers // NUM_STAGES
    assert many - few == pytest.approx((15 - 9) * inputs, rel=0.05)


def in_rows(**sizes):
    """Returns the plan of as many microbatches as stages, a layer a chunk: loops of forward, then of backward rows."""
    model = dataclasses.replace(small().model, num_layers=6, embed_dim=512, mlp_dim=1024, vocab_multiple=8)
    given = small(
        {"pipeline": 2, **sizes},
        model=model,
        batch_size=2 * sizes.get("data", 1),
        sequence_length=1024,
        layout=LayoutOptions(sequence_parallel=True),
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("save_attention"),
        pipeline=PipelineOptions("interleaved_1f1b", num_microbatches=2, num_chunks=3),
    )
    return planned("h100:1x8", given)


def test_rows_that_work_send_the_least_along_tensor():
    """What is computed again must not be scattered again for a gather that the compiler moves; rows without an
    embedding must not scatter one.
    """
    assert text_report.working_ratios(in_rows(tensor=4))["tensor"] == pytest.approx(1, abs=0.01)


def test_where_chunks_are_reduced_a_cotangent_is_sent_while_gradients_are_added():
    """Those of a chunk's weights are added in float32 to sums [V, 1, ...]."""
    plan = in_rows(data=2, tensor=2)
    assert plan.compiled.assembly.placed.program.reduces_chunks
    program, beside = parse.read(plan.compiled.text), []
    for name, body in program.computations.items():
        adds = [i for i, line in enumerate(body) if re.match(r"f32\[3,1,\d+,", line.shape) and line.opcode == "fusion"]
        sent = [i for i, line in enumerate(body) if line.opcode.startswith("collective-permute-")]
        if program.num_runs[name] > 1 and len(adds) > 2:
            start, done = sent[-2:]
            beside.append(sum(start < one < done for one in adds) / len(adds))
    assert len(beside) > 1, "loops of backward rows, and of pairs"
    assert min(beside) == 1


def test_a_long_sequence_leaves_the_inputs_of_its_layers_alone():
    """131,072 tokens over eight devices, two stages: 163 GiB where a backward row holds what all its layers compute.

    A stage keeps an input of 128 MiB of each of its 16 layers for two microbatches. Rows without work write as much
    into a third slot: 6 GiB.
    """
    mesh = MeshOptions(data=1, pipeline=2, fsdp=4, context=8)
    given = dataclasses.replace(
        config("1f1b", 2, 1, mesh.pipeline), mesh=mesh, batch_size=2 * mesh.fsdp, sequence_length=131_072
    )
    step = compiling.compile_step(given, dataclasses.asdict(mesh), clusters.open_cluster("h100:8x8"))
    assert step.attention == "cudnn"
    assert step.statistics.peak_bytes < 15 * 2**30
