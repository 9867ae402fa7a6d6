"""What the backward pass computes again, counted in compiled programs: less memory, more work, the same numbers."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models import remat
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.sharding.rules import AXES, LayoutOptions

NUM_LAYERS, BATCH, LENGTH, EMBED, MLP = 4, 8, 128, 64, 512
CONFIG = Config(
    batch_size=BATCH,
    sequence_length=LENGTH,
    model=DecoderOptions(
        num_layers=NUM_LAYERS, embed_dim=EMBED, mlp_dim=MLP, num_heads=4, num_kv_heads=4, vocab_size=128,
        dropout_rate=0.1,
    ),
    optimizer=OptimizerOptions(name="sgd"),
)  # fmt: skip
INPUT_BYTES = 4 * BATCH * LENGTH * EMBED  # of a layer


@functools.cache
def assembled(options, **axes):
    shape = dict.fromkeys(AXES, 1) | axes
    num_devices = int(np.prod(list(shape.values())))
    return assemble(dataclasses.replace(CONFIG, remat=options), shape, jax.devices()[:num_devices])


@functools.cache
def temporary_bytes(options):
    assembly = assembled(options)
    compiled = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def num_products(options):
    """Matrix products in the traced step, each as often as it runs."""

    def count(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            inside = sum(count(inner) for inner in jaxprs_in_params(equation.params))
            total += equation.primitive.name == "dot_general"
            total += inside * equation.params["length"] if equation.primitive.name == "scan" else inside
        return total

    assembly = assembled(options)
    return count(assembly.steps.train.trace(assembly.state, assembly.batch).jaxpr.jaxpr)


@pytest.mark.parametrize(
    ("policy", "axes", "sequence_parallel", "expected"),
    [
        ("full", {"tensor": 2}, True, False),
        ("save_attention", {"tensor": 2}, True, False),
        ("save_attention", {"tensor": 2}, False, True),
        ("selective", {"tensor": 2}, True, True),
        ("full", {"tensor": 2, "fsdp": 2}, True, True),  # weights are gathered: most of what is sent
    ],
)
def test_loops_gather_early_unless_that_repeats_a_sum(policy, axes, sequence_parallel, expected):
    config = dataclasses.replace(CONFIG, remat=RematOptions(policy), layout=LayoutOptions(sequence_parallel))
    num_devices = int(np.prod(list(axes.values())))
    assembly = assemble(config, dict.fromkeys(AXES, 1) | axes, jax.devices()[:num_devices])
    assert assembly.steps.compiling.gathers_early is expected


def test_each_policy_keeps_less_and_computes_more_than_the_one_before():
    names = ("none", "selective", "dots", "save_attention", "full")
    none, selective, dots, attention, full = (RematOptions(name) for name in names)
    kept = [temporary_bytes(options) for options in (none, dots, attention, full)]
    assert kept == sorted(kept, reverse=True)
    # Of each layer: heads before the output projection, as large as its input.
    assert kept[2] - kept[3] == pytest.approx(NUM_LAYERS * INPUT_BYTES, rel=0.3)
    # Of nine products in a layer's forward pass (q, k, v, scores, values, output, gate, up, down) the last is not
    # needed again; heads that are kept save the values' product; policy dots keeps all but scores and values.
    policies = (selective, dots, attention, full)
    again = [(num_products(options) - num_products(none)) / NUM_LAYERS for options in policies]
    assert again == [1, 2, 7, 8]


@pytest.mark.parametrize("policy", ["full", pytest.param("save_attention", marks=pytest.mark.slow)])
def test_every_second_layer_costs_half(policy):
    each, half, none = RematOptions(policy), RematOptions(policy, every=2), RematOptions("none")
    products = [num_products(options) for options in (none, half, each)]
    assert products[1] - products[0] == products[2] - products[1] > 0
    kept = [temporary_bytes(options) for options in (none, half, each)]
    assert kept[0] - kept[1] > 0.3 * (kept[0] - kept[2])
    assert kept[1] - kept[2] > 0.3 * (kept[0] - kept[2])


def step(options, **axes):
    assembly = assembled(options, **axes)
    generator = np.random.default_rng(1)
    draw = {
        "tokens": generator.integers(0, 100, (BATCH, LENGTH)),
        "targets": generator.integers(0, 100, (BATCH, LENGTH)),
        "segment_ids": 1 + (np.arange(LENGTH) > 40) * np.ones((BATCH, 1)),
        "positions": np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH)),
        "weights": np.ones((BATCH, LENGTH)),
    }
    batch = {name: jax.device_put(draw[name].astype(x.dtype), x.sharding) for name, x in assembly.batch.items()}
    state, metrics = assembly.steps.train(assembly.steps.init(jax.random.key_data(jax.random.key(0))), batch)
    return jax.device_get((state.params, metrics["loss"]))


def test_layers_one_after_another_are_the_same_numbers_without_a_loop_over_them():
    loop, unrolled = RematOptions(), RematOptions(unroll=True)
    assert temporary_bytes(unrolled) < 0.95 * temporary_bytes(loop)
    (params, loss), (expected, expected_loss) = step(unrolled, data=2, fsdp=2), step(loop)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)


@pytest.mark.parametrize("unroll", [False, True])
def test_gradients_that_are_reduced_layer_by_layer_keep_an_unrolled_stack(unroll):
    assembly = assembled(RematOptions(unroll=unroll), data=2)
    text = str(assembly.steps.train.trace(assembly.state, assembly.batch).jaxpr)
    assert ("while[" in text) != unroll


def test_what_is_recomputed_stays_a_loop():
    assert temporary_bytes(RematOptions("full", unroll=True)) == temporary_bytes(RematOptions("full"))


FAST = ["none-fsdp", "selective-expert", "dots-pipeline", "save_attention-fsdp", "full-pipeline", "offload-fsdp"]
FLAG_CASES = [
    pytest.param(policy, axis, id=f"{policy}-{axis}", marks=[] if f"{policy}-{axis}" in FAST else [pytest.mark.slow])
    for policy in ("none", "selective", "dots", "save_attention", "full", "offload")
    for axis in ("fsdp", "expert", "pipeline")
    if (policy, axis) != ("offload", "pipeline")  # an error
]


@pytest.mark.parametrize("policy, axis", FLAG_CASES)
def test_the_flag_changes_no_program(policy, axis):
    """JAX's other implementation of `jax.checkpoint` decides nothing: the lowered step has the same text."""
    moe = MoeOptions(num_experts=2, experts_per_token=1, expert_dim=8) if axis == "expert" else MoeOptions()
    model = DecoderOptions(num_layers=2, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=16, moe=moe)
    config = Config(
        batch_size=8, sequence_length=8, accumulation_steps=2 if axis == "pipeline" else 1, model=model,
        optimizer=OptimizerOptions(name="sgd"), remat=RematOptions(policy),
    )  # fmt: skip
    texts, before = [], jax.config.jax_remat3
    try:
        for flag in (False, True):
            jax.config.update("jax_remat3", flag)
            assembly = assemble(config, dict.fromkeys(AXES, 1) | {axis: 2}, jax.devices()[:2])
            texts.append(assembly.steps.train.lower(assembly.state, assembly.batch).as_text())
    finally:
        jax.config.update("jax_remat3", before)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, axes",
    [
        (RematOptions("save_attention", every=4), {"data": 2, "fsdp": 2, "tensor": 2}),
        (RematOptions("offload", every=2), {"data": 2, "fsdp": 2}),
    ],
    ids=str,
)
def test_no_number_changes(options, axes):
    """Of each policy the fast tests show this in tests/parity, where no group has more than two layers."""
    (params, loss), (expected, expected_loss) = step(options, **axes), step(RematOptions("none"))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)


@pytest.mark.parametrize(
    "options, num_stages, words",
    [
        (RematOptions("full", every=3), 1, ["remat.every: got 3", "a divisor of model.num_layers = 8", "nearest: 4"]),
        (RematOptions("full", every=4), 4, ["remat.every: got 4", "divisor of the 2 layers of a chunk", "nearest: 2"]),
        (RematOptions("full", every=2), 4, []),
        (RematOptions("offload"), 2, ["remat.policy: got offload with mesh.pipeline = 2", "nearest: full"]),
        (RematOptions("full", every=4), 1, []),
        (RematOptions("full"), 4, []),
        (RematOptions("full", every=3), 3, ["the 3 layers of a chunk and of model.num_layers = 8", "nearest: 1"]),
    ],
)
def test_what_does_not_fit(options, num_stages, words):
    found = remat.check(options, 8, num_stages, in_chunk=-(-8 // num_stages) if num_stages > 1 else 0)
    assert len(found) == bool(words)
    assert all(word in line for line in found for word in words)
