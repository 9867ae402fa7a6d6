"""The meshes that are compared, the parts of a mesh that differs, and the cuts of a large model."""

import itertools
import math

import pytest

from meshtrain.agree import covering
from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.config.smaller import problems_of
from meshtrain.sharding.rules import AXES

DECODER = {"model.num_layers": "8", "model.embed_dim": "64", "batch_size": "32"}


def test_the_covering_set_combines_each_pair_of_axes():
    config, _ = covering.cut(resolve(default(), DECODER), set(), 8, [])
    chosen = covering.covering(config, 8, dict.fromkeys(AXES, 1), all_devices=False)
    assert len(chosen.cases) == covering.MOST_MESHES
    pairs = {
        pair
        for one in chosen.cases
        for pair in itertools.combinations([axis for axis in AXES if one.shape[axis] > 1], 2)
    }
    every = set(itertools.combinations(AXES, 2))
    told = {tuple(text.split(" with ")) for text in chosen.missing if text.count(" with ") == 1}
    assert pairs >= every - told
    assert len(told & every) <= 3
    assert [one for one in chosen.cases if one.shape["data"] == math.prod(one.shape.values())], "data alone"
    assert not [one.name for one in chosen.cases if problems_of(one.config, one.shape)]
    names = " ".join(one.name for one in chosen.cases)
    for option in ("accumulation_steps=2", "zero.level=3", "sequence_parallel=true", "schedule="):
        assert option in names, names


def test_several_processes_have_meshes_of_all_devices_only():
    chosen = covering.covering(resolve(default(), DECODER), 4, None, all_devices=True)
    assert {math.prod(one.shape.values()) for one in chosen.cases} == {4}


def test_the_parts_of_a_mesh_have_one_axis_each_and_no_other_option():
    config = resolve(default(), {**DECODER, "accumulation_steps": "2", "mesh.data": "2", "mesh.tensor": "2"})
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    names = [one.name for one in covering.single_axes(covering.case(config, shape))]
    assert names == ["data 2", "tensor 2", "data 2 x tensor 2"]
    assert {one.config.accumulation_steps for one in covering.single_axes(covering.case(config, shape))} == {1}


def test_a_large_model_is_cut_and_each_cut_is_listed():
    given = {"model.num_layers": "32", "batch_size": "512", "sequence_length": "4096", "model.window": "64"}
    config = resolve(default(), {**given, "model.global_every": "3"})
    smaller, texts = covering.cut(config, set(), 8, [])
    assert smaller.model.num_layers == 6, "a multiple of global_every"
    assert (smaller.batch_size, smaller.sequence_length) == (16, 128)
    assert texts == ["model.num_layers 32 -> 6", "batch_size 512 -> 16", "sequence_length 4096 -> 128"]
    same, texts = covering.cut(config, {"model.num_layers", "batch_size", "sequence_length"}, 8, [])
    assert (same, texts) == (config, [])


@pytest.mark.parametrize("data, batch_size", [(2, 16), (3, 48)])
def test_a_cut_batch_stays_divisible_by_the_meshes_that_the_user_names(data, batch_size):
    config = resolve(default(), {**DECODER, "batch_size": "96"})
    smaller, _ = covering.cut(config, set(), 8, [dict.fromkeys(AXES, 1) | {"data": data}])
    assert smaller.batch_size == batch_size
