"""Attention with documents, compiled for GPUs without one: `scripts/test --plan` runs this."""

import pytest

from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step
from meshtrain.plan.cost import memory
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions
from scripts.benchmarks import attention
from scripts.benchmarks.attention import compiled, temporary_bytes

pytestmark = pytest.mark.gpu_compiler


@pytest.mark.parametrize("way", ["triton", "flex", "blockwise"])
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


@pytest.mark.parametrize("shape", attention.SHAPES)
def test_the_scores_of_cudnn_s_function_are_no_buffer_and_no_work(shape):
    cluster, settings = open_cluster("h100:1x1"), attention.SHAPES[shape]
    program = parse.read(compiled("flex", settings.length, cluster, settings.head_dim, settings).as_text())
    work, pairs = flops.matmul_flops(program), settings.length**2
    assert work.attention_full == (2 + 5) * 2 * attention.NUM_HEADS * pairs * settings.head_dim
    assert work.products == 0
    largest = max(buffer.num_bytes for buffer in memory.largest_buffers(program))
    assert largest <= 2 * attention.NUM_HEADS * settings.length * settings.head_dim
    called = [name for line, _, _ in program.instructions("custom-call") for name in line.called]
    assert called
    assert [program.num_runs[name] for name in called] == [0] * len(called)


# Manual regions over context, and all that the score function computes.
def test_a_step_with_documents_by_cudnn_is_compiled_and_its_work_is_counted():
    options = {"num_kv_heads": 2, "window": 128, "attention_cap": 30.0, "sinks": True}
    model = DecoderOptions(
        num_layers=2, embed_dim=512, num_heads=4, head_dim=64, vocab_size=257, attention="cudnn", **options
    )
    config = Config(
        batch_size=8,
        sequence_length=512,
        model=model,
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("save_attention"),
    )
    made = compile_step(config, dict.fromkeys(AXES, 1) | {"data": 2, "context": 2}, open_cluster("h100:1x4"))
    assert made.attention == "cudnn"
    program = parse.read(made.text, shares=made.assembly.cost.shares)
    work = flops.matmul_flops(program)
    assert work.attention_full > 0
    assert (work.products + work.attention_full) / made.traced_flops == pytest.approx(1, abs=0.01)
    assert not [buffer for buffer in memory.largest_buffers(program) if "4,2,512,512]" in buffer.shape]


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
