"""Where stored arrays live at every ZeRO level, and what is said where the rules cannot be followed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshtrain.layout.axes import AXES
from meshtrain.layout.rules import LayoutOptions, Rule, default_rules, extend
from meshtrain.layout.stored import stored, stored_tree
from meshtrain.words.errors import UserError

RULES = default_rules(LayoutOptions())


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lines(tree, axes, rules=RULES, mesh=None):
    with pytest.raises(UserError) as error:
        stored_tree(tree, axes, rules, mesh or sizes(pipeline=2, fsdp=2, tensor=2), 0)
    return list(error.value.problems)


class Moments(NamedTuple):
    first: dict
    count: jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    "shape, names, mesh, by_rules, over_data",
    [
        ((64, 32), ("embed", "mlp"), {"data": 8}, (), ("data",)),
        ((64, 32), ("embed", "mlp"), {"data": 4, "fsdp": 2}, ("fsdp",), (("fsdp", "data"),)),
        ((4, 64), ("embed", "mlp"), {"data": 4, "fsdp": 4, "tensor": 2}, ("fsdp", "tensor"),
         ("fsdp", ("tensor", "data"))),
        ((8, 64, 3), ("layers", "embed", None), {"data": 8, "pipeline": 2}, ("pipeline",), ("pipeline", "data")),
        ((2, 8, 6), ("chunks", "layers", "norm"), {"data": 2}, (), (None, None, "data")),
        ((8, 6, 10), ("layers", "embed", "mlp"), {"data": 4}, (), ()),
        ((64, 32), ("embed", "mlp"), {}, (), ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_data_splits_the_first_dim_that_divides_of_what_the_level_says(shape, names, mesh, by_rules, over_data, level):
    specs = stored(shape, names, RULES, sizes(**mesh), level)
    by_rules, over_data = PartitionSpec(*by_rules), PartitionSpec(*over_data)
    expected = tuple(over_data if level >= first else by_rules for first in (3, 2, 1))
    assert (specs.parameter, specs.gradient, specs.moment) == expected
    assert (specs.data_dim != 0) == (over_data != by_rules)


def test_a_rule_that_splits_a_weight_over_data_leaves_nothing_to_the_level():
    rules = extend(RULES, Rule("mlp", ("data",)))
    for level in range(4):
        specs = stored((64, 32), ("embed", "mlp"), rules, sizes(data=8), level)
        assert specs.parameter == specs.gradient == specs.moment == PartitionSpec(None, "data")
        assert specs.data_dim == 0


def test_a_tree_keeps_its_structure():
    params = {"up": array(4, 8, 16), "scale": array(8)}
    names = {"up": ("layers", "embed", "mlp"), "scale": ("norm",)}
    tree = (Moments(params, array()), [params])
    specs = stored_tree(tree, (Moments(names, ()), [names]), RULES, sizes(fsdp=2, tensor=4), 0)
    assert jax.tree.structure(specs) == jax.tree.structure(tree)
    assert specs[0].first["up"].parameter == PartitionSpec(None, "fsdp", "tensor")
    assert specs[1][0]["scale"].parameter == specs[0].count.parameter == PartitionSpec()


def test_a_size_that_does_not_divide_names_path_shape_rule_axis_and_the_nearest():
    (line,) = lines({"mlp": {"up": array(8, 101)}}, {"mlp": {"up": ("embed", "mlp")}}, mesh=sizes(tensor=8))
    assert line == (
        "mlp/up: shape (8, 101): dim 1 has size 101, and rule 'mlp' splits it over tensor (size 8); "
        "allowed: multiples of 8; nearest: 104, or tensor=1"
    )
    (line,) = lines({"kv": array(8, 2, 4)}, {"kv": ("embed", "kv_heads", "head_dim")}, mesh=sizes(tensor=8))
    assert "nearest: 8, or tensor=2" in line
    (line,) = lines({"table": array(6, 8)}, {"table": ("vocab", "embed")})
    assert "over pipeline (size 2) x tensor (size 2); allowed: multiples of 4" in line
    assert "or pipeline x tensor = 3" in line


def test_an_unknown_name_gets_the_nearest():
    (line,) = lines({"w": array(8, 8)}, {"w": ("embd", None)})
    assert line.startswith("w: shape (8, 8): logical axis of dim 0: got 'embd'; allowed: batch, ")
    assert line.endswith("did you mean 'embed'?")


def test_one_mesh_axis_for_two_dims_is_refused_on_every_mesh():
    for mesh in (sizes(), sizes(fsdp=8)):
        (line,) = lines({"w": array(8, 8)}, {"w": ("embed", "embed")}, mesh=mesh)
        assert f"mesh axis 'fsdp' (size {mesh['fsdp']}) would split both dim 0 'embed' and dim 1 'embed'" in line
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
    specs = stored_tree({"w": array(8)}, {"w": ("expert",)}, rules, sizes(tensor=8), 0)
    assert specs["w"].parameter == PartitionSpec("tensor")


def test_all_problems_of_a_tree_come_together():
    tree = {"a": array(3, 8), "b": array(8), "c": array(8)}
    found = lines(tree, {"a": ("mlp", "hed"), "b": ("embed", None)})
    assert [line.split(":")[0] for line in found] == ["a", "a", "b", "c"]
