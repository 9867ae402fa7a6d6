"""The advice on layers that are compiled as a loop."""

from types import SimpleNamespace

import pytest

from meshtrain.models.remat import RematOptions
from meshtrain.plan import findings
from tests.plan.conftest import assembled

GPU, CPU = (SimpleNamespace(platform=name) for name in ("cuda", "cpu"))


@pytest.mark.parametrize(
    "mesh, options, cluster, number",
    [
        ({"data": 2}, RematOptions(), GPU, 1),
        ({"data": 2}, RematOptions(unroll=True), GPU, 0),
        ({"data": 2}, RematOptions("full"), GPU, 0),
        ({"pipeline": 2}, RematOptions(), GPU, 0),
        ({"data": 2}, RematOptions(), CPU, 0),
    ],
)
def test_a_loop_that_saves_everything_is_a_finding(small, mesh, options, cluster, number):
    found = findings.layers_in_loop(assembled(small(mesh, remat=options)), cluster)
    assert len(found) == number
    assert all(one.change.startswith("remat.unroll=true") for one in found)
