"""Where stored arrays live at every ZeRO level."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshtrain.layout.axes import AXES
from meshtrain.layout.rules import LayoutOptions, Rule, default_rules, extend
from meshtrain.layout.stored import stored, stored_tree

RULES = default_rules(LayoutOptions())


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


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
