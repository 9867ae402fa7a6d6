"""Specs of stored arrays, and what is said where a placement cannot be had."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshtrain.layout.mesh import make_mesh
from meshtrain.layout.partition import activation_sharding, is_names, placements, problems, spec
from meshtrain.layout.rules import LayoutOptions, Rule, default_rules, extend
from meshtrain.words.errors import UserError

RULES = default_rules(LayoutOptions())


def mesh_of(data=1, pipeline=1, fsdp=1, tensor=1):
    return make_mesh({"data": data, "pipeline": pipeline, "fsdp": fsdp, "tensor": tensor}, jax.devices())


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lines(tree, axes, rules=RULES, mesh=None):
    with pytest.raises(UserError) as error:
        placements(tree, axes, rules, mesh or mesh_of(pipeline=2, fsdp=2, tensor=2))
    return list(error.value.problems)


class Moments(NamedTuple):
    first: dict
    count: jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    "names, sizes, expected",
    [
        (("layers", "embed", "mlp"), {"pipeline": 2, "fsdp": 2, "tensor": 2}, ("pipeline", "fsdp", "tensor")),
        (("vocab", "embed"), {"pipeline": 2, "tensor": 4}, (("pipeline", "tensor"),)),
        (("vocab", "embed"), {"tensor": 4}, ("tensor",)),
        (("layers", "heads", "head_dim", "embed"), {"fsdp": 4, "tensor": 2}, (None, "tensor", None, "fsdp")),
        (("layers", "norm"), {"data": 8}, ()),
        ((None, None), {"fsdp": 8}, ()),
    ],
)
def test_a_spec_holds_the_large_axes_only(names, sizes, expected):
    placed = spec("w", (8,) * len(names), names, RULES.parameters, mesh_of(**sizes).shape)
    assert placed == PartitionSpec(*expected)
    assert len(placed) == len(expected)


def test_a_tree_keeps_its_structure():
    params = {"up": array(4, 8, 16), "scale": array(8)}
    names = {"up": ("layers", "embed", "mlp"), "scale": ("norm",)}
    tree = (Moments(params, array()), [params])
    placed = placements(tree, (Moments(names, ()), [names]), RULES, mesh_of(fsdp=2, tensor=4))
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    assert placed[0].first["up"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert placed[1][0]["scale"].spec == placed[0].count.spec == PartitionSpec()


def test_a_size_that_does_not_divide_names_path_shape_rule_axis_and_the_nearest():
    (line,) = lines({"mlp": {"up": array(8, 101)}}, {"mlp": {"up": ("embed", "mlp")}}, mesh=mesh_of(tensor=8))
    assert line == (
        "mlp/up: shape (8, 101): dim 1 has size 101, and rule 'mlp' splits it over tensor (size 8); "
        "allowed: multiples of 8; nearest: 104, or tensor=1"
    )
    (line,) = lines({"kv": array(8, 2, 4)}, {"kv": ("embed", "kv_heads", "head_dim")}, mesh=mesh_of(tensor=8))
    assert "nearest: 8, or tensor=2" in line
    (line,) = lines({"table": array(6, 8)}, {"table": ("vocab", "embed")})
    assert "over pipeline (size 2) x tensor (size 2); allowed: multiples of 4" in line
    assert "or pipeline x tensor = 3" in line


def test_an_unknown_name_gets_the_nearest():
    (line,) = lines({"w": array(8, 8)}, {"w": ("embd", None)})
    assert line.startswith("w: shape (8, 8): logical axis of dim 0: got 'embd'; allowed: batch, ")
    assert line.endswith("did you mean 'embed'?")


def test_one_mesh_axis_for_two_dims_is_refused_on_every_mesh():
    for mesh in (mesh_of(), mesh_of(fsdp=8)):
        (line,) = lines({"w": array(8, 8)}, {"w": ("embed", "embed")}, mesh=mesh)
        assert f"mesh axis 'fsdp' (size {mesh.shape['fsdp']}) would split both dim 0 'embed' and dim 1 'embed'" in line
        assert line.endswith("nearest: ('embed', None)")
    (line,) = lines({"w": array(8, 8)}, {"w": ("mlp", "heads")})
    assert "dim 0 'mlp' and dim 1 'heads'" in line


def test_a_rank_that_differs_is_refused():
    assert "nearest: ('embed', None)" in lines({"w": array(8, 8)}, {"w": ("embed",)})[0]
    assert "nearest: ('embed',)" in lines({"w": array(8)}, {"w": ("embed", "mlp")})[0]
    assert "for 0 dims" in lines({"w": array()}, {"w": ("embed",)})[0]


@pytest.mark.parametrize("axes", [{}, {"w": None}, {"w": "embed"}])
def test_an_array_without_a_tuple_of_axes_is_refused(axes):
    (line,) = lines({"w": array(8, 8)}, axes)
    assert line.startswith("w: shape (8, 8): ")
    assert "nearest: (None, None)" in line


def test_axes_without_an_array_are_refused():
    (line,) = lines({"kernel": array(8)}, {"kernel": ("embed",), "kernal": ("embed",)})
    assert line.startswith("kernal: got logical axes ('embed',), but there is no such array")
    assert "did you mean 'kernel'" in line


def test_a_users_rule_has_to_match_an_array():
    rules = extend(RULES, Rule("expert", ("tensor",)), Rule("frames", (), ("data",)))
    tree, names = {"w": array(8, 8)}, {"w": ("embed", "mlp")}
    (line,) = lines(tree, names, rules)
    assert line == "rule 'expert' -> tensor (size 2): matches no array; allowed: embed, mlp"
    assert placements({"w": array(8)}, {"w": ("expert",)}, rules, mesh_of(tensor=8))["w"].spec == PartitionSpec(
        "tensor"
    )


def test_all_problems_of_a_tree_come_together():
    tree = {"a": array(3, 8), "b": array(8), "c": array(8)}
    found = lines(tree, {"a": ("mlp", "hed"), "b": ("embed", None)})
    assert [line.split(":")[0] for line in found] == ["a", "a", "b", "c"]


def test_nothing_is_said_about_a_placement_that_can_be_had():
    assert problems("w", (8, 8), ("embed", "mlp"), RULES.parameters, mesh_of(fsdp=4, tensor=2).shape) == []


def test_a_batch_is_split_over_data_and_fsdp():
    home = activation_sharding((8, 16), ("batch", "sequence"), RULES, mesh_of(data=2, fsdp=2, tensor=2))
    assert home.spec == PartitionSpec(("data", "fsdp"))
    assert home.shard_shape((8, 16)) == (2, 16)


def test_containers_are_not_axes():
    assert is_names(("layers", None))
    assert is_names(())
    assert not is_names(Moments((), ()))
    assert not is_names((1, 2))
    assert not is_names(["layers"])
    assert not is_names(jax.ShapeDtypeStruct((1,), "float32"))
