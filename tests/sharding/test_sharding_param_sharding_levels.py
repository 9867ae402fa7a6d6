"""Which dim the replicas share, and what the levels cost, as formulas and as the compiler's own argument bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import ParamSharding, ZeroOptions, level_problems, param_sharding
from meshtrain.sharding.rules import LayoutOptions, default_rules
from tests.sharding.conftest import shape_of

MODEL = DecoderOptions(
    num_layers=4, embed_dim=64, mlp_dim=128, num_heads=8, num_kv_heads=8, vocab_size=128, vocab_multiple=128
)
CONFIG = Config(batch_size=16, sequence_length=16, model=MODEL, optimizer=OptimizerOptions(name="adam", clip_norm=0.0))
RULES = default_rules(LayoutOptions())


def test_contradictions_are_named():
    assert level_problems(ZeroOptions(), 8, 1) == []
    assert level_problems(ZeroOptions(strategy="full_shard", level=3), 8, 1) == []
    (line,) = level_problems(ZeroOptions(level=4), 8, 1)
    assert line == "zero.level: got 4; allowed: 0 to 3; nearest: 3"
    (line,) = level_problems(ZeroOptions(level=1, strategy="full_shard"), 8, 1)
    assert "zero.level: got 1 with zero.strategy = full_shard, which is level 3" in line
    (line,) = level_problems(ZeroOptions(strategy="hybrid_shard"), 8, 1)
    assert "mesh.fsdp = 1" in line
    assert level_problems(ZeroOptions(strategy="hybrid_shard"), 2, -1) == []


def test_words_of_other_frameworks():
    words = {"no_shard": (0, False), "shard_grad_op": (3, True), "full_shard": (3, False), "hybrid_shard": (0, False)}
    for word, (level, keeps) in words.items():
        options = ZeroOptions(strategy=word)
        assert (options.effective_level, options.keeps_gathered) == (level, keeps)


def bytes_on_one_device(tree):
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def moments(opt_state):
    (adam,) = (part for part in jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
    return adam.mu, adam.nu


@pytest.mark.parametrize("level, words", [(0, 12), (1, 4 + 8 / 8)])
def test_bytes_on_each_of_eight_replicas(level, words):
    """Float32 parameters and Adam's two moments, P of each: 12 P at level 0, 4 P + 8 P / n at level 1."""
    config = dataclasses.replace(CONFIG, zero=ZeroOptions(level=level))
    assembly = assemble(config, shape_of(data=8), jax.devices())
    state, num_parameters = assembly.state, assembly.task.num_parameters
    expected = words * num_parameters
    assert bytes_on_one_device((state.params, moments(state.opt_state))) == expected
    compiled = assembly.steps.train.lower(state, assembly.batch).compile()
    as_compiled, _ = compiled.input_shardings[0]
    placed = lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)  # noqa: E731
    homes = jax.tree.map(placed, state, as_compiled)
    assert bytes_on_one_device((homes.params, moments(homes.opt_state))) == expected
    rest = bytes_on_one_device(assembly.batch)
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(expected + rest, rel=1e-3)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_gradients_are_reduced_over_data_and_get_their_sharding(level, shape):
    mesh = make_mesh(shape_of(**shape), jax.devices())
    weight = param_sharding((16, 8), ("embed", "mlp"), RULES, mesh.shape, level)
    replicas = GradientSync(mesh, weight, level)
    x = jax.random.normal(jax.random.key(0), (32, 16))
    y = jax.random.normal(jax.random.key(1), (32, 8))

    def compute(_, batch, key_data):
        x, y = batch
        first, second = (replicas.part(x[i].T @ y[i], weight) for i in (slice(0, None, 2), slice(1, None, 2)))
        return jnp.float32(x.shape[0]), replicas.zeros(jnp.zeros((16, 8)), weight) + first + second

    run = jax.jit(replicas.data_parallel(compute))
    num_sequences, found = run(jnp.zeros((16, 8)), (x, y), jax.random.key_data(jax.random.key(2)))
    assert num_sequences == 32
    np.testing.assert_allclose(found, x.T @ y, rtol=1e-5, atol=1e-5)
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, weight.moment), 2)


def test_gradients_may_cross_in_bfloat16_and_come_out_in_float32():
    mesh = make_mesh(shape_of(data=2), jax.devices()[:2])
    replicas = GradientSync(mesh, ParamSharding.same(PartitionSpec(), 1), wire_dtype=jnp.bfloat16)
    found = np.array([[1 + 2**-9, 3.0], [2.0, 2**-12]], np.float32)

    def compute(_, batch, key_data):
        return jnp.float32(0), batch[0]

    _, total = jax.jit(replicas.data_parallel(compute))(jnp.zeros(2), found, jax.random.key_data(jax.random.key(0)))
    assert total.dtype == jnp.float32
    # 1 + 2^-9 has no place in bfloat16 and becomes 1; each sum is rounded once more, or not at all.
    assert total.tolist() == [3.0, 3.0]
