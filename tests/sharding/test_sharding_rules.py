"""The table of rules."""

import pytest

from meshtrain.errors import UserError
from meshtrain.sharding.rules import LayoutOptions, Rule, Rules, default_rules, extend


def test_weights_are_gathered_over_storage_axes_and_keep_tensor():
    rules = default_rules(LayoutOptions())
    assert rules.parameters["embed"] == ("fsdp", "expert", "context")
    assert rules.gathered["embed"] == ()
    assert rules.gathered["mlp"] == rules.parameters["mlp"] == ("tensor",)
    assert rules.gathered["vocab"] == ("pipeline", "tensor")


def test_sequence_parallelism_splits_the_residual_stream_alone():
    plain, parallel = (default_rules(LayoutOptions(sequence_parallel=on)) for on in (False, True))
    assert plain.activations["residual_sequence"] == ("context",)
    assert parallel.activations["residual_sequence"] == ("context", "tensor")
    assert parallel.activations["sequence"] == ("context",)
    assert parallel.parameters == plain.parameters


def test_a_users_rule_joins_the_table_or_takes_a_place_in_it():
    rules = extend(default_rules(LayoutOptions()), Rule("rows", ("tensor",)), Rule("mlp", ("fsdp",)))
    assert rules.parameters["rows"] == ("tensor",)
    assert rules.parameters["mlp"] == ("fsdp",)
    assert rules.own == ("rows", "mlp")
    assert len(rules.entries) == len(default_rules(LayoutOptions()).entries) + 1


def test_every_fault_of_a_table_is_reported_at_once():
    with pytest.raises(UserError) as error:
        Rules((Rule("a", ("tensr",)), Rule("a", ("fsdp", "fsdp"))), storage_axes=("pipe",))
    twice, typo, repeated, storage = error.value.problems
    assert "rule 'a': stands twice" in twice or "rule 'a': stands twice" in typo
    assert "got 'tensr'" in twice + typo
    assert "did you mean 'tensor'" in twice + typo
    assert "'fsdp' 2 times" in repeated
    assert "nearest: ('fsdp',)" in repeated
    assert storage.startswith("storage axis: got 'pipe'")
