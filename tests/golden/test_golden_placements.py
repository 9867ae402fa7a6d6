"""Where each weight of each configuration lives, as text that a person reads: a change to it shows in review.

`assemble` allocates nothing and sends nothing, so the devices of the largest configurations need not be there.
"""

import dataclasses
import difflib
import functools
import pathlib

import pytest

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.facts import array_rows
from meshtrain.cli.tables import format_bytes
from meshtrain.config.resolve import parse
from meshtrain.explain import batch_text, stages_text
from meshtrain.observe.mesh_picture import mesh_text
from meshtrain.sharding.mesh import mesh_shape, num_needed
from meshtrain.sharding.placement_text import table
from meshtrain.sharding.rules import Rule, default_rules, extend

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(__file__).parent / "placements"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
UPDATE = "scripts/test tests/golden --update-golden"


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """As much of a device as placing needs."""

    id: int
    platform: str = "cpu"
    device_kind: str = "absent"
    process_index: int = 0


@functools.cache
def assembled(name: str, *overrides: str, own: tuple[Rule, ...] = ()) -> Assembly:
    config, _ = parse([f"--config={ROOT / 'configs' / name}.py", *overrides], reads_data=False)
    num_devices = num_needed(config.mesh)
    shape = mesh_shape(config.mesh, num_devices, simulated=True)
    devices = [AbsentDevice(i) for i in range(num_devices)]
    return assemble(config, shape, devices, rules=extend(default_rules(config.layout), *own))


def text(assembly: Assembly) -> str:
    """What `python -m meshtrain explain` prints, without the moments' lines, which are the same."""
    rows = array_rows(assembly)
    weights = [row for row in rows if row.path.startswith("params/")]
    total, piece = (sum(getattr(row, field) for row in rows) for field in ("num_bytes", "num_bytes_per_device"))
    return "\n".join(
        [
            f"parameters   {assembly.task.num_parameters:,} without padding",
            f"batch        {batch_text(assembly)}; {share_text(assembly)} on each device",
            f"state        {format_bytes(total)}; {format_bytes(piece)} on each device",
            "",
            mesh_text(dict(assembly.mesh.shape)),
            table(weights),
            *stages_text(assembly),
            "",
        ]
    )


def share_text(assembly: Assembly) -> str:
    """The share of a device: rows x tokens where all entries are [B, T], else the number of examples."""
    shares = {leaf.sharding.shard_shape(leaf.shape) for leaf in assembly.batch.values()}
    return " x ".join(map(str, *shares)) if len(shares) == 1 else str({share[0] for share in shares}.pop())


def difference(before: str, now: str, name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), f"{name}, committed", f"{name}, now", "", "", 0)
    return "\n".join(lines)


@pytest.mark.parametrize("name", CONFIGS)
def test_placements_are_those_that_were_reviewed(name, request):
    path, now = FOLDER / f"{name}.txt", text(assembled(name))
    if request.config.getoption("--update-golden", default=False):
        path.write_text(now, encoding="utf-8")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    changed = difference(before, now, path.name)
    assert not changed, f"{changed}\n\nIf this is meant: {UPDATE}, and commit what it writes."


def test_every_text_belongs_to_a_configuration():
    assert sorted(path.stem for path in FOLDER.iterdir()) == CONFIGS, f"nearest: {UPDATE}, or delete what is too many"


@pytest.mark.parametrize("name", ["3d", "hybrid", "gpt3_175b"])
def test_moments_live_where_their_weights_live(name):
    """Which is why the texts leave them out."""
    rows = {row.path: row for row in array_rows(assembled(name))}
    weights = {path.removeprefix("params/"): row for path, row in rows.items() if path.startswith("params/")}
    for moment in ("mu", "nu"):
        found = {path.partition(f"/{moment}/")[2]: row for path, row in rows.items() if f"/{moment}/" in path}
        assert found.keys() == weights.keys()
        for path, row in found.items():
            assert dataclasses.replace(row, path="") == dataclasses.replace(weights[path], path=""), path


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("fsdp", (Rule("mlp", parameters=("fsdp",)), Rule("embed"))),
        ("3d", (Rule("heads"),)),
        ("tensor", (Rule("norm", parameters=("tensor",)),)),
        ("data", (Rule("batch"),)),
    ],
    ids=["mlp", "heads", "norm", "batch"],
)
def test_another_rule_shows(name, own):
    now = text(assembled(name, own=own))
    assert difference((FOLDER / f"{name}.txt").read_text(encoding="utf-8"), now, name)


def test_another_dim_shows():
    now = text(assembled("llama3_8b", "--config.model.mlp_dim=14464"))
    changed = difference((FOLDER / "llama3_8b.txt").read_text(encoding="utf-8"), now, "llama3_8b")
    assert "+params/layers/mlp/up" in changed
    assert "+params/layers/attention/query" not in changed
