"""The axes' roles, the table of rules, and that a seventh axis is one record."""

import os
import pathlib
import subprocess
import sys

import pytest

from meshtrain.errors import UserError
from meshtrain.sharding.rules import (
    LayoutOptions,
    Rule,
    Rules,
    batch_axes,
    default_rules,
    expert_axes,
    extend,
    model_axes,
    partitioned_axes,
    sequence_axes,
    storage_axes,
)

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]

SEVENTH_AXIS = """
from meshtrain.sharding import rules

seventh = rules.Axis("share", "parts of a share", splits_batch=True, stores_weights=True)
rules.AXIS_RECORDS = (*rules.AXIS_RECORDS[:2], seventh, *rules.AXIS_RECORDS[2:])
rules.AXES = tuple(axis.name for axis in rules.AXIS_RECORDS)

from meshtrain import explain
from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.config.__main__ import main
from meshtrain.errors import UserError

main([])
try:
    resolve(default(), {"mesh.share": "3", "mesh.data": "2"})
except UserError as error:
    print(*error.problems, sep="\\n")
explain.main(["--config=configs/tiny.py", "--config.mesh.data=2", "--config.mesh.share=2", "--config.mesh.fsdp=2"])
"""


def test_roles():
    assert batch_axes() == ("data", "fsdp", "expert")
    assert sequence_axes() == ("context",)
    assert expert_axes() == ("expert",)
    assert storage_axes() == ("fsdp", "expert", "context")
    assert model_axes() == ("pipeline", "tensor")
    assert partitioned_axes() == ("fsdp", "expert", "context", "tensor")


def test_experts_stay_split_where_other_weights_are_gathered():
    rules = default_rules(LayoutOptions())
    assert rules.parameters["experts"] == rules.gathered["experts"] == expert_axes()
    assert rules.parameters["expert_embed"] == ("fsdp", "context")
    assert rules.gathered["expert_embed"] == rules.gathered["embed"] == ()


def test_a_seventh_axis_is_one_record():
    """Options, checks, mesh, placements, explain's table and picture know it; nothing but the record is edited."""
    wide = {**os.environ, "COLUMNS": "120"}  # pytest sets 80 columns, at which the texts of options are wrapped
    done = subprocess.run(
        [sys.executable, "-c", SEVENTH_AXIS], capture_output=True, text=True, cwd=ROOT, env=wide, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (option,) = (line for line in lines if line.startswith("mesh.share "))
    assert option.endswith("parts of a share; -1: the remaining devices")
    (refused,) = (line for line in lines if line.startswith("batch_size: got"))
    assert "a multiple of 6 = mesh.data 2 x mesh.share 3 x mesh.fsdp 1 x 1 microbatches" in refused
    assert any("data 2 x share 2 x fsdp 2: 8 x cpu" in line for line in lines)
    (up,) = (line for line in lines if line.startswith("params/layers/mlp/up "))
    assert up.split()[-5:-2] == ["-", "share+fsdp", "-"]
    picture = lines[lines.index("8 devices = data 2 x share 2 x fsdp 2") + 1 :][:10]
    assert picture == [
        "",
        "data 0: shares 1 to 4 of 8 of the batch",
        "         share     0   0   1   1",
        "          fsdp     0   1   0   1",
        "    pipeline 0   [0] [1] [2] [3]   layers 1/1",
        "",
        "data 1: shares 5 to 8 of 8 of the batch",
        "         share     0   0   1   1",
        "          fsdp     0   1   0   1",
        "    pipeline 0   [4] [5] [6] [7]   layers 1/1",
    ]


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
        Rules((Rule("a", ("tensr",)), Rule("a", ("fsdp", "fsdp")), Rule("b", "tensor")), storage_axes=("pipe",))
    twice, typo, repeated, text, storage = error.value.problems
    assert "rule 'a': is listed twice" in twice or "rule 'a': is listed twice" in typo
    assert "got 'tensr'" in twice + typo
    assert "did you mean 'tensor'" in twice + typo
    assert "'fsdp' 2 times" in repeated
    assert "nearest: ('fsdp',)" in repeated
    assert "rule 'b', parameters: got 'tensor', a text; allowed: a tuple" in text
    assert storage.startswith("storage axis: got 'pipe'")
