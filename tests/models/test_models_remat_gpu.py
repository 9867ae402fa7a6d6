"""Which attention kernels the GPU compiler leaves in the backward pass: `scripts/test --plan` runs this."""

import collections

import jax
import pytest

from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

pytestmark = pytest.mark.gpu_compiler

NUM_LAYERS = 4


def num_kernels(options, **model):
    """(forward, backward) runs of cuDNN's attention in a step; with a condition, those of both branches."""
    config = Config(
        batch_size=8,
        sequence_length=512,
        model=DecoderOptions(
            num_layers=NUM_LAYERS,
            embed_dim=512,
            num_heads=4,
            num_kv_heads=4,
            vocab_size=257,
            within_documents=False,
            **model,
        ),
        precision=PrecisionOptions("bfloat16"),
        remat=options,
    )
    compiled = compile_step(config, dict.fromkeys(AXES, 1) | {"fsdp": 8}, open_cluster("h100:1x8"))
    assert compiled.attention == "cudnn"
    program, runs = parse.read(compiled.text), collections.Counter()
    for name, body in program.computations.items():
        for line in body:
            if flops.attention_kernel(line):
                runs["Backward" in flops.TARGET.search(line.rest)[1]] += program.num_runs[name]
    return runs[False], runs[True]


@pytest.mark.parametrize(
    "options, num_again",
    [
        (RematOptions("none"), 0),
        (RematOptions("full"), NUM_LAYERS),
        (RematOptions("full", every=2), NUM_LAYERS // 2),
        (RematOptions("save_attention"), 0),
        (RematOptions("dots"), NUM_LAYERS),
    ],
    ids=str,
)
def test_saved_attention_does_not_run_again(options, num_again):
    assert num_kernels(options) == (NUM_LAYERS + num_again, NUM_LAYERS)


@pytest.fixture
def flag():
    """JAX's other implementation of `jax.checkpoint` is on."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    jax.clear_caches()
    yield
    jax.config.update("jax_remat3", before)
    jax.clear_caches()


@pytest.mark.parametrize("policy", ["save_attention", "none"])
def test_the_flag_of_jax_runs_no_kernel_again(flag, policy):
    assert num_kernels(RematOptions(policy)) == (NUM_LAYERS, NUM_LAYERS)


def test_saved_attention_of_alternating_windows_does_not_run_again():
    each = 2 * NUM_LAYERS
    assert num_kernels(RematOptions("save_attention"), window=64, global_every=2) == (each, each)
