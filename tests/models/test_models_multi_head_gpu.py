"""Attention with documents, compiled for GPUs without one: `scripts/test --plan` runs this."""

import pytest

from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions
from scripts.benchmarks import attention
from scripts.benchmarks.attention import compiled, temporary_bytes

pytestmark = pytest.mark.gpu_compiler


@pytest.mark.parametrize("way", ["triton", "blockwise"])
def test_memory_with_documents_grows_with_the_length(way):
    cluster = open_cluster("h100:1x1")
    short, long = (temporary_bytes(compiled(way, length, cluster)) for length in (4096, 16384))
    assert long <= 4.01 * short


@pytest.mark.parametrize(("card", "head_dim"), [("a100", 128), ("a100", 256)])
def test_the_kernel_fits_into_the_shared_memory_of_the_card_and_its_work_is_counted(card, head_dim):
    length = 1024
    program = compiled("triton", length, open_cluster(f"{card}:1x1"), head_dim)
    work = flops.matmul_flops(parse.read(program.as_text()))
    assert work.attention_full == (2 + 7) * 2 * attention.NUM_HEADS * length**2 * head_dim
    assert work.products == 0
    # Blocks on the diagonal are computed whole.
    assert 0.5 < work.attention / work.attention_full < 0.57


def test_a_stage_of_a_pipeline_has_the_kernel_and_all_of_its_work_is_counted():
    model = DecoderOptions(num_layers=4, embed_dim=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=257)
    config = Config(
        batch_size=16,
        sequence_length=256,
        model=model,
        pipeline=PipelineOptions("1f1b", num_microbatches=4),
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("save_attention"),
    )
    mesh = dict.fromkeys(AXES, 1) | {"pipeline": 2, "tensor": 2, "data": 2}
    made = compile_step(config, mesh, open_cluster("h100:1x8"))
    assert made.attention == "triton"
    work = flops.matmul_flops(parse.read(made.text))
    assert work.attention_full > 0
    assert (work.products + work.attention_full) / made.traced_flops == pytest.approx(1, abs=0.01)
