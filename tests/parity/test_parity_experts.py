"""Experts on a mesh: the numbers of plain JAX on one device, and the same counts of tokens for each expert."""

import dataclasses

from meshtrain.layout.rules import LayoutOptions
from meshtrain.layout.zero import ZeroOptions
from meshtrain.models.remat import RematOptions
from tests.parity import runs

MIXTRAL = dataclasses.replace(
    runs.LLAMA, num_layers=2, num_kv_heads=4, num_experts=8, expert_dim=16, balance_weight=0.1, z_weight=0.01
)
DEEPSEEK = dataclasses.replace(MIXTRAL, router="sigmoid", router_scale=2.5, shared_experts=1, experts_per_token=3)
CONFIG = dataclasses.replace(runs.CONFIG, model=MIXTRAL)


def test_softmax_router_with_sequences_split_between_products(assert_parity):
    layout = LayoutOptions(sequence_parallel=True)
    assert_parity(dataclasses.replace(CONFIG, layout=layout, accumulation_steps=2), data=2, fsdp=2, tensor=2)


def test_level_3(assert_parity):
    assert_parity(dataclasses.replace(CONFIG, zero=ZeroOptions(level=3), remat=RematOptions("full")), data=2, fsdp=2)
