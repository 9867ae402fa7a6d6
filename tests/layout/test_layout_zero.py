"""Which dim the replicas share, and what the levels cost, as formulas and as the compiler's own argument bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.assemble import assemble
from meshtrain.config.config import Config
from meshtrain.layout.axes import AXES
from meshtrain.layout.mesh import make_mesh
from meshtrain.layout.replicas import Home, Replicas
from meshtrain.layout.zero import ZeroOptions, dim_over_data, over_data, problems
from meshtrain.models.decoder import DecoderOptions
from meshtrain.optim.optimizers import OptimizerOptions

MODEL = DecoderOptions(
    num_layers=4, embed_dim=64, mlp_dim=128, num_heads=8, num_kv_heads=8, vocab_size=128, vocab_multiple=128
)
CONFIG = Config(batch_size=16, sequence_length=16, model=MODEL, optimizer=OptimizerOptions(name="adam", clip_norm=0.0))
WORD = 4


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


@pytest.mark.parametrize(
    "spec, shape, names, mesh, after",
    [
        ((), (64, 32), ("embed", "mlp"), {"data": 8}, ("data",)),
        (("fsdp",), (64, 32), ("embed", "mlp"), {"data": 4, "fsdp": 2}, (("fsdp", "data"),)),
        (("fsdp", "tensor"), (8, 64), (None, None), {"data": 4, "fsdp": 4, "tensor": 2}, ("fsdp", ("tensor", "data"))),
        (("pipeline",), (8, 64, 3), ("layers", "embed", None), {"data": 8, "pipeline": 2}, ("pipeline", "data")),
        ((), (8, 6, 10), ("layers", "embed", "mlp"), {"data": 4}, ()),
        ((), (64, 32), ("embed", "mlp"), {}, ()),
    ],
)  # fmt: skip
def test_first_dim_that_divides_is_split_layers_apart(spec, shape, names, mesh, after):
    spec = PartitionSpec(*spec)
    dim = dim_over_data(spec, shape, names, sizes(**mesh))
    assert over_data(spec, len(shape), dim) == PartitionSpec(*after)


def test_contradictions_are_named():
    assert problems(ZeroOptions(), 8, 1) == []
    assert problems(ZeroOptions(strategy="full_shard", level=3), 8, 1) == []
    (line,) = problems(ZeroOptions(level=4), 8, 1)
    assert line == "zero.level: got 4; allowed: 0 to 3; nearest: 3"
    (line,) = problems(ZeroOptions(level=1, strategy="full_shard"), 8, 1)
    assert "zero.level: got 1 with zero.strategy = full_shard, which is level 3" in line
    (line,) = problems(ZeroOptions(strategy="hybrid_shard"), 8, 1)
    assert "mesh.fsdp = 1" in line
    assert problems(ZeroOptions(strategy="hybrid_shard"), 2, -1) == []


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


@pytest.mark.parametrize("level, words", [(0, 12), (1, 4 + 8 / 8), (2, 4 + 8 / 8), (3, 12 / 8)])
def test_bytes_on_each_of_eight_replicas(level, words):
    """Float32 parameters and Adam's two moments, P of each: 12 P, 4 P + 8 P / n, 4 P + 8 P / n, 12 P / n."""
    config = dataclasses.replace(CONFIG, zero=ZeroOptions(level=level))
    assembly = assemble(config, sizes(data=8), jax.devices())
    state, num_parameters = assembly.state, assembly.task.num_parameters
    expected = words * num_parameters
    assert bytes_on_one_device((state.params, moments(state.opt_state))) == expected
    if level in (0, 1):
        compiled = assembly.train_step.lower(state, assembly.batch).compile()
        as_compiled, _ = compiled.input_shardings[0]
        placed = lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)  # noqa: E731
        homes = jax.tree.map(placed, state, as_compiled)
        assert bytes_on_one_device((homes.params, moments(homes.opt_state))) == expected
        rest = bytes_on_one_device(assembly.batch)
        assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(expected + rest, rel=1e-3)


@pytest.mark.parametrize("level, words", [(0, 4), (1, 4), (2, 4 / 8)])
def test_bytes_of_the_accumulator(level, words):
    config = dataclasses.replace(CONFIG, zero=ZeroOptions(level=level))
    assembly = assemble(config, sizes(data=8), jax.devices())
    params = assembly.state.params
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    dims = jax.tree.map(
        lambda leaf: dim_over_data(leaf.sharding.spec, leaf.shape, (None,) * leaf.ndim, sizes(data=8)), params
    )
    homes = jax.tree.map(lambda leaf, spec, dim: Home(spec, leaf.ndim, dim), params, specs, dims)
    zeros = jax.eval_shape(lambda: Replicas(assembly.mesh, homes, level).zeros(params, homes))
    assert sum(leaf.size for leaf in jax.tree.leaves(zeros)) * WORD == words * assembly.task.num_parameters


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_what_replicas_found_is_summed_and_lands_where_it_belongs(level, shape):
    mesh = make_mesh(sizes(**shape), jax.devices())
    spec = PartitionSpec("fsdp", "tensor")
    home = Home(spec, 2, dim_over_data(spec, (16, 8), ("embed", "mlp"), mesh.shape))
    replicas = Replicas(mesh, home, level)
    x = jax.random.normal(jax.random.key(0), (32, 16))
    y = jax.random.normal(jax.random.key(1), (32, 8))

    def compute(_, batch, key_data):
        x, y = batch
        first, second = (replicas.part(x[i].T @ y[i], home) for i in (slice(0, None, 2), slice(1, None, 2)))
        return jnp.float32(x.shape[0]), replicas.zeros(jnp.zeros((16, 8)), home) + first + second

    run = jax.jit(replicas.data_parallel(compute))
    num_sequences, found = run(jnp.zeros((16, 8)), (x, y), jax.random.key_data(jax.random.key(2)))
    assert num_sequences == 32
    np.testing.assert_allclose(found, x.T @ y, rtol=1e-5, atol=1e-5)
    expected = over_data(spec, 2, home.dim if level else 0)
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, expected), 2)


def test_gradients_may_cross_in_bfloat16_and_come_out_in_float32():
    mesh = make_mesh(sizes(data=2), jax.devices()[:2])
    home = Home(PartitionSpec(), 1)
    replicas = Replicas(mesh, home, wire_dtype=jnp.bfloat16)
    found = np.array([[1 + 2**-9, 3.0], [2.0, 2**-12]], np.float32)

    def compute(_, batch, key_data):
        return jnp.float32(0), batch[0]

    _, total = jax.jit(replicas.data_parallel(compute))(jnp.zeros(2), found, jax.random.key_data(jax.random.key(0)))
    assert total.dtype == jnp.float32
    # 1 + 2^-9 has no place in bfloat16 and becomes 1; each sum is rounded once more, or not at all.
    assert total.tolist() == [3.0, 3.0]
