"""Paths and sizes of the leaves of a tree."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from meshtrain.sharding.trees import leaves_with_paths, num_bytes, path_text

pytestmark = pytest.mark.quick


class Moments(NamedTuple):
    first: dict
    count: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict


def test_paths_name_dicts_sequences_namedtuples_and_dataclasses():
    tree = State({"layers": {"mlp": [1, 2]}, "moments": Moments({"kernel": 3}, 4)})
    assert leaves_with_paths(tree) == [
        ("params/layers/mlp/0", 1),
        ("params/layers/mlp/1", 2),
        ("params/moments/first/kernel", 3),
        ("params/moments/count", 4),
    ]


def test_leaves_stand_in_the_order_of_tree_leaves():
    tree = {"b": 1, "a": {"d": 2, "c": 3}}
    assert [leaf for _, leaf in leaves_with_paths(tree)] == jax.tree.leaves(tree)
    assert path_text(jax.tree_util.tree_flatten_with_path(tree)[0][0][0]) == "a/c"


@pytest.mark.parametrize(
    "shape, dtype, expected",
    [((), jnp.float32, 4), ((3, 5), jnp.bfloat16, 30), ((0, 4), jnp.int32, 0), ((7,), jnp.uint8, 7)],
)
def test_num_bytes(shape, dtype, expected):
    assert num_bytes(jax.ShapeDtypeStruct(shape, dtype)) == expected
