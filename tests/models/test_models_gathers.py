"""What a layer gathers over the tensor axis, in its compiled forward and backward pass.

b: sequences of a replica, T: tokens a sequence, D: embed dim.
"""

import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.models.transformer.decoder import DecoderOptions, Layer, angles_of
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.shapes import dims
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import spec
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules
from tests.plan.counted import gathered_twice

MESH = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}
BATCH, LENGTH, WIDTH = 4, 32, 64  # b, T, D
OPTIONS = DecoderOptions(num_layers=1, embed_dim=WIDTH, mlp_dim=64, num_heads=4, num_kv_heads=2, vocab_size=64)


def program():
    mesh = make_mesh(MESH, jax.devices())
    rules = default_rules(LayoutOptions(sequence_parallel=True))
    placement = Placement(rules, mesh)
    layer = Layer(OPTIONS, placement, jnp.float32, True)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    given = (jnp.zeros((), jnp.int32), jax.random.split(jax.random.key(0), BATCH), angles_of(OPTIONS, positions))

    def apply(params, x):
        return layer.apply({"params": params}, x, *given, None, None)[0]

    def on_shards(leaf, column, names):
        where = NamedSharding(mesh, spec("", leaf.shape, names, column, MESH))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    x = jax.ShapeDtypeStruct((2 * BATCH, LENGTH, WIDTH), jnp.float32)
    init = lambda x: layer.init(jax.random.key(0), x, *given, None, None)["params"]  # noqa: E731
    boxed = jax.eval_shape(init, jnp.zeros((BATCH, LENGTH, WIDTH)))
    is_boxed = lambda leaf: isinstance(leaf, meta.AxisMetadata)  # noqa: E731
    params = jax.tree.map(lambda leaf: on_shards(leaf.value, rules.parameters, leaf.names), boxed, is_leaf=is_boxed)
    x = on_shards(x, rules.activations, ("batch", "residual_sequence", "embed"))

    def gradients(params, x, cotangent):
        return jax.vjp(apply, params, x)[1](cotangent)

    # Inside a manual axis, as replicas and stages run it: there the compiler does not merge equal gathers.
    whole, split = PartitionSpec(), PartitionSpec("data")
    gradients = placement.on_shards(gradients, (whole, split, split), (whole, split), axes=frozenset({"data"}))
    return parse.read(jax.jit(gradients).lower(params, x, x).compile().as_text())


def test_no_operand_is_gathered_twice():
    """The normed inputs, and the cotangents of the two row-parallel products, which two products each read."""
    found = program()
    gathers = [line for line, _, _ in found.instructions("all-gather") if dims(line.shape)[1:] == (LENGTH, WIDTH)]
    assert len(gathers) == 4
    assert gathered_twice(found) == []
