"""The axes' roles, and that a seventh axis is one record."""

import os
import pathlib
import subprocess
import sys

from meshtrain.sharding import axes
from meshtrain.sharding.rules import LayoutOptions, default_rules

ROOT = pathlib.Path(__file__).parents[2]

SEVENTH_AXIS = """
from meshtrain.sharding import axes

seventh = axes.Axis("share", "parts of a share", splits_batch=True, stores_weights=True)
axes.TABLE = (*axes.TABLE[:2], seventh, *axes.TABLE[2:])
axes.AXES = tuple(axis.name for axis in axes.TABLE)

from meshtrain import explain
from meshtrain.config.config import default, resolve
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
    assert axes.batch_axes() == ("data", "fsdp", "expert")
    assert axes.sequence_axes() == ("context",)
    assert axes.expert_axes() == ("expert",)
    assert axes.storage_axes() == ("fsdp", "expert", "context")
    assert axes.model_axes() == ("pipeline", "tensor")
    assert axes.partitioned_axes() == ("fsdp", "expert", "context", "tensor")


def test_experts_stay_split_where_other_weights_are_gathered():
    rules = default_rules(LayoutOptions())
    assert rules.parameters["experts"] == rules.gathered["experts"] == axes.expert_axes()
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
    assert option.endswith("parts of a share; -1: what is left")
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
