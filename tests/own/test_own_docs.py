"""What the pages say about models of one's own is what the code does; and every link leads somewhere."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from meshtrain import from_nnx
from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.data.dataset import open_user_data
from meshtrain.errors import UserError
from meshtrain.models.task import Task, entries, limits, sequence_keys
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules
from scripts.benchmarks import digits, memory, mesh

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGE = (ROOT / "docs" / "guide" / "own_model.md").read_text(encoding="utf-8")


def axes_of(cell: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in cell.split(",") if axis.strip())


def test_table_of_logical_axes_is_that_of_the_rules():
    table = PAGE.partition("| logical axis |")[2].splitlines()
    lines = [line.strip("|").split("|") for line in table if line.startswith("| `")]
    written = {name: (axes_of(c[1]), axes_of(c[2])) for c in lines for name in re.findall(r"`(\w+)`", c[0])}
    rules = {rule.name: (rule.parameters, rule.activations) for rule in default_rules(LayoutOptions()).entries}
    assert written == {name: axes for name, axes in rules.items() if name != "residual_sequence"}


class Dropped(linen.Module):
    """What the page calls `network`: all that it computes is dropout."""

    @linen.compact
    def __call__(self, image: jax.Array, train: bool) -> jax.Array:
        return linen.Dropout(0.5, deterministic=not train)(image)


def test_blocks_of_the_page_run_one_after_another():
    example = {"images": np.ones((32, 32, 3), np.float32), "labels": np.int32(3), "weights": np.float32(1)}
    names = {
        "B": 4,
        "jax": jax,
        "jnp": jnp,
        "network": Dropped(),
        "sequence_keys": sequence_keys,
        "train": lambda *_, rules: None,
    }
    names |= {"examples": [example] * 3, "held_out": [], "config": None, "directory": None, "make_task": None}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/guide/own_model.md", "exec"), names)
    task = Task(len, len, names["batch"])
    data = open_user_data(names["make_data"](None), entries(task, 4), limits(task), 0)
    assert (len(data.train), data.fingerprint) == (3, "cifar10 v1")
    of_mesh = dict.fromkeys(AXES, 1) | {"fsdp": 2, "tensor": 2}
    assembly = assemble(Config(batch_size=4, sequence_length=8), of_mesh, jax.devices()[:4], names["nnx_task"])
    assert tuple(assembly.state.params["up"]["bias"].sharding.spec) == ("tensor",)
    without_one = {"norm/scale": ("norm",), "up/bias": ("mlp",), "head/bias": (None,)}
    with pytest.raises(UserError) as caught:
        from_nnx(names["Model"], without_one)
    assert f"```\n{caught.value}\n```" in PAGE
    batch = {"images": np.ones((4, 8), np.float32), "sequence_index": np.array([5, 6, 7, 5])}
    drawn = np.asarray(names["logits"]({}, batch, jax.random.key(0)))
    np.testing.assert_array_equal(drawn[0], drawn[3])
    assert not np.array_equal(drawn[0], drawn[1])


def test_block_with_rules_of_ones_own_runs():
    block = re.search(r"```python\n(from meshtrain\.sharding.*?)```", PAGE, re.DOTALL).group(1)
    given = {}
    names = {"train": lambda *_, rules: given.update(rules=rules), "config": None, "directory": None, "make_task": None}
    exec(compile(block, "docs/guide/own_model.md", "exec"), names)
    assert given["rules"].own == ("expert", "rows")


def anchors(page: pathlib.Path) -> set[str]:
    """Returns what a link to this page may have behind `#`: its headings as GitHub writes them, or nothing."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE) if page.suffix == ".md" else []
    return {"", *(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    places = [(page.parent / link if link else page, link, anchor) for link, anchor in links]
    missing = [
        f"{link}#{anchor}" for place, link, anchor in places if not place.exists() or anchor not in anchors(place)
    ]
    assert not missing, f"{page.name}: {missing}"


@pytest.mark.parametrize("name", memory.MODELS)
def test_memory_table_is_what_the_script_prints(name):
    assert memory.row(name, memory.MODELS[name]) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_mesh_table_has_the_settings_of_the_script_and_keeps_its_promise():
    page = (ROOT / "docs" / "results" / "agreement.md").read_text(encoding="utf-8")
    assert "\n".join(mesh.legend()) in page
    rows = [line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| **")]
    assert [len(row) for row in rows] == [len(mesh.SETTINGS)] * len(mesh.SETTINGS)
    differences = [[float(cell.strip().removeprefix("= ")) for cell in row] for row in rows]
    assert max(map(max, differences)) <= mesh.TOLERANCE


def test_digits_table_has_the_settings_of_the_script_and_keeps_its_promise():
    page = (ROOT / "docs" / "results" / "training.md").read_text(encoding="utf-8")
    rows = page.partition("\n".join(digits.HEADER))[2].split("\n\n")[0].strip().splitlines()
    outcomes = [digits.Outcome(digits.NUM_HELD_OUT, 1.0)]
    expected = [digits.line(setting, outcomes).split("|")[1:5] for setting in digits.SETTINGS]
    assert [row.split("|")[1:5] for row in rows] == expected
    accuracy, seconds = rows[0].split("|")[6:8]
    assert float(accuracy.strip().removesuffix("%")) >= 98
    assert float(seconds) < 60


@pytest.mark.slow
def test_the_digits_script_trains(tmp_path):
    setting = digits.SETTINGS[0]
    outcome = digits.trained(setting, 0, tmp_path, "--config.num_steps=3", "--config.model.filters=8")
    assert 0 < outcome.num_right < digits.NUM_HELD_OUT
    assert outcome.seconds > 0


def test_digits_script_has_the_numbers_of_the_configuration():
    config, _ = parse([f"--config={ROOT}/configs/digits.py"])
    rate = config.learning_rate
    found = (config.batch_size, config.num_steps, rate.peak, rate.warmup_steps)
    base = digits
    assert found == (base.BASE_BATCH, base.NUM_STEPS, base.PEAK, base.WARMUP_STEPS)
