"""A problem of a configuration is dropped only if its option, or an option that led to it, is wrong itself."""

import dataclasses
import itertools

import pytest

from meshtrain.cli import flags
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError
from meshtrain.sharding import mesh

SCHEMA = flags.schema(Config())
SIMILAR = [(part, key) for part, key in itertools.permutations(SCHEMA, 2) if part in key]
WRONG = {int: "many", float: "many", bool: "perhaps"}


def lines(overrides):
    with pytest.raises(UserError) as caught:
        resolve({}, overrides, reads_data=False)
    return caught.value.problems


def wrong(key):
    """Returns a text that an option does not accept."""
    return WRONG[SCHEMA[key].kind] if SCHEMA[key].kind in WRONG else "no/such\0value"


def reported_across(monkeypatch, problem):
    """Lets a check across options report this problem."""
    monkeypatch.setattr(mesh, "check", lambda options: [problem])


def test_there_are_options_whose_keys_contain_other_keys():
    assert len(SIMILAR) >= 8
    assert ("model.moe.router", "model.moe.router_groups") in SIMILAR


@pytest.mark.parametrize(("part", "key"), SIMILAR)
def test_a_wrong_option_hides_no_problem_of_an_option_with_a_similar_key(part, key, monkeypatch):
    problem = Problem(key, got=1, allowed=2, nearest=2)
    reported_across(monkeypatch, problem)
    found = lines({part: wrong(part)})
    assert [one.key for one in found] == [part, key]
    assert found[1] == problem


@pytest.mark.parametrize(("part", "key"), SIMILAR)
def test_a_problem_that_depends_on_a_wrong_option_is_dropped(part, key, monkeypatch):
    reported_across(monkeypatch, Problem("mesh", got=1, allowed=2, depends_on=[part]))
    assert [one.key for one in lines({part: wrong(part)})] == [part]
    assert [one.key for one in lines({key: wrong(key)})] == [key, "mesh"]


def test_a_value_in_place_of_a_group_hides_the_problems_of_its_options(monkeypatch):
    reported_across(monkeypatch, Problem("mesh.data", got=1, allowed=2))
    assert [one.key for one in lines({"mesh": "3"})] == ["mesh"]
    assert [one.key for one in lines({"mesh.dat": "3"})] == ["mesh.dat", "mesh.data"]


def test_two_problems_of_experts_are_reported():
    found = lines({"model.moe.num_experts": "8", "model.moe.router_groups": "3", "model.moe.router": "sigmod"})
    assert found == (
        "model.moe.router: got 'sigmod'; allowed: softmax, sigmoid; did you mean 'sigmoid'?",
        "model.moe.router_groups: got 3; allowed: a divisor of model.moe.num_experts = 8; nearest: 4",
    )


def test_options_that_problems_depend_on_exist(monkeypatch):
    """`depends_on` compares exactly, so that a misspelt key would have no effect."""
    known = {*SCHEMA, *(field.name for field in dataclasses.fields(Config))}
    of_experts = {"model.moe.num_experts": "8", "model.moe.router_groups": "3"}
    for problem in lines(
        of_experts
        | {
            "model.num_kv_heads": "3",
            "batch_size": "7",
            "mesh.data": "2",
            "mesh.pipeline": "3",
            "model.dropout_rate": "1",
        }
    ):
        assert problem.key in known
        assert problem.depends_on <= known
