"""Linen modules, NNX modules and plain functions through one contract: the same numbers on any mesh.

B: sequences, T: tokens a sequence, D: embed dim, F: mlp dim, V: vocabulary.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.models.task import Task, token_batch
from meshtrain.models.vocabulary import cross_entropy
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend

B, T, D, F, V = 16, 8, 16, 32, 64
CONFIG = Config(
    num_steps=3,
    batch_size=B,
    sequence_length=T,
    mesh=MeshOptions(data=-1),
    learning_rate=LearningRateOptions(name="constant", peak=3e-3, warmup_steps=0),
)
WEIGHTS = {"table": ((V, D), ("vocab", "embed")), "up": ((D, F), ("embed", "mlp")), "down": ((F, D), ("mlp", "embed"))}
RULES = default_rules(LayoutOptions())


def task_of(init, apply) -> Task:
    """A task of (rng -> params) and (params, tokens, rng, train) -> logits [B, T, V]."""

    def loss(params, batch, rng, train):
        logits = apply(params, batch["tokens"], rng, train)
        return cross_entropy(logits, batch["targets"], batch["weights"], V), jnp.sum(batch["weights"]), {}

    return Task(init, loss, token_batch(B, T))


def plain(config, placement):
    def init(rng):
        return {
            name: nn.LogicallyPartitioned(0.3 * jax.random.normal(jax.random.fold_in(rng, i), shape), axes)
            for i, (name, (shape, axes)) in enumerate(WEIGHTS.items())
        }

    def apply(params, tokens, rng, train):
        w = {name: placement.weight(params[name], axes) for name, (_, axes) in WEIGHTS.items()}
        return jnp.tanh(w["table"][tokens] @ w["up"]) @ w["down"] @ w["table"].T

    return task_of(init, apply)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        def init(*axes: str) -> Any:
            return nn.with_logical_partitioning(nn.initializers.normal(0.3), axes)

        # Split over embed alone: the partitioner's lookup in a table that is split both ways copies it whole.
        x = nn.Embed(V, D, embedding_init=init("rows", "embed"))(tokens)
        x = jnp.tanh(nn.Dense(F, use_bias=False, kernel_init=init("embed", "mlp"))(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        x = nn.Dense(D, use_bias=False, kernel_init=init("mlp", "embed"))(x)
        return nn.Dense(V, use_bias=False, kernel_init=init("embed", "vocab"))(x)


def linen(config, placement):
    model, tokens = LinenModel(), jnp.zeros((1, 1), jnp.int32)

    def apply(params, tokens, rng, train):
        return model.apply({"params": params}, tokens, train, rngs={"dropout": rng})

    return task_of(lambda rng: model.init(rng, tokens, False)["params"], apply)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        def init(*axes: str) -> Any:
            return nnx.with_metadata(nnx.initializers.normal(0.3), axes=axes)

        self.table = nnx.Embed(V, D, embedding_init=init("rows", "embed"), rngs=rngs)
        self.up = nnx.Linear(D, F, use_bias=False, kernel_init=init("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=init("mlp", "embed"), rngs=rngs)
        self.head = nnx.Linear(D, V, use_bias=False, kernel_init=init("embed", "vocab"), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.down(jnp.tanh(self.up(self.table(tokens)))))


def flax_nnx(config, placement):
    graph, _ = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))))

    def init(rng):
        state = nnx.state(NnxModel(nnx.Rngs(params=rng)), nnx.Param)
        return nnx.to_pure_dict(
            state, lambda leaf: nn.LogicallyPartitioned(leaf.get_value(), leaf.get_metadata().get("axes"))
        )

    return task_of(init, lambda params, tokens, rng, train: nnx.merge(graph, params)(tokens))


MODELS = {"plain": plain, "linen": linen, "nnx": flax_nnx}
OWN_RULES = {"plain": (), "linen": (Rule("rows"),), "nnx": (Rule("rows"),)}


def three_steps(name: str, **axes: int):
    """Returns the assembly, initial weights and the losses of three steps."""
    shape = {axis: axes.get(axis, 1) for axis in AXES}
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    assembly = assemble(CONFIG, shape, devices, MODELS[name], extend(RULES, *OWN_RULES[name]))
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    initial, losses = jax.device_get(state.params), []
    step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    generator = np.random.default_rng(3)
    for _ in range(CONFIG.num_steps):
        values = {leaf: generator.integers(0, V, (B, T)).astype(np.int32) for leaf in ("tokens", "targets")}
        values |= dict.fromkeys(("segment_ids", "positions"), np.ones((B, T), np.int32))
        values["weights"] = np.ones((B, T), np.float32)
        batch = {leaf: jax.device_put(values[leaf], like.sharding) for leaf, like in assembly.batch.items()}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return assembly, initial, np.array(losses)


@pytest.mark.parametrize("axes", [None, "mlp", (3,)])
def test_an_nnx_variable_without_axes_is_named(axes):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(D, F, use_bias=False, rngs=rngs)
            self.up.kernel.set_metadata(axes=axes)

    def init(rng):
        state = nnx.state(Model(nnx.Rngs(params=rng)), nnx.Param)
        return nnx.to_pure_dict(
            state, lambda leaf: nn.LogicallyPartitioned(leaf.get_value(), leaf.get_metadata().get("axes"))
        )

    expected = re.escape(
        f"up/kernel: shape (16, 32): got {axes!r} as logical axes; allowed: a name or None for each dim"
    )
    with pytest.raises(UserError, match=expected):
        assemble(CONFIG, dict.fromkeys(AXES, 1), jax.devices()[:1], lambda *_: task_of(init, None), RULES)


@pytest.mark.parametrize("name", MODELS)
def test_mesh_changes_no_number(name):
    _, initial, losses = three_steps(name)
    assembly, initial_on_mesh, losses_on_mesh = three_steps(name, data=2, fsdp=2, tensor=2)
    jax.tree.map(np.testing.assert_array_equal, initial_on_mesh, initial)
    np.testing.assert_allclose(losses_on_mesh, losses, rtol=1e-5)
    assert np.ptp(losses) > 1e-3, "weights that stand still would agree as well"
    homes = jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, assembly.state.params))
    assert not any(home.is_fully_replicated for home in homes)


def test_weight_without_names_is_refused_on_a_mesh_and_fine_on_one_device():
    def bare(config, placement):
        task = plain(config, placement)
        return task_of(lambda rng: nn.unbox(task.init(rng)), lambda params, tokens, rng, train: params["table"][tokens])

    shape = dict.fromkeys(AXES, 1)
    assemble(CONFIG, shape, jax.devices()[:1], bare)
    with pytest.raises(UserError, match=r"table: shape \(64, 16\): has no logical axes; .* nearest: \(None, None\)"):
        assemble(CONFIG, shape | {"fsdp": 2}, jax.devices()[:2], bare)


def test_axis_without_a_rule_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"logical axis of dim 0: got 'rows'; allowed: .*batch"):
        assemble(CONFIG, dict.fromkeys(AXES, 1) | {"tensor": 2}, jax.devices()[:2], linen, RULES)


def test_own_rule_that_splits_nothing_is_refused():
    rules = extend(RULES, Rule("expert", parameters=("tensor",)))
    with pytest.raises(UserError, match=r"rule 'expert' -> tensor \(size 2\): matches no array"):
        assemble(CONFIG, dict.fromkeys(AXES, 1) | {"tensor": 2}, jax.devices()[:2], plain, rules)


def test_pipeline_needs_a_task_with_stages():
    with pytest.raises(
        UserError,
        match=(
            r"mesh.pipeline: got 2, but this task has no pipeline stages; .* "
            r"mesh.pipeline=1"
        ),
    ):
        assemble(CONFIG, dict.fromkeys(AXES, 1) | {"pipeline": 2}, jax.devices()[:2], plain)


def test_parameters_are_counted_where_the_task_does_not_say():
    assembly = assemble(CONFIG, dict.fromkeys(AXES, 1), jax.devices()[:1], plain)
    assert assembly.task.num_parameters == V * D + D * F + F * D


def test_what_replicas_add_up_by_themselves_is_refused_where_a_plain_look_up_would_end_the_process():
    config = dataclasses.replace(CONFIG, zero=ZeroOptions(level=2))
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    with pytest.raises(UserError, match=r"zero\.level: got 2 with a task without .* nearest: zero\.level=1"):
        assemble(config, shape, jax.devices()[:4], plain, RULES)
    assemble(config, dict.fromkeys(AXES, 1) | {"data": 4}, jax.devices()[:4], plain, RULES)
