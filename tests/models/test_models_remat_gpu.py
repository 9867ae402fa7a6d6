"""Which attention kernels the GPU compiler leaves in the backward pass: `scripts/test --plan` runs this."""

import collections

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


def num_kernels(options):
    """(forward, backward) runs of cuDNN's attention in a step."""
    config = Config(
        batch_size=8,
        sequence_length=512,
        model=DecoderOptions(
            num_layers=NUM_LAYERS, embed_dim=512, num_heads=4, num_kv_heads=4, vocab_size=257, within_documents=False
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
