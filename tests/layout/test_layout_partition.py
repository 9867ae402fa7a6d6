"""The sharding of one array from its logical axes and the rules."""

from typing import NamedTuple

import jax
import pytest
from jax.sharding import PartitionSpec

from meshtrain.layout.axes import AXES
from meshtrain.layout.mesh import make_mesh
from meshtrain.layout.partition import activation_sharding, is_names, problems, spec
from meshtrain.layout.rules import LayoutOptions, default_rules

RULES = default_rules(LayoutOptions())


def mesh_of(**axes):
    return make_mesh(dict.fromkeys(AXES, 1) | axes, jax.devices())


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


def test_nothing_is_said_about_a_placement_that_can_be_had():
    assert problems("w", (8, 8), ("embed", "mlp"), RULES.parameters, mesh_of(fsdp=4, tensor=2).shape) == []


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
