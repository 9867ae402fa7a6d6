"""Trees as text."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from meshtrain.layout.trees import leaves_with_paths, num_bytes, path_text
from meshtrain.words.tables import aligned, format_bytes


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


@pytest.mark.parametrize(
    "n, expected",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (24 * 1024**2, "24 MiB"),
        (int(31.44 * 1024**3), "31.4 GiB"),
        (int(314.4 * 1024**3), "314 GiB"),
        (2 * 1024**4, "2 TiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_bytes_are_short_and_exact_where_they_can_be(n, expected):
    assert format_bytes(n) == expected


def test_columns_are_aligned_without_trailing_blanks():
    text = aligned([("a", "1", "x"), ("bbb", "22", "")], ("name", "n", "note"), align="<>")
    assert text.split("\n") == ["name   n  note", "----  --  ----", "a      1  x", "bbb   22"]
