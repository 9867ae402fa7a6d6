"""Latent attention, dense first layers and groups of experts on a mesh: the numbers of plain JAX on one device."""

import dataclasses

import pytest

from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.rules import LayoutOptions
from meshtrain.sharding.stored import ZeroOptions
from tests.parity import runs

LATENT = dataclasses.replace(
    runs.LLAMA, num_layers=2, head_dim=4, latent_dim=16, query_latent_dim=24, rope_dim=2, value_dim=4
)
# Groups of two experts, and five layers, of which a pipeline cuts four.
DEEPSEEK = dataclasses.replace(
    LATENT, num_layers=5, num_experts=8, experts_per_token=3, expert_dim=16, router="sigmoid", router_scale=2.5,
    router_groups=4, groups_per_token=2, shared_experts=1, dense_layers=1, dense_dim=48, balance_weight=0.1,
)  # fmt: skip
CONFIG = dataclasses.replace(runs.CONFIG, model=DEEPSEEK)
IN_CHUNKS = PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2)


def names(cases):
    return ["-".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh, _ in cases]


FAST = [
    ({"fsdp": 2, "expert": 2, "tensor": 2}, {"layout": LayoutOptions(sequence_parallel=True)}),
]
SLOW = [
    ({"data": 2, "expert": 2, "pipeline": 2}, {"zero": ZeroOptions(level=1), "remat": RematOptions("selective")}),
    ({"pipeline": 2, "fsdp": 2, "tensor": 2}, {"pipeline": IN_CHUNKS, "remat": RematOptions("full")}),
    ({"context": 2, "tensor": 2, "data": 2}, {"accumulation_steps": 2, "zero": ZeroOptions(level=2)}),
    ({"context": 4, "fsdp": 2}, {"model": dataclasses.replace(LATENT, query_latent_dim=0, attention="blockwise")}),
]


@pytest.mark.parametrize(("mesh", "changes"), FAST, ids=names(FAST))
def test_mesh_changes_no_number_and_no_count(mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "changes"), SLOW, ids=names(SLOW))
def test_other_meshes_change_no_number_and_no_count(mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)
