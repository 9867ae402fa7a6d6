"""The kernels of the experts' products in a model on a mesh: interpreted, they give the numbers of plain JAX."""

import dataclasses

import pytest

from meshtrain.models.moe import grouped_matmul
from tests.parity.test_parity_experts import CONFIG, MIXTRAL

SMALL = dataclasses.replace(MIXTRAL, num_layers=1, num_experts=4)
# Megablox takes widths that are multiples of a TPU's lanes.
WIDE = dataclasses.replace(SMALL, embed_dim=128, expert_dim=128)


@pytest.mark.parametrize(
    ("kernel", "model"), [("gpu", SMALL), pytest.param("tpu", WIDE, marks=pytest.mark.slow)], ids=["gpu", "tpu"]
)
def test_mesh_and_kernel_change_no_number_and_no_count(kernel, model, reference, assert_parity, monkeypatch):
    config = dataclasses.replace(CONFIG, model=model, num_steps=2)
    reference(config)  # by the loop over blocks
    asked = []

    def kernel_for(platform, *given):
        asked.append(platform)
        return kernel

    monkeypatch.setattr(grouped_matmul, "kernel_for", kernel_for)
    assert_parity(config, data=2, expert=2)
    assert set(asked) == {"cpu"}
