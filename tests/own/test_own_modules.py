"""Linen modules, NNX modules and plain functions through one contract: the same numbers on any mesh.

B: sequences, T: tokens a sequence, D: embed dim, F: mlp dim, V: vocabulary.
"""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from meshtrain import Named, from_nnx
from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.models.task import Stages, Task, loss_of_stages, sequence_keys, token_batch
from meshtrain.models.vocabulary import copy_to_shards, cross_entropy
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.named import is_boxed, unbox
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
            name: Named(0.3 * jax.random.normal(jax.random.fold_in(rng, i), shape), axes)
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


def normal(*axes: str) -> Any:
    """An initializer that stores the logical axes as metadata."""
    return nnx.with_metadata(nnx.initializers.normal(0.3), axes=axes)


class Block(nnx.Module):
    """Stock layers with dropout: norm and biases state no logical axes, one matrix states them in Flax's own way."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        down = nnx.with_partitioning(nnx.initializers.normal(0.3), ("mlp", "embed"))
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, kernel_init=normal("embed", "mlp"), rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.drop(jnp.tanh(self.up(self.norm(x)))))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(V, D, embedding_init=normal("rows", "embed"), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(D, V, use_bias=False, kernel_init=normal("embed", "vocab"), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NAMES = {"*norm/*": ("norm",), "*up/bias": ("mlp",)}


def flax_nnx(config, placement):
    init, apply = from_nnx(NnxModel, NAMES, placement)

    def loss(params, batch, rng, train):
        logits = apply(params, sequence_keys(rng, batch), train, batch["tokens"])
        return cross_entropy(logits, batch["targets"], batch["weights"], V), jnp.sum(batch["weights"]), {}

    return Task(init, loss, token_batch(B, T))


def in_stages(config, placement):
    """The layers of `Block`, stacked for a pipeline."""
    (init_ends, _), (init_block, apply) = from_nnx(NnxModel, NAMES), from_nnx(Block, NAMES, placement)

    def init(rng):
        ends = init_ends(rng)
        layers = jax.vmap(init_block)(jax.random.split(jax.random.fold_in(rng, 1), 4))
        layers = jax.tree.map(lambda w: Named(w.value, ("layers", *w.names)), layers, is_leaf=is_boxed)
        return {"table": ends["table"], "head": ends["head"], "layers": layers}

    def repeated(layers, x, batch, rng, start, train):
        def one(x, numbered):
            index, layer = numbered
            return apply(layer, sequence_keys(jax.random.fold_in(rng, index), batch), train, x), None

        numbers = start + jnp.arange(len(layers["up"]["bias"]))
        return jax.lax.scan(one, x, (numbers, layers))[0], None

    def last(outer, x, batch, axis):
        logits = copy_to_shards(x, axis) @ placement.weight(outer["head"]["kernel"], ("embed", "vocab"))
        total = cross_entropy(logits, batch["targets"], batch["weights"], V, axis)
        return total, jnp.sum(batch["weights"]), {}

    first = lambda outer, batch, rng, train, axis: outer["table"]["embedding"][batch["tokens"]]  # noqa: E731
    stages = Stages(4, first, repeated, last)
    return Task(init, loss_of_stages(stages), token_batch(B, T), stages=stages)


MODELS = {"plain": plain, "linen": linen, "nnx": flax_nnx, "stages": in_stages}
OWN_RULES = {"plain": (), "linen": (Rule("rows"),), "nnx": (Rule("rows"),), "stages": (Rule("rows"),)}


@functools.cache
def three_steps(name: str, microbatches: int = 1, **axes: int):
    """Returns the assembly, initial weights and the losses of three steps."""
    config = dataclasses.replace(CONFIG, accumulation_steps=microbatches)
    shape = {axis: axes.get(axis, 1) for axis in AXES}
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    assembly = assemble(config, shape, devices, MODELS[name], extend(RULES, *OWN_RULES[name]))
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
        return nnx.to_pure_dict(state, lambda leaf: leaf)

    expected = re.escape(
        f"up/kernel: shape (16, 32): got {axes!r} as logical axes; allowed: a name or None for each dim"
    )
    with pytest.raises(UserError, match=expected):
        assemble(CONFIG, dict.fromkeys(AXES, 1), jax.devices()[:1], lambda *_: task_of(init, None), RULES)


@pytest.mark.parametrize("name", ["plain", "linen", "nnx"])
def test_mesh_changes_no_number(name):
    _, initial, losses = three_steps(name)
    assembly, initial_on_mesh, losses_on_mesh = three_steps(name, data=2, fsdp=2, tensor=2)
    jax.tree.map(np.testing.assert_array_equal, initial_on_mesh, initial)
    np.testing.assert_allclose(losses_on_mesh, losses, rtol=1e-5)
    assert np.ptp(losses) > 1e-3, "weights that stand still would agree as well"
    matrices = [leaf for leaf in jax.tree.leaves(assembly.state.params) if leaf.ndim > 1]
    assert not any(leaf.sharding.is_fully_replicated for leaf in matrices)


@pytest.mark.parametrize(
    ("name", "microbatches", "axes"),
    [
        ("nnx", 1, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("nnx", 4, {"data": 2}),
        ("stages", 1, {"pipeline": 2, "fsdp": 2}),
    ],
)
def test_masks_of_an_nnx_module_depend_on_no_mesh_and_no_microbatches(name, microbatches, axes):
    """Dropout is active: a mask that the mesh changes would change a loss by about 1e-2."""
    _, initial, losses = three_steps(name)
    _, initial_on_mesh, losses_on_mesh = three_steps(name, microbatches, **axes)
    jax.tree.map(np.testing.assert_array_equal, initial_on_mesh, initial)
    np.testing.assert_allclose(losses_on_mesh, losses, rtol=2e-6)


def test_weight_without_names_is_refused_on_a_mesh_and_fine_on_one_device():
    def bare(config, placement):
        task = plain(config, placement)
        return task_of(lambda rng: unbox(task.init(rng)), lambda params, tokens, rng, train: params["table"][tokens])

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


def refusal(make, *names):
    with pytest.raises(UserError) as caught:
        from_nnx(make, *names)
    return list(caught.value.problems)


def test_each_weight_without_names_is_a_line_that_names_it():
    expected = [
        "norm/bias: shape (16,): got no logical axes; allowed: a name or None for each dim; "
        "nearest: names={'norm/bias': (None,)}",
        "up/bias: shape (32,): got ('embed', 'mlp') as logical axes; allowed: a name or None for each dim; "
        "nearest: names={'up/bias': (None,)}",
        "names: got the pattern 'norm/bia', which is not used for any weight; "
        "allowed: a pattern of the path of a weight that states no logical axes; did you mean 'norm/bias'?",
    ]
    names = {"norm/scale": ("norm",), "up/*": ("embed", "mlp"), "norm/bia": ("norm",)}
    assert refusal(Block, names) == expected


class WithState(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bn = nnx.BatchNorm(D, use_bias=False, use_scale=False, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))
        self.table, self.other = jnp.ones(3), np.ones(3)


def test_state_that_a_step_would_change_is_refused():
    allowed = "; allowed: nnx.Param and random streams; nearest: "
    instead = "nnx.LayerNorm, nnx.RMSNorm or nnx.GroupNorm in place of nnx.BatchNorm"
    for _ in range(2):  # the second time JAX knows the module
        assert sorted(refusal(WithState)) == [
            f"bn/mean: got a BatchStat, which a step would change{allowed}{instead}",
            f"bn/var: got a BatchStat, which a step would change{allowed}{instead}",
            f"count: got a Variable, which a step would change{allowed}compute it in __call__",
            f"other: got an array that is not an nnx.Param{allowed}compute it in __call__",
            f"table: got an array that is not an nnx.Param{allowed}compute it in __call__",
        ]
    assert refusal(lambda rngs: 3) == ["make: got int; allowed: an nnx.Module; nearest: lambda rngs: Model(rngs)"]


class Attention(nnx.Module):
    """Stock attention with dropout; then two modules of dropout, and a stack of two, whose random keys are stacked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attend = nnx.MultiHeadAttention(2, D, D, dropout_rate=0.1, decode=False, rngs=rngs)
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        stack = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        self.drops = stack(rngs.split(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.attend(x)
        of_stack = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drops, x)
        return jnp.stack([self.first(x), self.second(x), *of_stack], axis=1)  # [b, 4, T, D]


def test_each_sequence_has_the_masks_of_its_key():
    names = {"*/out/kernel": ("heads", "head_dim", "embed"), "*/out/bias": (None,), "*/bias": ("heads", "head_dim")}
    init, apply = from_nnx(Attention, names | {"*/kernel": ("embed", "heads", "head_dim")})
    params, x = init(jax.random.key(0)), jnp.broadcast_to(jax.random.normal(jax.random.key(1), (T, D)), (3, T, D))
    keys = jax.random.wrap_key_data(jnp.array([[0, 5], [0, 6], [0, 5]], jnp.uint32))
    y = np.asarray(apply(params, keys, True, x))
    np.testing.assert_array_equal(y[0], y[2])
    masks = (y == 0)[:2].reshape(8, T * D)  # of two sequences and four modules
    shares = [np.mean(a != b) for a, b in itertools.combinations(masks, 2)]
    assert 0.2 < min(shares) <= max(shares) < 0.8, "two sequences or modules have one mask"
    of_evaluation = apply(params, None, False, x)
    assert not np.any(of_evaluation == 0)
    np.testing.assert_array_equal(of_evaluation, apply(unbox(params), keys, False, x))
    with pytest.raises(UserError, match=r"^keys: got None .* streams attend/rngs and .* and second/rngs; allowed: "):
        apply(params, None, True, x)


def test_the_model_of_the_newcomer_trains_as_it_stands():
    """Before `from_nnx`, a stream of random numbers was missing in `init`, and leaves in `nnx.merge`."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            named = nnx.with_metadata(nnx.initializers.normal(), axes=("embed", "mlp"))
            self.up = nnx.Linear(4, 8, use_bias=False, kernel_init=named, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(self.up(x))

    init, apply = from_nnx(Model)
    params = init(jax.random.key(0))
    assert params["up"]["kernel"].names == ("embed", "mlp")
    of_loss = lambda params: apply(params, jax.random.split(jax.random.key(1), 5), True, jnp.ones((5, 4))).sum()  # noqa: E731
    assert np.all(jax.grad(of_loss)(params)["up"]["kernel"].value > 0)
