"""Experts on a mesh: the numbers of plain JAX on one device, the counts of tokens and the biases bit by bit."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from meshtrain.assemble import assemble
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Request
from meshtrain.models.metrics import LEFT_OUT
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.run.generating import generator
from meshtrain.sharding.rules import LayoutOptions
from meshtrain.sharding.stored import ZeroOptions
from tests.parity import runs
from tests.quick import QUICK

MIXTRAL = dataclasses.replace(
    runs.LLAMA, num_layers=2, num_kv_heads=4, num_experts=8, expert_dim=16, balance_weight=0.1, z_weight=0.01
)
DEEPSEEK = dataclasses.replace(MIXTRAL, router="sigmoid", router_scale=2.5, shared_experts=1, experts_per_token=3)
CONFIG = dataclasses.replace(runs.CONFIG, model=MIXTRAL)
IN_CHUNKS = PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2)
SCATTERED, AGAIN = LayoutOptions(sequence_parallel=True), RematOptions("full")
FAST = [
    ({"fsdp": 2, "expert": 2, "tensor": 2}, {"accumulation_steps": 2, "layout": SCATTERED}),
    ({"data": 2, "expert": 4}, {"model": DEEPSEEK, "accumulation_steps": 2, "zero": ZeroOptions(level=2)}),
]
SLOW = [
    ({"data": 2, "expert": 2}, {"model": DEEPSEEK, "zero": ZeroOptions(level=3), "remat": RematOptions("dots")}),
    ({"data": 2, "fsdp": 2, "expert": 2}, {"zero": ZeroOptions(level=1), "remat": AGAIN, "accumulation_steps": 2}),
    ({"expert": 2, "context": 2, "tensor": 2}, {"model": DEEPSEEK, "accumulation_steps": 2}),
    ({"data": 2, "expert": 2, "pipeline": 2}, {"model": DEEPSEEK, "zero": ZeroOptions(level=1), "remat": AGAIN}),
    ({"expert": 2, "pipeline": 2}, {"model": dataclasses.replace(DEEPSEEK, num_layers=4), "pipeline": IN_CHUNKS}),
]


def names(cases):
    return ["-".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh, _ in cases]


@pytest.mark.parametrize(("mesh", "changes"), FAST, ids=names(FAST))
def test_mesh_changes_no_number_and_no_count(mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "changes"), SLOW, ids=names(SLOW))
def test_other_meshes_and_levels_change_no_number_and_no_count(mesh, changes, assert_parity):
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)


@pytest.mark.slow
def test_muon_moves_each_expert_as_one_matrix_and_biases_as_counts_say(assert_parity):
    config = runs.with_optimizer(dataclasses.replace(CONFIG, model=DEEPSEEK), "muon", clip_norm=0.1)
    assert_parity(config, expert=2, fsdp=2)


def test_experts_alone_are_trained_where_a_pattern_says_so():
    """Routers and their biases stay, though tokens are counted; no moments but those of experts."""
    model = dataclasses.replace(DEEPSEEK, num_layers=1)
    optimizer = dataclasses.replace(CONFIG.optimizer, trainable="experts/(up|gate|down)")
    config = dataclasses.replace(CONFIG, model=model, optimizer=optimizer)
    assembly = assemble(config, runs.sizes(expert=2), jax.devices()[:2])
    state = assembly.init(jax.random.key_data(jax.random.key(0)))
    before = runs.by_path(state.params)
    for batch in runs.example_batches(2):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, _ = assembly.train_step(state, placed)
    trained = {f"layers/experts/{name}" for name in ("up", "gate", "down")}
    moved = {path for path, leaf in runs.by_path(state.params).items() if (leaf != before[path]).any()}
    assert moved == trained
    assert {"layers/experts/router", "layers/experts/router_bias", "layers/experts/shared/up"} <= before.keys() - moved
    sizes = [leaf.size for leaf in runs.by_path(state.opt_state).values() if leaf.ndim]
    assert sum(sizes) == 2 * sum(before[path].size for path in trained)


def test_a_step_with_too_little_room_counts_what_it_leaves_out_and_changes_nothing():
    model = dataclasses.replace(MIXTRAL, num_layers=1, expert_room=1.0)
    assembly = assemble(dataclasses.replace(CONFIG, model=model), runs.sizes(expert=4), jax.devices()[:4])
    state = assembly.init(jax.random.key_data(jax.random.key(0)))
    before = runs.by_path(state.params)
    batch = runs.example_batches(1)[0]
    placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
    state, metrics = assembly.train_step(state, placed)
    num_choices = model.experts_per_token * batch["tokens"].size
    assert 0 < metrics[LEFT_OUT] < num_choices / 2
    assert metrics["skipped_steps"] == 1
    for path, leaf in runs.by_path(state.params).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


TIGHT = dataclasses.replace(CONFIG, model=dataclasses.replace(MIXTRAL, num_layers=1, expert_room=1.25, init_std=0.3))


@functools.cache
def tight(num_devices):
    """A model whose steps have too little room, on an expert axis of this size, and its first weights."""
    assembly = assemble(TIGHT, runs.sizes(expert=num_devices), jax.devices()[:num_devices])
    return assembly, assembly.init(jax.random.key_data(jax.random.key(0))).params


def test_an_evaluation_has_room_for_every_choice():
    batch, losses = runs.example_batches(1)[0], []
    for assembly, params in map(tight, (1, 4, 8)):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        sums = assembly.eval_step(params, placed)
        losses.append(float(sums["loss"] / sums["weight"]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_one_prompt_has_one_text_whatever_stands_beside_it():
    drawn = [[] for _ in range(8)]

    def take(row, tokens, is_last):
        drawn[row] += tokens
        return False

    requests = [Request([3, 1, 4, 1, 5])] * len(drawn)
    generator(*tight(4), (), QUICK).draw(requests, 8, Sampling(), 0, take)
    assert drawn == drawn[:1] * len(drawn)
    assert len(drawn[0]) == 8
