"""Where stored arrays live at every ZeRO level."""

from typing import NamedTuple

import jax
import pytest
from jax.sharding import PartitionSpec

from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import (
    activation_sharding,
    array_problems,
    is_names,
    param_sharding,
    param_shardings,
    spec,
    split_further,
)
from meshtrain.sharding.rules import LayoutOptions, Rule, default_rules, extend
from tests.sharding.conftest import array, shape_of

pytestmark = pytest.mark.quick

RULES = default_rules(LayoutOptions())


def mesh_of(**axes):
    return make_mesh(shape_of(**axes), jax.devices())


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
    specs = param_sharding(shape, names, RULES, shape_of(**mesh), level)
    by_rules, over_data = PartitionSpec(*by_rules), PartitionSpec(*over_data)
    expected = tuple(over_data if level >= first else by_rules for first in (3, 2, 1))
    assert (specs.parameter, specs.gradient, specs.moment) == expected
    assert (specs.data_dim != 0) == (over_data != by_rules)


def test_a_rule_that_splits_a_weight_over_data_leaves_nothing_to_the_level():
    rules = extend(RULES, Rule("mlp", ("data",)))
    for level in range(4):
        specs = param_sharding((64, 32), ("embed", "mlp"), rules, shape_of(data=8), level)
        assert specs.parameter == specs.gradient == specs.moment == PartitionSpec(None, "data")
        assert specs.data_dim == 0


def test_a_tree_keeps_its_structure():
    params = {"up": array(4, 8, 16), "scale": array(8)}
    names = {"up": ("layers", "embed", "mlp"), "scale": ("norm",)}
    tree = (Moments(params, array()), [params])
    specs = param_shardings(tree, (Moments(names, ()), [names]), RULES, shape_of(fsdp=2, tensor=4), 0)
    assert jax.tree.structure(specs) == jax.tree.structure(tree)
    assert specs[0].first["up"].parameter == PartitionSpec(None, "fsdp", "tensor")
    assert specs[1][0]["scale"].parameter == specs[0].count.parameter == PartitionSpec()


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


def test_nothing_is_said_about_a_placement_that_can_be_had():
    assert array_problems("w", (8, 8), ("embed", "mlp"), RULES.parameters, mesh_of(fsdp=4, tensor=2).shape) == []


def test_a_batch_is_split_over_data_and_fsdp():
    sharding = activation_sharding((8, 16), ("batch", "sequence"), RULES, mesh_of(data=2, fsdp=2, tensor=2))
    assert sharding.spec == PartitionSpec(("data", "fsdp"))
    assert sharding.shard_shape((8, 16)) == (2, 16)


def test_containers_are_not_axes():
    assert is_names(("layers", None))
    assert is_names(())
    assert not is_names(Moments((), ()))
    assert not is_names((1, 2))
    assert not is_names(["layers"])
    assert not is_names(jax.ShapeDtypeStruct((1,), "float32"))


def test_an_axis_goes_to_the_first_dim_that_it_divides_or_to_none():
    mesh_shape, there = {"fsdp": 2, "pipeline": 4}, PartitionSpec("fsdp")
    assert split_further(there, (8, 6), ("pipeline",), mesh_shape) == PartitionSpec(("fsdp", "pipeline"))
    assert split_further(there, (4, 12), ("pipeline",), mesh_shape) == PartitionSpec("fsdp", "pipeline")
    assert split_further(there, (4, 6), ("pipeline",), mesh_shape) == there
