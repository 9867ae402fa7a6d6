"""The cross-entropy over chunks of tokens against that of all logits: numbers, collectives, products, arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.models import vocabulary
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import rules_of_level
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules

B, T, D, V = 8, 26, 16, 128
VOCAB_SIZE = 100
SEED = 4.0
# With the batch split over four, 9 tokens do not divide those of a device, 52: the last chunk is padded.
CHUNK, WHOLE = 9, B * T
RESIDUAL = ("batch", "residual_sequence", "embed")
COLLECTIVE = re.compile(r"= (\(?)(\w+\[[\d,]*\]).* (all-reduce|all-gather|reduce-scatter|all-to-all)\(")


def arrays(names, dtype=jnp.float32, length=T):
    """x, the head's weight, targets, weights of the targets; of more than T tokens the first half has no target."""
    generator = np.random.default_rng(0)
    shape = (D, V) if names == vocabulary.KERNEL else (V, D)
    x, weight = (jnp.asarray(generator.normal(size=size), dtype) for size in ((B, length, D), shape))
    targets = jnp.asarray(generator.integers(0, VOCAB_SIZE, (B, length)), jnp.int32)
    weights = jnp.asarray(generator.random((B, length)), jnp.float32)
    return x, weight, targets, weights if length == T else weights.at[:, : length // 2].set(0)


def value_and_gradients(product, chunk, *, of=(0, 1), axis=None):
    """(x, weight, targets, weights) -> SEED times the loss, and its gradients."""

    def loss(x, weight, targets, weights):
        x = vocabulary.copy_to_shards(product.placement.activation(x, RESIDUAL), axis)
        return SEED * vocabulary.CrossEntropy(VOCAB_SIZE, chunk, axis)(product, x, weight, targets, weights)

    return jax.value_and_grad(loss, argnums=of)


def expected(names, dtype=jnp.float32, cap=0.0, length=T):
    product = vocabulary.Product(Placement.single_device(), names, dtype, cap)
    return jax.jit(value_and_gradients(product, B * length))(*arrays(names, dtype, length))


def gap(got, wanted):
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def on_mesh(sizes, names, dtype=jnp.float32, *, sequence_parallel=False, level=0, length=T):
    """(compiled value and gradients over chunks, its arguments) on a mesh."""
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices())
    rules = rules_of_level(default_rules(LayoutOptions(sequence_parallel=sequence_parallel)), level)
    place = Placement(rules, mesh)
    x, weight, *rest = arrays(names, dtype, length)
    stored = NamedSharding(mesh, place.stored_spec(weight.shape, names))
    between = NamedSharding(mesh, place.activation_spec(x.shape, RESIDUAL))
    given = (jax.device_put(x, between), jax.device_put(weight, stored), *rest)
    function = value_and_gradients(vocabulary.Product(place, names, dtype), CHUNK)
    if "pipeline" in sizes:  # the manual region of the executor
        function = value_and_gradients(vocabulary.Product(place, names, dtype), CHUNK, axis="pipeline")
        whole, split = PartitionSpec(), PartitionSpec(*("pipeline" if name == "vocab" else None for name in names))
        given_specs, returned = (whole, split, whole, whole), (whole, (whole, split))
        function = place.on_shards(function, given_specs, returned, axes=frozenset({"pipeline"}))
    return jax.jit(function, out_shardings=(None, (between, stored))).lower(*given).compile(), given


@pytest.mark.parametrize("names", [vocabulary.KERNEL, vocabulary.TABLE], ids=["kernel", "table"])
@pytest.mark.parametrize("cap", [0.0, 3.0], ids=["plain", "capped"])
def test_chunks_change_neither_loss_nor_gradients(names, cap):
    product = vocabulary.Product(Placement.single_device(), names, jnp.float32, cap)
    got = jax.jit(value_and_gradients(product, CHUNK))(*arrays(names))
    wanted = expected(names, cap=cap)
    assert max(jax.tree.leaves(jax.tree.map(gap, got, wanted))) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_16_bits_gradients_have_the_roundings_of_the_whole_product(dtype):
    product = vocabulary.Product(Placement.single_device(), vocabulary.KERNEL, dtype)
    got = jax.jit(value_and_gradients(product, CHUNK))(*arrays(vocabulary.KERNEL, dtype))
    whole = expected(vocabulary.KERNEL, dtype)
    exact = value_and_gradients(vocabulary.Product(Placement.single_device(), vocabulary.KERNEL, jnp.float32), WHOLE)(
        *(x.astype(jnp.float32) if x.dtype == dtype else x for x in arrays(vocabulary.KERNEL, dtype))
    )
    for one, like, true in zip(*map(jax.tree.leaves, (got, whole, exact)), strict=True):
        assert one.dtype == like.dtype
        assert gap(one, true) < 1.1 * gap(like, true) + 1e-6


def test_float16_keeps_gradients_that_the_loss_scale_lifts():
    """Of 2^20 targets each has a gradient below 6e-8, the smallest number of float16, until it is scaled."""
    x, weight, targets, weights = arrays(vocabulary.KERNEL, jnp.float16)
    small = weights * 1e-6
    product = vocabulary.Product(Placement.single_device(), vocabulary.KERNEL, jnp.float16)
    loss = lambda x, w, chunk: 2.0**20 * vocabulary.CrossEntropy(VOCAB_SIZE, chunk)(product, x, w, targets, small)  # noqa: E731
    got, wanted = (jax.jit(jax.grad(functools.partial(loss, chunk=n), (0, 1)))(x, weight) for n in (CHUNK, WHOLE))
    assert max(jax.tree.leaves(jax.tree.map(gap, got, wanted))) < 0.02


