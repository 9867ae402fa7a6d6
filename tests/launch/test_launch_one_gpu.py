"""A step on one GPU, with kernels that are told which device: compiled without it, on both versions of JAX."""

import pytest

from meshtrain.config.resolve import parse
from meshtrain.models.moe import grouped_matmul_gpu
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step
from meshtrain.plan.planner import shape_on

pytestmark = pytest.mark.gpu_compiler
WORDS = [
    *("mesh.data=1", "mesh.expert=1", "batch_size=2", "sequence_length=128", "precision.policy=bfloat16"),
    *("data.source=synthetic", "model.attention=triton", "model.num_layers=1", "model.embed_dim=128"),
]


def test_kernels_of_attention_and_experts_are_compiled_for_one_gpu():
    config, _ = parse(["--config=configs/experts.py", *(f"--config.{word}" for word in WORDS)], reads_data=False)
    cluster = open_cluster("h100:1x1")
    text = compile_step(config, shape_on(config, cluster), cluster).text
    assert grouped_matmul_gpu.TIMES in text
    assert grouped_matmul_gpu.OF_WEIGHTS in text
    assert "mha_backward" in text
