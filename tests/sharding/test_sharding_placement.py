"""Constraints as the compiler sees them: under jit, and inside a shard_map with some axes manual.

Each test looks at the sharding of the compiled result, which the partitioner would choose otherwise without them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.errors import UserError
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend

pytestmark = pytest.mark.quick

RULES = default_rules(LayoutOptions())
PARALLEL = default_rules(LayoutOptions(sequence_parallel=True))


def mesh_of(**axes):
    return make_mesh(dict.fromkeys(AXES, 1) | axes, jax.devices())


def compiled_sharding(function, x, home, mesh):
    argument = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*home)))
    return jax.jit(function).lower(argument).compile().output_shardings


def lives_in(sharding, spec, x, mesh):
    return sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), x.ndim)


def manual(function, mesh, axes, spec):
    return jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(*spec), out_specs=PartitionSpec(*spec), axis_names=axes,
        check_vma=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "rules, names, spec",
    [
        (RULES, ("batch", "sequence", "embed"), (("data", "fsdp"),)),
        (RULES, ("batch", "residual_sequence", "embed"), (("data", "fsdp"),)),
        (PARALLEL, ("batch", "residual_sequence", "embed"), (("data", "fsdp"), "tensor")),
        (PARALLEL, ("batch", "sequence", "mlp"), (("data", "fsdp"), None, "tensor")),
        (RULES, (None, None, "vocab"), (None, None, "tensor")),
    ],
)
def test_jit_holds_an_activation(rules, names, spec):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    placement = Placement(rules, mesh)
    x = jnp.zeros((8, 8, 8))
    # The argument is split the other way, so propagation alone cannot give the answer.
    found = compiled_sharding(lambda x: placement.activation(x * 2, names), x, (None, None, ("tensor", "data")), mesh)
    assert lives_in(found, spec, x, mesh), found


def test_jit_gathers_a_weight_over_fsdp_and_keeps_tensor():
    mesh = mesh_of(fsdp=4, tensor=2)
    placement = Placement(RULES, mesh)
    w = jnp.zeros((8, 8))
    stored = ("fsdp", "tensor")
    assert lives_in(compiled_sharding(lambda w: w * 2, w, stored, mesh), stored, w, mesh)
    found = compiled_sharding(lambda w: placement.weight(w * 2, ("embed", "mlp")), w, stored, mesh)
    assert lives_in(found, (None, "tensor"), w, mesh), found


def test_a_weight_is_gathered_where_nothing_else_is_split():
    mesh = mesh_of(fsdp=8)
    placement = Placement(RULES, mesh)
    w = jnp.zeros((8, 8))
    found = compiled_sharding(lambda w: placement.weight(w * 2, ("embed", "mlp")), w, ("fsdp",), mesh)
    assert lives_in(found, (), w, mesh), found


@pytest.mark.parametrize("axes, spec", [({"pipeline"}, ("pipeline",)), ({"data", "pipeline"}, (("data", "pipeline"),))])
def test_a_manual_axis_is_left_out_and_the_others_hold(axes, spec):
    mesh = mesh_of(data=2, pipeline=2, tensor=2)
    placement = Placement(RULES, mesh)
    x = jnp.zeros((8, 8, 8))
    inside = manual(lambda x: placement.activation(x * 2, ("batch", "sequence", "mlp")), mesh, axes, spec)
    found = compiled_sharding(inside, x, (), mesh)
    # Where data is left to the partitioner, it splits the batch further, within a pipeline stage's part.
    first = ("pipeline", "data") if axes == {"pipeline"} else ("data", "pipeline")
    assert lives_in(found, (first, None, "tensor"), x, mesh), found


@pytest.mark.parametrize("axes", [{"pipeline"}, {"data", "pipeline"}])
def test_a_weight_is_gathered_inside_a_shard_map(axes):
    mesh = mesh_of(pipeline=2, fsdp=2, tensor=2)
    placement = Placement(RULES, mesh)
    w = jnp.zeros((8, 8))
    stored = (("pipeline", "tensor"), "fsdp")
    kept = manual(lambda w: w * 2, mesh, axes, ("pipeline",))
    assert lives_in(compiled_sharding(kept, w, stored, mesh), stored, w, mesh)
    inside = manual(lambda w: placement.weight(w * 2, ("vocab", "embed")), mesh, axes, ("pipeline",))
    found = compiled_sharding(inside, w, stored, mesh)
    assert lives_in(found, (("pipeline", "tensor"),), w, mesh), found


def test_values_and_gradients_are_the_same_inside_scan_remat_and_shard_map():
    mesh = mesh_of(data=2, pipeline=2, tensor=2)
    names = ("batch", "sequence", "embed")

    def blocks(placement, ws, x):
        def block(x, w):
            w = placement.weight(w, ("embed", "mlp"))
            hidden = placement.activation(jnp.tanh(x @ w), ("batch", "sequence", "mlp"))
            return placement.activation(hidden @ w.T, names), None

        return jax.lax.scan(jax.checkpoint(block), x, ws)[0]

    draw = np.random.default_rng(0)
    ws = draw.normal(size=(2, 8, 16), scale=0.2).astype(np.float32)
    x = draw.normal(size=(4, 4, 8)).astype(np.float32)

    def loss(placement):
        def local(ws, x):
            out, pull = jax.vjp(lambda ws: jnp.sum(blocks(placement, ws, x) ** 2), ws)
            return out[None], pull(jnp.ones(()))[0]

        return local

    expected_loss, expected_grads = jax.jit(
        lambda ws, x: jax.tree.map(lambda *parts: jnp.concatenate(parts), *(
            loss(Placement.single_device())(ws[i : i + 1], x) for i in range(2)
        ))
    )(ws, x)  # fmt: skip
    split = PartitionSpec("pipeline")
    run = jax.shard_map(
        loss(Placement(RULES, mesh)), mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=(split, split),
        axis_names={"pipeline"}, check_vma=False,
    )  # fmt: skip
    found_loss, found_grads = jax.jit(run)(ws, x)
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(found_grads, expected_grads, rtol=1e-5, atol=1e-6)


def test_an_activation_that_cannot_be_split_is_refused_while_tracing():
    placement = Placement(RULES, mesh_of(data=8))
    x = jax.ShapeDtypeStruct((6, 8), jnp.float32)
    with pytest.raises(UserError, match=r"activation \('batch', None\): shape \(6, 8\): dim 0 has size 6"):
        jax.eval_shape(lambda x: placement.activation(x, ("batch", None)), x)
    with pytest.raises(UserError, match="got 1 logical axes"):
        jax.eval_shape(lambda x: placement.activation(x, ("batch",)), x)
    with pytest.raises(UserError, match="did you mean 'embed'"):
        jax.eval_shape(lambda x: placement.weight(x, (None, "embd")), x)


def test_one_device_is_told_nothing_and_still_checks_names():
    placement = Placement(RULES, mesh_of())
    x = jnp.zeros((4, 4))
    assert placement.activation(x, ("batch", "embed")) is x
    assert placement.weight(x, ("embed", "mlp")) is x
    with pytest.raises(UserError, match="got 'bach'"):
        placement.activation(x, ("bach", "embed"))
    nowhere = Placement.single_device()
    assert nowhere.activation(x, ("batch", "embed")) is x
    assert nowhere.weight(x, ("embed", "mlp")) is x


def test_a_users_rule_reaches_activations():
    mesh = mesh_of(tensor=8)
    placement = Placement(extend(RULES, Rule("frames", (), ("tensor",))), mesh)
    x = jnp.zeros((8, 8))
    found = compiled_sharding(lambda x: placement.activation(x * 2, ("frames", None)), x, (), mesh)
    assert lives_in(found, ("tensor",), x, mesh), found


def test_a_cotangent_is_held_and_its_value_is_not():
    mesh = mesh_of(data=2, tensor=4)
    placement = Placement(PARALLEL, mesh)
    x, names = jnp.zeros((8, 8, 8)), ("batch", "sequence", "embed")
    along_sequence = ("data", "tensor")
    held = lambda x: placement.cotangent(x, names) * 1.0  # noqa: E731
    value = compiled_sharding(held, x, along_sequence, mesh)
    cotangent = compiled_sharding(lambda cotangent: jax.vjp(held, x)[1](cotangent)[0], x, along_sequence, mesh)
    assert lives_in(value, along_sequence, x, mesh), value
    assert lives_in(cotangent, ("data",), x, mesh), cotangent
