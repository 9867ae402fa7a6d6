"""A program priced for other meshes: groups, bytes, and where the time goes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from meshtrain.launch import hardware
from meshtrain.layout.axes import AXES
from meshtrain.plan import collectives, hlo, repriced, topology
from meshtrain.plan.timing import Assumptions
from tests.plan import recorded

H100 = next(one for one in hardware.ACCELERATORS if one.name == "h100")
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


def program():
    return hlo.read(TEXT)


def found():
    return collectives.collectives(program(), SHAPE)


def spent(shape, idle_share=0.0):
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))])
    cluster = topology.Cluster("h100:1x8", "cuda", list(devices), 1, H100, (9, 0))
    mesh = Mesh(devices.reshape(tuple(shape.values())), AXES)
    return repriced.spent(program(), repriced.regrouped(found(), shape), mesh, cluster, Assumptions(), idle_share)


def test_groups_and_bytes_are_those_of_the_other_mesh():
    made = {one.kind: one for one in repriced.regrouped(found(), SHAPE | {"data": 512, "fsdp": 8})}
    assert (made["all-gather"].group_size, made["all-reduce"].group_size) == (8, 512)
    assert made["all-gather"].wire_bytes == pytest.approx(7 / 8 * BYTES)
    assert made["all-reduce"].wire_bytes == pytest.approx(2 * 511 / 512 * BYTES)
    assert (made["collective-permute"].wire_bytes, made["collective-permute"].group_size) == (BYTES, 2)
    assert repriced.regrouped(found(), SHAPE) == found()


def test_parts_add_up_to_the_step_and_each_axis_costs_its_own_transfers():
    made, assumed = spent(SHAPE), Assumptions()
    speed = H100.link_bytes_per_second * assumed.link_efficiency
    latency = assumed.latency_seconds
    # An all-reduce of two devices sends once the whole array, and a permute as well; the gather half of it.
    assert made.waiting["data"] == pytest.approx(2 * BYTES / speed + 2 * latency)
    assert made.waiting["fsdp"] == pytest.approx(BYTES / 2 / speed + latency)
    assert made.latency == pytest.approx(3 * latency)
    assert made.step == pytest.approx(made.computing + sum(made.waiting.values()))
    assert made.computing > 0
    assert list(made.waiting) == ["data", "fsdp"]


def test_more_devices_on_an_axis_lengthen_its_own_part_only():
    one, other = spent(SHAPE), spent(SHAPE | {"data": 4})
    assert other.waiting["data"] > one.waiting["data"]
    assert other.waiting["fsdp"] == pytest.approx(one.waiting["fsdp"])
    assert other.computing == one.computing


def test_idle_rows_are_a_part_of_what_is_computed():
    one, other = spent(SHAPE), spent(SHAPE, idle_share=0.25)
    assert other.idle == pytest.approx(one.computing / 4)
    assert other.step == pytest.approx(one.step)


def test_a_mixture_lies_on_the_line_through_both():
    one, other = spent(SHAPE), spent(SHAPE | {"data": 4})
    for share in (0.0, 0.25, 1.0, 1.5):
        made = repriced.mixed(one, other, share)
        assert made.step == pytest.approx((1 - share) * one.step + share * other.step)
    alone = repriced.Spent(1.0, 0.0, {}, 0.0)
    assert repriced.mixed(alone, one, 0.5).waiting["fsdp"] == pytest.approx(one.waiting["fsdp"] / 2)
