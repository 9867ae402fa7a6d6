"""What may change when a run is started again."""

import dataclasses

import pytest

from meshtrain.cli import flags
from meshtrain.config.resume import FIXED_ON_RESUME, FREE_ON_RESUME, difference, is_free
from meshtrain.config.schema import Config

pytestmark = pytest.mark.quick

KEYS = list(flags.flatten(dataclasses.asdict(Config())))


def names(table):
    return [name for names in table.values() for name in names]


def nested(key, value):
    *groups, last = key.split(".")
    return {groups[0]: {last: value}} if groups else {last: value}


@pytest.mark.parametrize(
    "key",
    [
        "accumulation_steps", "data.path", "model.attention", "model.loss_chunk", "precision.deterministic",
        "mesh.tensor", "num_steps",
    ],
)  # fmt: skip
def test_what_changes_no_number_is_no_difference(key):
    assert difference(nested(key, 1), nested(key, 2)) == []


@pytest.mark.parametrize(
    "key", ["seed", "model.num_layers", "data.packing", "precision.policy", "learning_rate.peak", "reduction.name"]
)
def test_what_makes_another_run_is_named(key):
    assert difference(nested(key, 1), nested(key, 2)) == [f"{key}: was 1, now 2"]


def test_an_option_without_effect_may_change():
    sgd = {"name": "sgd", "momentum": 0.9}
    assert difference({"optimizer": sgd}, {"optimizer": {**sgd, "beta1": 0.5}}) == []
    assert difference({"optimizer": {**sgd, "beta1": 0.5}}, {"optimizer": sgd}) == []
    assert difference({"optimizer": {"beta1": 0.9}}, {"optimizer": {"beta1": 0.5}}) == [
        "optimizer.beta1: was 0.9, now 0.5"
    ]
    assert difference({"optimizer": sgd}, {"optimizer": {"name": "adam", "beta1": 0.5}})[0].startswith("optimizer.name")


def test_compression_stays_although_one_device_does_not_use_it():
    was, now = ({"reduction": {"name": name}} for name in ("int8", "topk"))
    assert difference(was, now) == ['reduction.name: was "int8", now "topk"']


def test_every_option_is_decided_and_every_name_is_an_option():
    both = [*names(FREE_ON_RESUME), *names(FIXED_ON_RESUME)]
    assert len(set(both)) == len(both)
    undecided = [key for key in KEYS if not any(key == name or key.startswith(f"{name}.") for name in both)]
    assert not undecided, "name them in one of the two tables of config/resume.py"
    unknown = [name for name in both if not any(key == name or key.startswith(f"{name}.") for key in KEYS)]
    assert not unknown


def test_an_option_that_no_table_names_is_fixed():
    assert not is_free("brand_new")