MESHES = [
    pytest.param(
        {"pipeline": 2, "fsdp": 2, "tensor": 2}, vocabulary.KERNEL, jnp.float32, {}, id="pipeline2-fsdp2-tensor2"
    ),
    pytest.param({"fsdp": 4, "tensor": 2}, vocabulary.KERNEL, jnp.float32, {}, id="fsdp4-tensor2"),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, vocabulary.TABLE, jnp.float32, {"level": 3}, id="zero3-table"),
    pytest.param(
        {"context": 2, "fsdp": 2, "tensor": 2},
        vocabulary.KERNEL,
        jnp.bfloat16,
        {"sequence_parallel": True, "length": 28},
        id="sequence-bf16",
    ),
]


@pytest.mark.parametrize("sizes, names, dtype, how", MESHES)
def test_a_mesh_changes_no_number_and_reduces_the_weight_once(sizes, names, dtype, how):
    compiled, given = on_mesh(sizes, names, dtype, **how)
    # Parts of sums over shards are rounded to the dtype.
    bound = 1e-6 if dtype == jnp.float32 else 1e-2
    wanted = expected(names, dtype, length=given[0].shape[1])
    assert max(jax.tree.leaves(jax.tree.map(gap, compiled(*given), wanted))) < bound
    text = compiled.as_text()
    entry = text[text.index("ENTRY") :]
    # In the loop: the largest logit, and normalizer with the target's logit, of each token. Nothing as large as x.
    inside = [match for line in text.replace(entry, "").splitlines() if (match := COLLECTIVE.search(line))]
    sizes_inside = [np.prod([int(n) for n in re.findall(r"\d+", found[2].partition("[")[2])]) for found in inside]
    assert sizes_inside
    assert max(sizes_inside) <= 2 * CHUNK
    kinds = [match[3] for line in entry.splitlines() if (match := COLLECTIVE.search(line))]
    # The weight's gradient, over each of its dims that is stored in shards, and with sequence parallelism that of x.
    assert kinds.count("reduce-scatter") == 1 + bool(how)


@pytest.mark.parametrize("names", [vocabulary.KERNEL, vocabulary.TABLE], ids=["kernel", "table"])
def test_the_whole_product_gathers_its_weight_after_the_cast(names):
    """Two products read the gathered weight; the partitioner would gather float32 and cast the result."""
    place = Placement(default_rules(LayoutOptions()), make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": 8}, jax.devices()))
    x, weight, *rest = arrays(names)
    stored = NamedSharding(place.mesh, place.stored_spec(weight.shape, names))
    product = vocabulary.Product(place, names, jnp.float16)
    loss = lambda x, w: value_and_gradients(product, WHOLE)(x.astype(jnp.float16), w.astype(jnp.float16), *rest)  # noqa: E731
    given = x, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=stored)
    text = jax.jit(loss).lower(*given).compile().as_text()
    found = [match for line in text.splitlines() if (match := COLLECTIVE.search(line))]
    assert {match[2].partition("[")[0] for match in found if match[3] == "all-gather"} == {"f16"}


def products(jaxpr):
    """How many matrix products a jaxpr has, loops and calls included."""
    return len(re.findall(r"\bdot_general\b", str(jaxpr)))


def test_gradients_cost_three_products_and_a_frozen_weight_two():
    product = vocabulary.Product(Placement.single_device(), vocabulary.KERNEL, jnp.float32)
    given = arrays(vocabulary.KERNEL)
    assert products(jax.make_jaxpr(value_and_gradients(product, CHUNK))(*given)) == 3
    assert products(jax.make_jaxpr(value_and_gradients(product, CHUNK, of=0))(*given)) == 2
    loss = functools.partial(vocabulary.CrossEntropy(VOCAB_SIZE, CHUNK), product)
    assert products(jax.make_jaxpr(loss)(*given)) == 1


def test_no_array_holds_the_logits_of_more_than_a_chunk():
    """Shapes of the traced program, so that no compiler's choice matters."""
    product = vocabulary.Product(Placement.single_device(), vocabulary.KERNEL, jnp.float32)
    text = str(jax.make_jaxpr(value_and_gradients(product, CHUNK))(*arrays(vocabulary.KERNEL)))
    found = [[int(n) for n in shape.split(",")] for shape in re.findall(r"\w\d+\[([\d,]+)\]", text)]
    tokens = [int(np.prod(shape)) // V for shape in found if shape[-1] == V and shape != [D, V]]
    assert tokens
    assert max(tokens) <= CHUNK


@pytest.mark.parametrize(
    "num_tokens, num_columns, dtype, chunk, wanted",
    [
        pytest.param(16 * 8192, 128256, jnp.bfloat16, 0, 64, id="by memory: 2,048 tokens of 128 k columns"),
        pytest.param(16 * 8192, 128256, jnp.float32, 0, 128, id="in float32 half as many"),
        pytest.param(16 * 8192, 128256 // 8, jnp.bfloat16, 0, 8, id="columns of a shard"),
        pytest.param(32 * 512, 257, jnp.float32, 0, 1, id="small logits stay whole"),
        pytest.param(96, 128, jnp.float32, 32, 3, id="as asked"),
        pytest.param(96, 128, jnp.float32, 40, 3, id="at most as asked, and equal"),
        pytest.param(97, 128, jnp.float32, 32, 4, id="a prime is padded"),
        pytest.param(96, 128, jnp.float32, 1000, 1, id="more than there are"),
    ],
)
def test_the_number_of_chunks(num_tokens, num_columns, dtype, chunk, wanted):
    assert vocabulary.num_chunks(num_tokens, num_columns, dtype, chunk) == wanted
