"""Attention on parts of sequences, exchanged between devices, against attention on whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.models.attention import blockwise, context_parallel, dot_product
from meshtrain.models.attention.attention import Attention, same_document
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.rules import AXES

BATCH_SIZE, LENGTH, HEAD_DIM = 2, 16, 4
QUERIES, TOKENS = PartitionSpec("fsdp", "context", "tensor"), PartitionSpec("fsdp", "context")


def arrays(num_heads, num_kv_heads, num_keys=LENGTH, length=LENGTH):
    """(q, k, v, cotangent)."""
    shapes = [(length, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads), (length, num_heads)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (BATCH_SIZE, *shape, HEAD_DIM)) for key, shape in zip(keys, shapes, strict=True)]


def documents_of(length):
    """Borders inside of parts, another one in each sequence."""
    place = np.arange(length)
    return jnp.asarray(np.stack([1 + (place >= 7), 1 + (place >= 3) + (place >= 10)]), jnp.int32)


def attend(q, k, v, documents, causal=True):
    mask = None if documents is None else same_document(*documents)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="xla")


def both_ways(function, given, documents):
    """(heads, gradients of q, k, v)."""
    *inputs, cotangent = given
    heads, backward = jax.vjp(lambda q, k, v: function(q, k, v, documents), *inputs)
    return heads, *backward(cotangent)


def assert_equal_to_one_device(function, given, documents, expected, **sizes):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices())
    of_tokens = None if documents is None else (TOKENS, TOKENS)
    on_mesh = on_shards(mesh, function, (QUERIES, QUERIES, QUERIES, of_tokens), QUERIES)
    found = jax.jit(functools.partial(both_ways, on_mesh))(given, documents)
    for got, wanted in zip(found, both_ways(expected, given, documents), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((8, 4), {"context": 4, "fsdp": 2}), ((8, 2), {"context": 4, "tensor": 2}), ((12, 4), {"context": 6})],
    ids=["as many", "repeated over context x tensor", "repeated where 6 divides no 4"],
)
def test_heads_are_split_in_place_of_the_sequence(heads, sizes):
    num_parts, documents = sizes["context"], documents_of(LENGTH)
    length = LENGTH // num_parts * num_parts
    given = [x[:, :length] for x in arrays(*heads)]
    documents = (documents[:, :length],) * 2
    assert_equal_to_one_device(context_parallel.by_heads(attend, ("context",)), given, documents, attend, **sizes)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("how", ["xla", "blockwise"])
def test_keys_are_gathered_where_there_is_no_head_for_each_device(how, window):
    """Documents end inside of parts, windows reach into the part before, and a block of queries sees none of a block
    of keys."""
    length, attention = 64, Attention(2, 1, HEAD_DIM, window=window)
    documents = (1 + (jnp.arange(length) >= jnp.array([[7], [32]])).astype(jnp.int32),) * 2
    expected = functools.partial(dot_product.attend, attention=attention, how="xla")
    in_blocks = functools.partial(blockwise.attend, attention=attention, name="heads", largest_block=16)
    on_parts = context_parallel.by_keys(expected if how == "xla" else in_blocks, ("context",), causal=True)
    given = arrays(2, 1, length, length)
    assert_equal_to_one_device(on_parts, given, documents, expected, context=2, fsdp=2)


def test_keys_of_a_memory_are_gathered_without_an_order():
    attend_all = functools.partial(attend, causal=False)
    documents = (documents_of(LENGTH), documents_of(24))
    on_parts = context_parallel.by_keys(attend_all, ("context",), causal=False)
    assert_equal_to_one_device(on_parts, arrays(2, 2, num_keys=24), documents, attend_all, context=8)


def test_a_memory_has_a_length_of_its_own():
    attend_all = functools.partial(attend, causal=False)
    documents = (documents_of(LENGTH), documents_of(24))
    given = arrays(4, 4, num_keys=24)
    on_parts = context_parallel.by_heads(attend_all, ("context",))
    assert_equal_to_one_device(on_parts, given, documents, attend_all, context=4)


def test_repeated_heads_add_their_cotangents_in_float32():
    """A sum of 512 ones in bfloat16 stops at 256."""
    x = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    repeated, backward = jax.vjp(lambda x: context_parallel._repeat_heads(x, 512), x)
    assert repeated.dtype == jnp.bfloat16
    assert float(backward(jnp.ones_like(repeated))[0].item()) == 512
