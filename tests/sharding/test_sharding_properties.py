"""What holds for any logical axes, shapes, meshes and ZeRO levels: what is stored divides, each fix is right."""

import ast
import math
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from meshtrain.errors import UserError
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import (
    GRADIENTS_LEVEL,
    MAX_LEVEL,
    MOMENTS_LEVEL,
    PARAMETERS_LEVEL,
    STACKED,
    array_problems,
    axes_in,
    axes_of_dims,
    num_parts,
    param_sharding,
    rules_of_level,
)
from meshtrain.sharding.rules import AXES, DATA, LayoutOptions, default_rules
from meshtrain.sharding.tree_problems import tree_problems

pytestmark = pytest.mark.quick

RULES = default_rules(LayoutOptions())
KNOWN = tuple(RULES.parameters)
SIZES = (1, 2, 3, 4, 6, 8, 12, 24, 48)
LEVELS = st.integers(0, MAX_LEVEL)
MISSPELT = ("embd", "head", "mpl")
# Meshes of up to eight devices that there are, and of others that are not.
SMALL = st.lists(st.sampled_from(AXES), max_size=3).map(lambda axes: {axis: 2 ** axes.count(axis) for axis in AXES})
ANY = st.fixed_dictionaries({axis: st.sampled_from((1, 1, 2, 3, 8)) for axis in AXES})


@st.composite
def weights(draw, names=KNOWN):
    """(shape, logical axes) of an array of up to four dims."""
    dims = draw(st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from((None, *names))), max_size=4))
    return tuple(size for size, _ in dims), tuple(name for _, name in dims)


@settings(max_examples=400)
@given(weights(), ANY, LEVELS)
def test_what_is_stored_divides_and_uses_no_mesh_axis_twice(weight, mesh, level):
    shape, names = weight
    if array_problems("w", shape, names, RULES.parameters, mesh):
        with pytest.raises(UserError):
            param_sharding(shape, names, RULES, mesh, level)
        return
    home = param_sharding(shape, names, RULES, mesh, level)
    by_rules = [tuple(axis for axis in RULES.parameters.get(name, ()) if mesh[axis] > 1) for name in names]
    free = [
        dim - len(shape)
        for dim, (size, axes) in enumerate(zip(shape, by_rules, strict=True))
        if names[dim] not in STACKED and size % (num_parts(axes, mesh) * mesh[DATA]) == 0
    ]
    assert home.data_dim == (free[0] if free and mesh[DATA] > 1 else 0), "the first dim that data divides"
    firsts = {PARAMETERS_LEVEL: home.parameter, GRADIENTS_LEVEL: home.gradient, MOMENTS_LEVEL: home.moment}
    for first, spec in firsts.items():
        dims, used = axes_of_dims(spec, len(shape)), axes_in(spec)
        assert len(set(used)) == len(used)
        assert all(size % num_parts(axes, mesh) == 0 for size, axes in zip(shape, dims, strict=True))
        assert (DATA in used) == (home.data_dim != 0 and level >= first)
        assert [tuple(axis for axis in axes if axis != DATA) for axes in dims] == by_rules


def mended(line, shape, names, mesh):
    """(shape, names, mesh) for each fix that a line names."""
    if misspelt := re.search(r"dim (\d+): got '.*; did you mean '(\w+)'\?$", line):
        dim, name = int(misspelt[1]), misspelt[2]
        return [(shape, (*names[:dim], name, *names[dim + 1 :]), mesh)]
    _, _, fixes = line.partition("; nearest: ")
    if fixes.startswith("("):
        return [(shape, ast.literal_eval(fixes), mesh)]
    found = []
    for fix in fixes.split(", or "):
        if size := re.fullmatch(r"\d+", fix):
            dim = int(re.search(r"dim (\d+) has size", line)[1])
            found.append(((*shape[:dim], int(size[0]), *shape[dim + 1 :]), names, mesh))
        elif of_shape := re.fullmatch(r"w of shape (\(.*\))", fix):
            found.append((ast.literal_eval(of_shape[1]), names, mesh))
        elif not fix.startswith("a dim with the logical axis"):
            axes, product = re.split(r" ?= ?", fix)
            one, *others = [axis.removeprefix("mesh.") for axis in axes.split(" x ")]
            found.append((shape, names, {**mesh, **dict.fromkeys(others, 1), one: int(product)}))
    return found


def subject(line):
    """What a line is about, whatever the sizes are."""
    what = r"dim \d+ has size|^mesh\.\w+: got|axis of dim \d+: got|both dim \d+ .* and dim \d+|axes .* for \d+ dims"
    return re.search(what, line)[0]


def of_array(shape, names, mesh, level):
    return array_problems("w", shape, names, rules_of_level(RULES, level).parameters, mesh)


def of_tree(shape, names, mesh, level):
    tree = jax.ShapeDtypeStruct(shape, np.float32)
    return tree_problems({"w": tree}, {"w": names}, rules_of_level(RULES, level), mesh, level)


@pytest.mark.parametrize("problems", [of_array, of_tree])
@settings(max_examples=200)
@given(weights((*KNOWN, *MISSPELT)), ANY, LEVELS, st.sampled_from((0, 0, 0, -1, 1)))
def test_each_fix_of_a_refusal_mends_its_line_and_one_after_another_all(problems, weight, mesh, level, missing):
    shape, names = weight
    now = shape, ((*names, "norm") if missing > 0 else names[: len(names) + missing]), mesh
    for _ in range(12):
        lines = problems(*now, level)
        if not lines:
            return
        for line in lines:
            for fixed in mended(line, *now):
                assert subject(line) not in map(subject, problems(*fixed, level)), (line, fixed)
        now = mended(lines[0], *now)[0]
    raise AssertionError(f"never accepted: {lines}")


@settings(max_examples=60)
@given(weights(), SMALL, LEVELS)
def test_sharded_and_gathered_again_an_array_is_the_same(weight, mesh, level):
    shape, names = weight
    if array_problems("w", shape, names, RULES.parameters, mesh):
        return
    home, devices = param_sharding(shape, names, RULES, mesh, level), jax.devices()[: math.prod(mesh.values())]
    here, value = make_mesh(mesh, devices), np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    moved = value
    for spec in (home.parameter, home.gradient, home.moment, home.parameter):
        moved = jax.device_put(moved, NamedSharding(here, spec))
        parts = num_parts(axes_in(spec), mesh)
        assert all(shard.data.size * parts == value.size for shard in moved.addressable_shards)
        assert len({str(shard.index) for shard in moved.addressable_shards}) == parts
        np.testing.assert_array_equal(moved, value)
