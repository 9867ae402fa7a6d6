"""Temporary memory of the compiled step on eight devices, as microbatches of one size become more."""

import jax
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.rules import AXES

SEQUENCES_PER_DEVICE, NUM_DATA, SEQUENCE_LENGTH = 2, 2, 32
MODEL = DecoderOptions(num_layers=8, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=4, vocab_size=128)
MESH = dict.fromkeys(AXES, 1) | {"data": NUM_DATA, "pipeline": 4}
# What a stage keeps of a microbatch for each of its two layers, and for the head, in float32.
LAYER_INPUT_BYTES = 4 * SEQUENCES_PER_DEVICE * SEQUENCE_LENGTH * MODEL.embed_dim


def temporary_bytes(schedule, num_microbatches, num_chunks=1, policy="none"):
    config = Config(
        batch_size=SEQUENCES_PER_DEVICE * NUM_DATA * num_microbatches,
        sequence_length=SEQUENCE_LENGTH,
        model=MODEL,
        remat=RematOptions(policy),
        pipeline=PipelineOptions(schedule=schedule, num_microbatches=num_microbatches, num_chunks=num_chunks),
    )
    assembly = assemble(config, MESH, jax.devices())
    compiled = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("schedule, num_chunks, policy", [("1f1b", 1, "none"), ("interleaved_1f1b", 2, "full")])
def test_memory_is_the_same_at_8_and_128_microbatches(schedule, num_chunks, policy):
    few, many = (temporary_bytes(schedule, number, num_chunks, policy) for number in (8, 128))
    assert many == pytest.approx(few, rel=0.01)


@pytest.mark.slow
def test_gpipe_grows_by_what_a_microbatch_keeps():
    few, more, many = (temporary_bytes("gpipe", number, policy="full") for number in (8, 32, 128))
    for growth, added in ((more - few, 24), (many - more, 96)):
        assert growth / added == pytest.approx(3 * LAYER_INPUT_BYTES, rel=0.01)


def test_memory_of_1f1b_does_not_grow():
    """A quarter of the way of the slow test above."""
    assert temporary_bytes("1f1b", 32) == pytest.approx(temporary_bytes("1f1b", 8), rel=0.01)
