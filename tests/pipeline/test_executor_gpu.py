"""The step as the GPU compiler makes it for eight H100s that are not there: `scripts/test --plan` runs these.

D: embed dim, F: mlp dim, N: query heads, K: key and value heads, H: head dim, T: tokens a sequence.
"""

import functools
import pathlib
import runpy

import jax
import pytest

from meshtrain.assemble import assemble
from meshtrain.config import Config
from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import flops, hlo, topology
from meshtrain.step.precision import PrecisionOptions

pytestmark = pytest.mark.gpu_compiler

HERE = pathlib.Path(__file__).parent
NUM_STAGES, NUM_MICROBATCHES = 8, 32
# Shorter than the configuration's 8,192: no fused attention is compiled here, and with whole matrices of
# probabilities the step would not fit, upon which the compiler recomputes as it likes.
SEQUENCE_LENGTH = 2048


@functools.cache
def model():
    given = runpy.run_path(str(HERE.parents[1] / "configs" / "llama3_8b.py"))["get_config"]()
    return DecoderOptions(**given.model.to_dict())


@functools.cache
def compiled(schedule, num_microbatches=NUM_MICROBATCHES, num_chunks=1):
    """Returns (temporary bytes, the program that was read)."""
    assembly = assembled(schedule, num_microbatches, num_chunks)
    step = assembly.train_step.trace(assembly.state, assembly.batch).lower(lowering_platforms=("cuda",)).compile()
    return step.memory_analysis().temp_size_in_bytes, hlo.read(step.as_text())


def assembled(schedule, num_microbatches, num_chunks):
    config = Config(
        batch_size=num_microbatches,
        sequence_length=SEQUENCE_LENGTH,
        model=model(),
        pipeline=PipelineOptions(schedule=schedule, num_microbatches=num_microbatches, num_chunks=num_chunks),
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("full"),
    )
    devices = topology.open_cluster("h100:1x8").devices
    return assemble(config, {"data": 1, "pipeline": NUM_STAGES, "fsdp": 1, "tensor": 1}, devices)


def one_device_flops():
    """Matrix products of the same batch on one device: a layer four forwards' worth (`full`), the head three.

    Attention is counted as it is computed, without leaving out what causality masks.
    """
    options, tokens = model(), SEQUENCE_LENGTH
    heads, kv_heads, width = options.num_heads, options.num_kv_heads, options.width_of_head
    projections = options.embed_dim * width * (2 * heads + 2 * kv_heads) + 3 * options.embed_dim * options.mlp_dim
    layer = 2 * tokens * projections + 4 * tokens**2 * heads * width
    head = 2 * tokens * options.embed_dim * options.padded_vocab_size
    return NUM_MICROBATCHES * (4 * options.num_layers * layer + 3 * head)


def accumulators():
    """(dtype, dims) of each array of gradients that one stage adds up."""
    params = assembled("1f1b", NUM_MICROBATCHES, 1).state.params
    return {("f32", leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params)}


def test_work_is_an_eighth_of_one_device_s_and_the_bubble():
    _, program = compiled("1f1b")
    rounds = (NUM_MICROBATCHES + NUM_STAGES - 1) / NUM_MICROBATCHES
    share = flops.matmul_flops(program).total / (one_device_flops() / NUM_STAGES)
    assert 0.95 * rounds < share <= 1.05 * rounds


def test_no_gradient_accumulator_is_copied_in_a_loop():
    _, program = compiled("1f1b")
    assert hlo.copies_in_loops(program, accumulators()) == []


def test_two_transfers_for_a_forward_and_a_backward_row():
    _, program = compiled("1f1b")
    num_pairs = NUM_MICROBATCHES + NUM_STAGES - 1
    assert hlo.num_transfers(program, "collective-permute") == 2 * num_pairs


@pytest.mark.slow
@pytest.mark.parametrize("schedule, num_chunks", [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_memory_is_the_same_at_8_32_and_128_microbatches(schedule, num_chunks):
    few, more, many = (compiled(schedule, number, num_chunks)[0] for number in (8, 32, 128))
    assert more == pytest.approx(few, rel=0.01)
    assert many == pytest.approx(few, rel=0.01)
