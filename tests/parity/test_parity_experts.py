"""Experts on a mesh: the numbers of plain JAX on one device, the counts of tokens and the biases bit by bit."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Request
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.moe import chunks
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.run.generating import generator
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import LayoutOptions
from tests.parity import runs
from tests.quick import QUICK

MIXTRAL = dataclasses.replace(
    runs.LLAMA,
    num_layers=2,
    num_kv_heads=4,
    moe=MoeOptions(num_experts=8, expert_dim=16, balance_weight=0.1, z_weight=0.01),
)
DEEPSEEK = dataclasses.replace(
    MIXTRAL,
    moe=dataclasses.replace(MIXTRAL.moe, router="sigmoid", router_scale=2.5, shared_experts=1, experts_per_token=3),
)
CONFIG = dataclasses.replace(runs.CONFIG, model=MIXTRAL)
IN_CHUNKS = PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2)
SCATTERED, AGAIN = LayoutOptions(sequence_parallel=True), RematOptions("full")
LITTLE = 0.3  # room of a part, so that a device computes several; and its tokens go in two turns
WHOLE = {"fsdp": 2, "expert": 2, "tensor": 2}, {"accumulation_steps": 2, "layout": SCATTERED}
CUT = [  # the first is fast
    ({"data": 2, "expert": 4}, {"model": DEEPSEEK, "accumulation_steps": 2, "zero": ZeroOptions(level=2)}),
    ({"data": 2, "expert": 2}, {"model": DEEPSEEK, "zero": ZeroOptions(level=3), "remat": RematOptions("dots")}),
    ({"data": 2, "fsdp": 2, "expert": 2}, {"zero": ZeroOptions(level=1), "remat": AGAIN, "accumulation_steps": 2}),
    ({"expert": 2, "context": 2, "tensor": 2}, {"model": DEEPSEEK, "accumulation_steps": 2}),
]  # in a pipeline: test_parity_kernels.py


def names(cases):
    return ["-".join(f"{axis}{size}" for axis, size in mesh.items()) for mesh, _ in cases]


def test_mesh_changes_no_number_and_no_count(assert_parity):
    mesh, changes = WHOLE
    assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)


@pytest.mark.parametrize(
    ("mesh", "changes"), [CUT[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CUT[1:])], ids=names(CUT)
)
def test_parts_and_turns_change_no_number_and_no_count(mesh, changes, assert_parity, monkeypatch):
    turns, num_turns = [], chunks.num_turns
    monkeypatch.setattr(chunks, "num_turns", lambda *given: turns.append(num_turns(*given)) or turns[-1])
    monkeypatch.setattr(chunks, "ROOM", LITTLE)
    monkeypatch.setattr(chunks, "LEAST_ROWS_OF_TURN", 1)
    got = assert_parity(dataclasses.replace(CONFIG, **changes), **mesh)
    assert (max(turns), got.expert_parts > 1) == (2, True)


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
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    before = runs.by_path(state.params)
    for batch in runs.example_batches(2):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, _ = assembly.steps.train(state, placed)
    trained = {f"layers/experts/{name}" for name in ("up", "gate", "down")}
    moved = {path for path, leaf in runs.by_path(state.params).items() if (leaf != before[path]).any()}
    assert moved == trained
    assert {"layers/experts/router", "layers/experts/router_bias", "layers/experts/shared/up"} <= before.keys() - moved
    sizes = [leaf.size for leaf in runs.by_path(state.opt_state).values() if leaf.ndim]
    assert sum(sizes) == 2 * sum(before[path].size for path in trained)


def test_all_tokens_on_one_device_are_computed_in_parts():
    """The bias sends all tokens to the same three experts, which stand on the first of four devices."""
    model = dataclasses.replace(DEEPSEEK, num_layers=1, moe=dataclasses.replace(DEEPSEEK.moe, num_experts=16))
    found = []
    for num_devices in (1, 4):
        config = dataclasses.replace(CONFIG, model=model, remat=AGAIN if num_devices > 1 else CONFIG.remat)
        assembly = assemble(config, runs.sizes(expert=num_devices), jax.devices()[:num_devices])
        state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
        state.params["layers"]["experts"]["router_bias"] += jax.numpy.float32([9, 9, 9] + 13 * [0])
        batch = runs.example_batches(1)[0]
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        after, metrics = assembly.steps.train(state, placed)
        found.append((runs.by_path(after.params), {name: np.asarray(metric) for name, metric in metrics.items()}))
    (expected, alone), (got, shared) = found
    assert (alone["expert_parts"], shared["expert_parts"]) == (1, 3)
    assert shared["expert_load"] == alone["expert_load"] == 16 / 3
    np.testing.assert_allclose(shared["loss"], alone["loss"], rtol=1e-6)
    np.testing.assert_allclose(shared["grad_norm"], alone["grad_norm"], rtol=1e-6)
    for path, leaf in expected.items():
        np.testing.assert_allclose(got[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)


TIGHT = dataclasses.replace(CONFIG, model=dataclasses.replace(MIXTRAL, num_layers=1, init_std=0.3))


@functools.cache
def tight(num_devices):
    """A model whose load is not even, on an expert axis of this size, and its first weights."""
    assembly = assemble(TIGHT, runs.sizes(expert=num_devices), jax.devices()[:num_devices])
    return assembly, assembly.steps.init(jax.random.key_data(jax.random.key(0))).params


def test_an_evaluation_leaves_no_choice_out():
    batch, losses = runs.example_batches(1)[0], []
    for assembly, params in map(tight, (1, 4, 8)):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        sums = assembly.steps.evaluate(params, placed)
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
