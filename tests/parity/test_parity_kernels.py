"""The kernels of the experts' products in a model on a mesh: interpreted, they give the numbers of plain JAX."""

import dataclasses

import pytest

from meshtrain.models.moe import chunks, grouped_matmul
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from tests.parity.test_parity_experts import CONFIG, IN_CHUNKS, LITTLE, MIXTRAL

SMALL = dataclasses.replace(MIXTRAL, num_layers=1, moe=dataclasses.replace(MIXTRAL.moe, num_experts=4))
# Megablox takes widths that are multiples of a TPU's lanes.
WIDE = dataclasses.replace(SMALL, embed_dim=128, moe=dataclasses.replace(SMALL.moe, expert_dim=128))
IN_STACK = {"pipeline": 2, "data": 2, "expert": 2}
PIPELINES = [
    (IN_STACK, IN_CHUNKS, 4),
    ({"pipeline": 2, "fsdp": 2, "tensor": 2}, PipelineOptions(num_microbatches=4), 2),
]


@pytest.fixture
def asked(monkeypatch):
    """A function kernel -> the list of what it is asked for from then on, (platform, dims of the weights)."""

    def takes(kernel):
        found = []

        def kernel_for(platform, rows, weights, *given):
            found.append((platform, weights))
            return kernel

        monkeypatch.setattr(grouped_matmul, "kernel_for", kernel_for)
        return found

    return takes


@pytest.mark.parametrize(
    ("kernel", "model"), [("gpu", SMALL), pytest.param("tpu", WIDE, marks=pytest.mark.slow)], ids=["gpu", "tpu"]
)
def test_mesh_and_kernel_change_no_number_and_no_count(kernel, model, reference, assert_parity, asked):
    config = dataclasses.replace(CONFIG, model=model, num_steps=2)
    reference(config)  # by the loop over blocks
    found = asked(kernel)
    assert_parity(config, data=2, expert=2)
    assert {platform for platform, _ in found} == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline", "num_layers"),
    PIPELINES,
    ids=["in the stack", "gathered"],
)
def test_kernels_in_a_pipeline_read_weights_in_the_stack_unless_they_are_gathered(
    mesh, pipeline, num_layers, reference, assert_parity, asked, monkeypatch
):
    """In several parts where they are read there."""
    is_in_stack = mesh == IN_STACK
    monkeypatch.setattr(chunks, "ROOM", LITTLE if is_in_stack else chunks.ROOM)
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(SMALL, num_layers=num_layers), num_steps=2)
    config = dataclasses.replace(config, pipeline=pipeline, zero=ZeroOptions(level=1))
    reference(config)
    found = asked("gpu")
    assert (assert_parity(config, **mesh).expert_parts > 1) == is_in_stack
    of_layer = SMALL.moe.num_experts // mesh.get("expert", 1)
    assert {weights[0] for _, weights in found} == ({of_layer, 2 * of_layer} if is_in_stack else {of_layer})
