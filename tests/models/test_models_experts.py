"""A layer of experts: what a loop over all experts computes, forward and backward, with nothing left out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from jax.extend.core import Var

from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.metrics import Load, number_to_log
from meshtrain.models.moe import chunks, experts, routing
from meshtrain.models.moe.chunks import Parts
from meshtrain.models.moe.experts import Experts
from meshtrain.models.moe.routing import Tokens
from meshtrain.models.remat import RematOptions, saved_names
from meshtrain.models.split import keep_named
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.jaxprs import inner_jaxprs
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules

NUM_SEQUENCES, NUM_TOKENS, WIDTH = 2, 7, 8
OPTIONS = DecoderOptions(
    num_layers=2,
    embed_dim=WIDTH,
    num_heads=2,
    num_kv_heads=2,
    vocab_size=11,
    vocab_multiple=16,
    init_std=0.5,
    moe=MoeOptions(
        num_experts=5, experts_per_token=2, expert_dim=6, shared_experts=2, router="sigmoid", router_scale=2.0
    ),
)
TOKENS = Tokens(jnp.ones((NUM_SEQUENCES, NUM_TOKENS)), jnp.ones((NUM_SEQUENCES, NUM_TOKENS)))


def layer_of(options=OPTIONS):
    return Experts(options, 0.5, Placement.single_device(), jnp.float32)


@functools.cache
def given():
    """Activations and weights of a layer, its bias at random numbers."""
    x = jax.random.normal(jax.random.key(1), (NUM_SEQUENCES, NUM_TOKENS, WIDTH))
    weights = meta.unbox(layer_of().init(jax.random.key(2), x, jnp.int32(0), None))["params"]
    return x, {**weights, "router_bias": jnp.float32([0.3, -0.2, 0, 0.1, 0])}


def dense(weights, x):
    """All experts for all tokens, those that were not chosen times zero."""
    to = routing.route(routing.logits(x, weights["router"]), weights["router_bias"], 2, "sigmoid", 2.0)

    def one(matrices):
        return (jax.nn.silu(x @ matrices["gate"]) * (x @ matrices["up"])) @ matrices["down"]

    hot = jax.nn.one_hot(to.chosen, OPTIONS.moe.num_experts) * to.gates[..., None]
    of_experts = jnp.stack(
        [one({name: weights[name][e] for name in experts.MATRICES}) for e in range(OPTIONS.moe.num_experts)]
    )
    return jnp.einsum("btke,ebtd->btd", hot, of_experts) + one(weights["shared"])


def test_results_and_gradients_are_those_of_a_loop_over_all_experts():
    x, weights = given()
    probe = jax.random.normal(jax.random.key(3), x.shape)
    others = {name: leaf for name, leaf in weights.items() if name != "router_bias"}

    def value(run, others, x):
        return jnp.sum(run({**others, "router_bias": weights["router_bias"]}, x) * probe)

    sparse = lambda weights, x: layer_of().apply({"params": weights}, x, jnp.int32(0), None)[0]  # noqa: E731
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(value, run), argnums=(0, 1)))(others, x) for run in (sparse, dense)
    )
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_sums_weight_the_losses_and_counts_are_those_of_the_layer():
    x, weights = given()
    options = dataclasses.replace(OPTIONS, moe=dataclasses.replace(OPTIONS.moe, balance_weight=0.3, z_weight=0.2))
    _, (loss, metrics) = layer_of(options).apply({"params": weights}, x, jnp.int32(1), TOKENS)
    assert set(metrics) == {"balance_loss", "z_loss", "router_entropy", "expert_load", "expert_parts"}
    np.testing.assert_array_equal(metrics["expert_parts"].counts, [0, 1])
    balance, z = (
        0.3 * options.moe.experts_per_token * metrics["balance_loss"],
        0.2 * options.num_layers * metrics["z_loss"],
    )
    np.testing.assert_allclose(loss, balance + z, rtol=1e-6)
    counts = metrics["expert_load"].counts
    assert counts.shape == (2, 5)
    assert not counts[0].any()
    assert counts[1].sum() == 2 * NUM_SEQUENCES * NUM_TOKENS


def load_balancing_loss(logits, num_chosen):
    """`load_balancing_loss_func` of transformers 5.24 (modeling_mixtral.py), for logits [tokens, E], in float64.

    E times the sum over experts of (share of tokens that chose it, summed over the k choices) x (its mean probability),
    after Fedus et al. 2021, Switch Transformer, equations 4 to 6.
    """
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1)[:, :num_chosen]
    shares = np.bincount(chosen.ravel(), minlength=logits.shape[-1]) / len(logits)
    return logits.shape[-1] * np.sum(shares * probabilities.mean(axis=0))


@pytest.mark.parametrize(("num_dense", "num_chosen"), [(0, 2), (1, 2), (0, 1), (2, 3)])
def test_the_balance_loss_is_that_of_transformers_with_its_coefficient(num_dense, num_chosen):
    """A mean over layers with experts and over sequences without their padding, a sum over the choices of a token."""
    options = dataclasses.replace(
        OPTIONS,
        num_layers=2 + num_dense,
        moe=dataclasses.replace(
            OPTIONS.moe,
            dense_layers=num_dense,
            experts_per_token=num_chosen,
            router="softmax",
            router_scale=1.0,
            balance_weight=0.02,
            z_weight=0.0,
        ),
    )
    x, weights = given()
    weights = {name: leaf for name, leaf in weights.items() if name != "router_bias"}
    lengths = (NUM_TOKENS, NUM_TOKENS - 3)
    real = jnp.float32(np.arange(NUM_TOKENS) < np.array(lengths)[:, None])
    tokens = Tokens(real * jnp.array([[1.0], [NUM_TOKENS / (NUM_TOKENS - 3)]]), real)  # sequences have equal weights
    total, expected = 0.0, []
    for layer in range(2):
        inputs = x * (1 + layer)
        addend, _ = layer_of(options).apply({"params": weights}, inputs, jnp.int32(num_dense + layer), tokens)[1]
        total += float(addend)
        logits = np.asarray(inputs, np.float64) @ np.asarray(weights["router"], np.float64)
        expected += [load_balancing_loss(logits[i, :length], num_chosen) for i, length in enumerate(lengths)]
    np.testing.assert_allclose(total / float(tokens.weights.sum()), 0.02 * np.mean(expected), rtol=1e-6)


@pytest.mark.parametrize(("chosen", "num_here"), [
    ([[0, 2], [1, 2], [2, 0]], 3),
    ([[3, 2], [1, 3], [2, 0]], 3),
    ([[3, 3], [3, 3], [3, 3]], 3),
    ([[1, 0], [1, 0], [1, 0]] * 40, 1),
    ([[1, 2], [0, 1], [2, 1]] * 40, 1),
])  # fmt: skip
def test_each_choice_of_an_expert_here_has_one_row(chosen, num_here):
    """The number of experts here stands for an expert of another device."""
    chosen = np.minimum(np.int32(chosen), num_here)
    num_tokens, num_chosen = chosen.shape
    cut = Parts.of(num_tokens, num_chosen, num_here, 8)
    found = chunks.arrange_rows(cut, chosen, num_here)
    assert found.choices.size == cut.num_parts * cut.num_rows
    owners = np.repeat(found.owners, cut.block_rows)
    rows = [row for row, choice in enumerate(found.choices) if choice < chosen.size]
    assert len(rows) == (chosen < num_here).sum()
    assert max(rows, default=-1) // cut.num_rows + 1 == chunks.num_used(cut, found, num_here)
    for row in rows:
        choice = int(found.choices[row])
        assert owners[row] == chosen.reshape(-1)[choice]
        assert found.tokens[row] == choice // 2
        assert found.places.reshape(-1)[choice] == row
    assert (found.places < found.choices.size).sum() == len(rows)


@pytest.mark.parametrize(("num_experts", "num_here"), [(16, 2), (16, 8), (16, 16), (128, 16), (8, 1)])
def test_a_part_has_the_rows_of_an_even_load_and_a_quarter_more(num_experts, num_here):
    cut = Parts.of(8192, 4, num_here, num_experts)
    even, most = 8192 * 4 * num_here / num_experts, 8192 * min(4, num_here)
    padding = num_here * cut.block_rows
    assert min(1.25 * even, most) <= cut.num_rows - padding < 1.25 * even + cut.block_rows
    assert (cut.num_parts - 1) * cut.num_rows < most + padding <= cut.num_parts * cut.num_rows


def gradients(policy=None):
    """(weights, activations) -> value and gradients of a layer, of which a policy saves some residuals."""

    def run(weights, x, others):
        y = layer_of().apply({"params": weights}, x, jnp.int32(0), None)[0]
        return jnp.sum(y * jax.random.normal(jax.random.key(3), x.shape)), None

    kept = keep_named(run, saved_names(policy, Placement.single_device())) if policy else run
    return jax.value_and_grad(lambda weights, x: kept(weights, x, ())[0], argnums=(0, 1))


ANY, SAME = [0.3, -0.2, 0, 0.1, 0], [9, 0, 0, 9, 0]  # biases; with the latter all tokens choose the same two experts


@pytest.mark.parametrize(
    ("bias", "policy"), [(ANY, None), (SAME, "selective"), (SAME, "full")], ids=["any", "same-selective", "same-full"]
)
def test_several_parts_have_the_results_and_gradients_of_one(bias, policy, monkeypatch):
    x, weights = given()
    weights = {**weights, "router_bias": jnp.float32(bias)}
    expected = jax.jit(gradients())(weights, x)
    monkeypatch.setattr(chunks, "ROOM", 0.1)
    monkeypatch.setattr(chunks, "MOST_ROWS", 2)
    _, (_, metrics) = layer_of().apply({"params": weights}, x, jnp.int32(0), TOKENS)
    assert number_to_log(metrics["expert_parts"], 1) >= 2
    found = jax.jit(gradients(policy))(weights, x)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("policy", "num_products"), [(None, 9), ("selective", 9), ("dots", 9), ("full", 11), ("save_attention", 11)]
)
def test_policies_that_save_products_compute_none_again(policy, num_products):
    """Three products and two gradients of each. The last product is never computed again: gates stand before it."""
    x, weights = given()
    traced = jax.make_jaxpr(gradients(policy))(weights, x)
    assert str(traced).count(" scan[") == num_products  # the loops of products


def bodies(jaxpr):
    """The jaxprs of all manual regions within one."""
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation):
            yield from [inner] if equation.primitive.name == "shard_map" else bodies(inner)


def needed_by(jaxpr, kind):
    """For each exchange of activations of this kind in a manual region the exchanges whose results it needs."""
    needs, found = {}, []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        needed = set().union(*(needs[var] for var in equation.invars if isinstance(var, Var) and var in needs))
        if name == kind and equation.invars[0].aval.shape[-1] == WIDTH:
            found.append(needed)
        if name in ("all_gather", "reduce_scatter"):
            needed = needed | {(name, id(equation))}
        needs |= dict.fromkeys(equation.outvars, needed)
    return found


def test_a_turn_sends_while_the_other_computes_forward_and_backward(monkeypatch):
    """Gathers need nothing of other devices, and a scatter needs the gathers of its own turn alone."""
    monkeypatch.setattr(chunks, "LEAST_ROWS_OF_TURN", 1)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"expert": 2}, jax.devices()[:2])
    options = dataclasses.replace(OPTIONS, moe=dataclasses.replace(OPTIONS.moe, num_experts=4, shared_experts=0))
    layer = Experts(options, 0.5, Placement(default_rules(LayoutOptions()), mesh), jnp.float32)
    x = jnp.ones((4, NUM_TOKENS, WIDTH))
    weights = meta.unbox(jax.eval_shape(layer.init, jax.random.key(2), x, jnp.int32(0), None))
    value = lambda weights, x: layer.apply(weights, x, jnp.int32(0), None)[0].sum()  # noqa: E731
    traced = jax.make_jaxpr(jax.grad(value, argnums=(0, 1)))(weights, x)
    passes = [body for body in bodies(traced.jaxpr) if needed_by(body, "reduce_scatter")]
    assert len(passes) == 2
    for body in passes:
        assert not set().union(*needed_by(body, "all_gather"))
        one, other = needed_by(body, "reduce_scatter")
        assert one
        assert len(one) == len(other)
        assert not one & other


def test_after_an_update_biases_have_moved_against_the_load_of_their_layer_and_nothing_else_has():
    task = decoder(OPTIONS, batch_size=NUM_SEQUENCES, sequence_length=NUM_TOKENS, balance_rate=0.25)
    params = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, 7.0), meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    )
    load = Load(jnp.float32([[5, 1, 2, 0, 2], [2, 2, 2, 2, 2]]))
    after = task.after_update(params, {"expert_load": load})
    bias = after["layers"]["experts"].pop("router_bias")
    np.testing.assert_array_equal(bias, [[6.75, 7.25, 7, 7.25, 7], [7] * 5])
    del params["layers"]["experts"]["router_bias"]
    jax.tree.map(np.testing.assert_array_equal, after, params)
    for options in (
        dataclasses.replace(OPTIONS, moe=dataclasses.replace(OPTIONS.moe, router="softmax")),
        dataclasses.replace(OPTIONS, moe=dataclasses.replace(OPTIONS.moe, num_experts=0)),
    ):
        assert decoder(options, batch_size=2, sequence_length=NUM_TOKENS).after_update is None


def task_and_batch(remat="none", dtype=jnp.float32):
    options = dataclasses.replace(OPTIONS, num_layers=2)
    task = decoder(options, batch_size=2, sequence_length=4, remat=RematOptions(remat), dtype=dtype)
    ints, ones = np.arange(8, dtype=np.int32).reshape(2, 4), np.ones((2, 4), np.int32)
    batch = {"tokens": ints, "targets": ints, "segment_ids": ones, "positions": ints % 4, "weights": np.float32(ones)}
    return task, {**batch, SEQUENCE_INDEX: np.arange(2, dtype=np.int32)}


@pytest.mark.parametrize("num_experts", [5, 0])
def test_training_measures_the_loss_of_an_evaluation_beside_those_of_routers(num_experts):
    options = dataclasses.replace(
        OPTIONS,
        moe=dataclasses.replace(OPTIONS.moe, num_experts=num_experts, balance_weight=0.3, z_weight=0.2),
        dropout_rate=0.0,
    )
    task = decoder(options, batch_size=2, sequence_length=4)
    _, batch = task_and_batch()
    params = meta.unbox(task.init(jax.random.key(0)))
    of_training, of_evaluation = (task.loss(params, batch, jax.random.key(0), train) for train in (True, False))
    assert of_evaluation[2] == {}
    if not num_experts:
        assert of_training[2] == {}
        return
    metrics = of_training[2]
    np.testing.assert_allclose(metrics["cross_entropy"], of_evaluation[0], rtol=1e-6)
    balance, z = (
        0.3 * options.moe.experts_per_token * metrics["balance_loss"],
        0.2 * options.num_layers * metrics["z_loss"],
    )
    np.testing.assert_allclose(of_training[0], metrics["cross_entropy"] + balance + z, rtol=1e-6)
    assert of_training[0] > 1.05 * metrics["cross_entropy"]


@pytest.mark.parametrize("policy", ["full", "save_attention", "selective", "dots"])
def test_no_policy_chooses_experts_again(policy):
    """`top_k` stands once in the traced gradients: chosen again, close scores could round the other way."""
    task, batch = task_and_batch(policy)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    loss = lambda params: task.loss(params, batch, jax.random.key(0), True)[0]  # noqa: E731
    assert str(jax.make_jaxpr(jax.grad(loss))(params)).count("top_k[") == 1


def test_routers_stay_in_float32_where_weights_compute_in_16_bits():
    task, _ = task_and_batch(dtype=jnp.bfloat16)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    cast = jax.eval_shape(task.stages.cast, params["layers"])["experts"]
    assert cast["router"].dtype == cast["router_bias"].dtype == jnp.float32
    assert cast["up"].dtype == cast["shared"]["down"].dtype == jnp.bfloat16


def test_parameters_and_work_are_counted_in_total_and_active():
    task, _ = task_and_batch()
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    idle = 2 * (5 - 2) * 3 * WIDTH * 6
    padding = 2 * (16 - 11) * WIDTH
    assert task.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params)) - padding
    assert task.num_active_parameters == task.num_parameters - idle
    embedding = 11 * WIDTH
    products = task.flops_per_token - task.attention_flops_per_token
    assert products == 6 * (task.num_active_parameters - embedding)
    assert (
        task.parameters_text
        == f"{task.num_parameters:,} parameters, of which {task.num_active_parameters:,} are active"
    )
