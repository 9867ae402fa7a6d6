"""Families that need more than the decoder's usual options, on a mesh: the numbers of plain JAX on one device.

gpt-oss has sinks, biases of experts and clamped SwiGLU; DeepSeek-V3 has latent attention, dense first layers and groups
of experts.
"""

import dataclasses

import pytest

from meshtrain.models.decoder_options import LatentOptions, MoeOptions, RopeOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import LayoutOptions
from tests.parity import runs

SINKS = dataclasses.replace(
    runs.LLAMA, num_layers=2, num_kv_heads=4, sinks=True, attention_biases=True, window=10, global_every=2,
    rope=RopeOptions(factor=4.0, scaling="yarn", low=0.1, high=2.0, original_length=16),
    activation="clamped_swiglu",
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    SINKS, moe=MoeOptions(num_experts=4, experts_per_token=2, expert_dim=16, biases=True, balance_weight=0.1)
)
# Fewer heads than devices of a sequence: keys are gathered.
SINKS_IN_BLOCKS = dataclasses.replace(SINKS, num_heads=2, num_kv_heads=2, attention="blockwise")

LATENT = dataclasses.replace(
    runs.LLAMA, num_layers=2, head_dim=4, latent=LatentOptions(dim=16, query_dim=24, rope_dim=2, value_dim=4)
)
# Groups of two experts.
DEEPSEEK = dataclasses.replace(
    LATENT,
    num_layers=3,
    moe=MoeOptions(
        num_experts=8,
        experts_per_token=3,
        expert_dim=16,
        router="sigmoid",
        router_scale=2.5,
        router_groups=4,
        groups_per_token=2,
        shared_experts=1,
        dense_layers=1,
        dense_dim=48,
        balance_weight=0.1,
    ),
)
LATENT_IN_BLOCKS = dataclasses.replace(
    LATENT, latent=dataclasses.replace(LATENT.latent, query_dim=0), attention="blockwise"
)

SEQUENCE_PARALLEL = LayoutOptions(sequence_parallel=True)
FAST = [
    (SINKS, {"fsdp": 2, "context": 2, "tensor": 2}, {"layout": SEQUENCE_PARALLEL}),
    (DEEPSEEK, {"fsdp": 2, "expert": 2, "tensor": 2}, {"layout": SEQUENCE_PARALLEL}),
]
SLOW = [
    (SINKS, {"pipeline": 2, "data": 2}, {}),
    (GPT_OSS, {"expert": 2, "tensor": 2}, {"num_steps": 2}),
    (SINKS_IN_BLOCKS, {"context": 4, "fsdp": 2}, {}),
    (DEEPSEEK, {"context": 2, "tensor": 2, "data": 2}, {"accumulation_steps": 2, "zero": ZeroOptions(level=2)}),
    (LATENT_IN_BLOCKS, {"context": 4, "fsdp": 2}, {}),
]  # DeepSeek-V3 in a pipeline: test_parity_empty_places.py


def names(cases):
    return ["-".join(f"{axis}{size}" for axis, size in mesh.items()) for _, mesh, _ in cases]


@pytest.mark.parametrize(("model", "mesh", "changes"), FAST, ids=names(FAST))
def test_mesh_changes_no_number_and_no_count(model, mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(runs.CONFIG, model=model, **changes), **mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "changes"), SLOW, ids=names(SLOW))
def test_other_meshes_change_no_number_and_no_count(model, mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(runs.CONFIG, model=model, **changes), **mesh)
