"""Large configurations, planned for the clusters that their title pages name; `scripts/bench plan` has all of them."""

import pathlib
import runpy

import pytest

from meshtrain.config.resolve import resolve
from meshtrain.plan import text_report
from tests.plan.conftest import planned

ROOT = pathlib.Path(__file__).parents[2]
LARGE = {"llama3_8b": "h100:8x8", "llama3_70b": "a100:256x8", "mtnlg_530b": "a100:560x8"}

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.slow]


@pytest.mark.parametrize("name", LARGE)
def test_it_fits(name):
    config = resolve(runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](), reads_data=False)
    plan = planned(LARGE[name], config)
    assert plan.memory.fits is True, text_report.text(plan)
    assert plan.memory.compiler.arguments_bytes == pytest.approx(plan.memory.arguments_expected_bytes, rel=0.001)
    assert text_report.sent_along(plan, "data") <= 1.05 * (plan.minimum["data"] if "data" in plan.minimum else 0)
