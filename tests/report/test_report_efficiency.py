"""Where the seconds of a step go, efficiency, and Amdahl's serial share, from numbers that are known."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from meshtrain.plan.cluster import clusters
from meshtrain.plan.hlo import parse
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.report.scaling import efficiency
from meshtrain.sharding.rules import AXES
from tests.plan import recorded
from tests.plan.conftest import H100

BYTES = 4 * 4096 * 1024
SHAPE = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2}
TEXT = recorded.entry(
    "%w = f32[4096,4096]{1,0} parameter(0)",
    "%x = f32[2048,1024]{1,0} parameter(1)",
    "%y = f32[4096,1024]{1,0} parameter(2)",
    "%all-gather = f32[4096,1024]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}",
    "%all-reduce = f32[4096,1024]{1,0} all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%sum",
    "%collective-permute = f32[4096,1024]{1,0} collective-permute(%y), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}",
    "%dot.1 = f32[4096,4096]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
)


def spent(idle_share=0.0):
    devices = np.array(jax.devices()[:4])
    cluster = clusters.Cluster("h100:1x4", "cuda", list(devices), 1, H100, (9, 0))
    mesh = Mesh(devices.reshape(tuple(SHAPE.values())), AXES)
    return efficiency.spent(parse.read(TEXT), mesh, cluster, Assumptions(), idle_share)


def test_each_axis_costs_its_own_transfers():
    made, assumed = spent(), Assumptions()
    speed = H100.link_bytes_per_second * assumed.link_efficiency
    latency = assumed.latency_seconds
    # An all-reduce of two devices sends once the whole array, and a permute as well; the gather half of it.
    assert made.waiting["data"] == pytest.approx(2 * BYTES / speed + 2 * latency)
    assert made.waiting["fsdp"] == pytest.approx(BYTES / 2 / speed + latency)
    assert made.latency == pytest.approx(3 * latency)
    assert made.computing > 0
    assert list(made.waiting) == ["data", "fsdp"]


def test_idle_rows_are_a_part_of_what_is_computed():
    one, other = spent(), spent(idle_share=0.25)
    assert other.idle == pytest.approx(one.computing / 4)
    assert other.idle + other.computing == pytest.approx(one.computing)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, -0.02])
@pytest.mark.parametrize("base", [1, 8])
def test_the_serial_share_of_the_law_is_found_again(share, base):
    steps = [(size, 3.0 * (share + (1 - share) * base / size)) for size in (base * 2**power for power in range(6))]
    assert efficiency.fitted_serial_share(steps) == pytest.approx(share, abs=1e-12)
    for step in steps[1:]:
        assert efficiency.fitted_serial_share([steps[0], step]) == pytest.approx(share, abs=1e-12)


def test_a_base_alone_has_no_serial_share():
    assert efficiency.fitted_serial_share([(8, 3.0)]) is None
    assert efficiency.fitted_serial_share([(8, 3.0), (8, 3.0)]) is None


def test_efficiency_is_the_throughput_of_a_device():
    # Four times the devices, three times the examples a second.
    rows = tuple(
        efficiency.Row(
            SimpleNamespace(num_devices=devices, batch_size=batch), timing=SimpleNamespace(step_seconds=1), fits=True
        )
        for devices, batch in ((8, 10), (32, 30))
    )
    curve = efficiency.Curve("fsdp", "weak", rows)
    assert [curve.speedup(row) for row in rows] == [1, 3]
    assert [curve.efficiency(row) for row in rows] == [1, 0.75]
