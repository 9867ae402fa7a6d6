"""Plans by the compiler of TPUs that are not there, above all of attention: `scripts/test --plan` runs these."""

import collections
import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshtrain.config.schema import Config
from meshtrain.models.attention import splash
from meshtrain.models.attention.attention import Attention
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import text_report
from meshtrain.plan.cluster import clusters
from meshtrain.plan.findings import findings
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import planned

pytestmark = pytest.mark.gpu_compiler

NUM_LAYERS, LENGTH = 2, 1024
MODEL = DecoderOptions(NUM_LAYERS, 512, 512, num_heads=4, num_kv_heads=2, vocab_size=1024)
CONFIG = Config(
    batch_size=8,
    sequence_length=LENGTH,
    mesh=MeshOptions(fsdp=8),
    model=MODEL,
    precision=PrecisionOptions("bfloat16"),
    remat=RematOptions("full"),
    pipeline=PipelineOptions("1f1b", num_microbatches=2),
)
PRODUCT = 2 * LENGTH * LENGTH * 128  # of one head of one sequence


def with_mesh(policy="full", **sizes):
    return dataclasses.replace(CONFIG, mesh=MeshOptions(**sizes), remat=RematOptions(policy))


def num_kernels(plan):
    """Kernel -> how often it runs in a step."""
    program, runs = parse.read(plan.compiled.text), collections.Counter()
    for line, _, times in program.instructions("custom-call"):
        if kernel := flops.attention_kernel(line):
            runs[kernel.part] += times
    return runs


@pytest.mark.parametrize("cluster", ["v5e:2x4", "v5p:2x2x2"])
def test_attention_is_the_kernel_and_all_of_it_is_counted(cluster):
    plan = planned(cluster, CONFIG)
    assert plan.compiled.attention == "splash"
    assert "attention splash" in text_report.text(plan)
    assert plan.memory.fits is True
    assert plan.memory.compiler.arguments_bytes == pytest.approx(plan.memory.arguments_expected_bytes, rel=0.001)
    assert plan.added_share == pytest.approx(0, abs=0.001)
    # Two products forward, again before the backward pass, and its three and four; blocks on the diagonal are whole.
    assert plan.work.attention_full == NUM_LAYERS * 4 * (2 + 2 + 3 + 4) * PRODUCT
    assert plan.work.attention == plan.work.attention_full * 3 / 4
    assert plan.timing.step_seconds > 0
    assert list(plan.minimum) == ["fsdp"]
    assert text_report.sent_along(plan, "fsdp") > 0.7 * plan.minimum["fsdp"]


def test_saved_attention_does_not_run_again():
    plan = planned("v5e:2x4", with_mesh("save_attention", tensor=2, data=4))
    assert num_kernels(plan) == {"fwd": NUM_LAYERS, "dq": NUM_LAYERS, "dkv": NUM_LAYERS}
    assert set(plan.minimum) == {"tensor", "data"}
    assert all(text_report.sent_along(plan, axis) > 0.7 * least for axis, least in plan.minimum.items())
    assert plan.added_share == pytest.approx(0, abs=0.001)


def test_the_kernel_runs_in_a_pipeline_stage_and_not_again_in_its_backward_rows():
    plan = planned("v5e:2x4", with_mesh("save_attention", pipeline=2, tensor=2, data=2))
    assert plan.compiled.attention == "splash"
    program = plan.compiled.assembly.placed.program
    num_pairs = program.cells.active.shape[0] // 2
    assert num_kernels(plan) == {"fwd": num_pairs, "dq": num_pairs, "dkv": num_pairs}
    assert plan.work.attention_full == num_pairs * (2 + 3 + 4) * 2 * 2 * PRODUCT


def test_long_sequences_need_no_matrix_of_probabilities():
    long = dataclasses.replace(CONFIG, sequence_length=4096, model=dataclasses.replace(MODEL, num_layers=1))
    kernel = planned("v5e:2x4", long)
    assert kernel.compiled.attention == "splash"
    assert kernel.memory.compiler.temporary_bytes < 0.2 * (4 * 4096 * 4096 * 4)  # float32 of four heads
    assert not any("4096 x 4096 numbers" in finding.what for finding in findings(kernel))


def test_a_v4_is_one_device():
    cluster = clusters.open_cluster("v4:2x2x2")
    assert len(cluster.devices) == 8
    assert cluster.accelerator.name == "v4"


def test_the_program_says_nothing_on_standard_error():
    words = ["--cluster=v5e:2x4", "--config.mesh.data=8", "--config.model.num_layers=1", "--config.batch_size=8"]
    done = subprocess.run(
        [sys.executable, "-m", "meshtrain.plan", *words],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert "modelled" in done.stdout


@pytest.mark.parametrize(
    ("cluster", "head_dim"),
    [("v5e:2x4", size) for size in splash.HEAD_DIMS]
    + [(name, max(splash.HEAD_DIMS)) for name in ("v4:2x2x1", "v5p:2x2x1", "v6e:2x4")],
)
def test_each_tpu_takes_the_heads_that_auto_means(cluster, head_dim):
    compiled = kernel_alone(cluster, head_dim, 1024)
    assert all(f"splash_mha_{name}_segmented" in compiled.as_text() for name in ("fwd", "dq", "dkv"))


def kernel_alone(cluster, head_dim, length):
    """Forward and backward pass of one sequence with four heads on one device."""
    device = clusters.open_cluster(cluster).devices[0]

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    def both_ways(q, k, v, documents):
        given = ((documents,) * 2, Attention(4, 2, head_dim))
        heads, backward = jax.vjp(lambda *qkv: splash.attend(*qkv, *given, name="heads", interpret=False), q, k, v)
        return backward(heads)

    heads = [array((1, length, num, head_dim), jnp.bfloat16) for num in (4, 2, 2)]
    traced = jax.jit(both_ways).trace(*heads, array((1, length), jnp.int32))
    return traced.lower(lowering_platforms=("tpu",)).compile()
