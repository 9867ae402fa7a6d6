"""Sinks, biases of experts and clamped SwiGLU of gpt-oss on a mesh: the numbers of plain JAX on one device."""

import dataclasses

import pytest

from meshtrain.sharding.rules import LayoutOptions
from tests.parity import runs

DENSE = dataclasses.replace(
    runs.LLAMA, num_layers=2, num_kv_heads=4, sinks=True, attention_biases=True, window=10, global_every=2,
    rope_factor=4.0, rope_scaling="yarn", rope_low=0.1, rope_high=2.0, rope_original_length=16,
    activation="clamped_swiglu",
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    DENSE, num_experts=4, experts_per_token=2, expert_dim=16, expert_biases=True, balance_weight=0.1
)
# Fewer heads than devices of a sequence: keys are gathered.
IN_BLOCKS = dataclasses.replace(DENSE, num_heads=2, num_kv_heads=2, attention="blockwise")
CONFIG = dataclasses.replace(runs.CONFIG, model=DENSE)


def names(cases):
    return ["-".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh, _ in cases]


FAST = [({"fsdp": 2, "context": 2, "tensor": 2}, {"layout": LayoutOptions(sequence_parallel=True)})]
SLOW = [
    ({"pipeline": 2, "data": 2}, {}),
    ({"expert": 2, "tensor": 2}, {"model": GPT_OSS, "num_steps": 2}),
    ({"context": 4, "fsdp": 2}, {"model": IN_BLOCKS}),
]


@pytest.mark.parametrize(("mesh", "changes"), FAST, ids=names(FAST))
def test_mesh_changes_no_number_and_no_count(mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "changes"), SLOW, ids=names(SLOW))
def test_other_meshes_change_no_number_and_no_count(mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)
