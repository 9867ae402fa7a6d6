"""Several slices of TPUs: what the compiler sends between them, its time, and the axes that leave a slice."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from meshtrain import explain
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.hardware import accelerators
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.plan import __main__ as plan_command
from meshtrain.plan import text_report
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.collectives import collectives, layer_gradients
from meshtrain.plan.search import candidates, estimate
from meshtrain.plan.timing.streams import Assumptions, bandwidth, timing, transfer_seconds
from meshtrain.sharding.mesh import MeshOptions, advice, first_slice, mesh_shape, over_slices
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions
from tests.plan import recorded
from tests.plan.conftest import assembled, config, planned

V5E = next(one for one in accelerators.ACCELERATORS if one.name == "v5e")
V5E_NETWORK = 6.4e12 / 8 / 256  # cloud.google.com/tpu/docs/v5e: 6.4 Tb/s for a pod of 256 chips
OF_SLICE = "{1,2}x{0:7}"
MIXED = "{{100000,200000},{100001,200001}}"
PAIRS = "{{100000->200000},{200000->100000}}"


class Chip(SimpleNamespace):
    """A chip that is not there, in a slice."""

    platform, device_kind = "tpu", "TPU v5 lite"

    def __hash__(self):
        return self.id


def mesh_of(num_slices=2, **sizes):
    """A mesh of chips, slices outermost as `make_mesh` orders them, its first axes over the slices."""
    shape = dict.fromkeys(AXES, 1) | sizes
    each = math.prod(shape.values()) // num_slices
    chips = np.empty(each * num_slices, object)
    chips[:] = [Chip(id=i, slice_index=i // each, process_index=i // 4) for i in range(chips.size)]
    return SimpleNamespace(devices=chips.reshape(tuple(shape.values())), axis_names=AXES, shape=shape, size=chips.size)


def pair(kind, target, sends, receives, name="psum.1_0"):
    """A send and its recv as TPU compilers write them, with two products that run before they are done."""
    quoted = f'"{target}"' if "x" in target else target
    how = (
        f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_target={quoted},_xla_megascale_transfer_type="{kind}"}}'
    )
    return [
        "%x = f32[16,8]{1,0} constant({...})",
        "%token = token[] after-all()",
        f"%send.3 = ({sends}{{1,0:T(8,128)}}, u32[], token[]) send(%x, %token), channel_id=2, {how}",
        f"%recv.4 = ({receives}{{1,0:T(8,128)}}, u32[], token[]) recv(%token), channel_id=1, {how}",
        "%send-done.5 = token[] send-done(%send.3), channel_id=2",
        "%recv-done.6 = (f32[16,8]{1,0}, token[]) recv-done(%recv.4), channel_id=1",
    ]


@pytest.mark.parametrize(
    ("kind", "target", "sends", "receives", "expected"),
    [
        ("ALL_REDUCE", OF_SLICE, "f32[16,8]", "f32[16,8]", ("all-reduce", 512, 512)),
        ("ALL_GATHER", OF_SLICE, "f32[16,8]", "f32[32,8]", ("all-gather", 1024, 512)),
        ("REDUCE_SCATTER", OF_SLICE, "f32[16,8]", "f32[8,8]", ("reduce-scatter", 512, 256)),
        ("ALL_TO_ALL", MIXED, "f32[16,8]", "f32[16,8]", ("all-to-all", 512, 256)),
        ("ONE_TO_ONE", PAIRS, "f32[16,8]", "f32[16,8]", ("collective-permute", 512, 512)),
    ],
)
def test_a_send_and_its_recv_are_one_collective_between_slices(kind, target, sends, receives, expected):
    program = parse.read(recorded.entry(*pair(kind, target, sends, receives)))
    mesh = mesh_of(data=2, fsdp=8)
    (one,) = collectives(program, mesh.shape, over_slices(mesh))
    assert (one.kind, one.logical_bytes, one.wire_bytes) == (f"{expected[0]} between slices", *expected[1:])
    assert (one.axes, one.group_size, one.is_asynchronous, one.is_overlapped) == ("data", 2, True, False)


def test_slices_of_a_group_are_places_on_the_axes_that_leave_them():
    """Slices 1 and 3 of four are one group: neighbours along data, where pipeline has the next slice."""
    target = "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}"
    mesh = mesh_of(4, data=2, pipeline=2, fsdp=2)
    program = parse.read(recorded.entry(*pair("ALL_REDUCE", target, "f32[16,8]", "f32[16,8]")))
    (one,) = collectives(program, mesh.shape, over_slices(mesh))
    assert (one.axes, one.group_size) == ("data", 2)


def test_groups_inside_a_slice_are_of_the_part_of_the_mesh_that_is_in_it():
    mesh = mesh_of(data=4, tensor=4)
    assert over_slices(mesh) == dict.fromkeys(AXES, 1) | {"data": 2}
    lines = [
        "%x = f32[16,8]{1,0} constant({...})",
        "%a = f32[16,8]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum",
        "%b = f32[16,8]{1,0} all-reduce(%a), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum",
        "%c = f32[16,8]{1,0} all-reduce(%b), replica_groups={{0,8},{1,9}}, to_apply=%sum",
    ]
    found = collectives(parse.read(recorded.entry(*lines)), mesh.shape, over_slices(mesh))
    along = [(one.axes, one.kind) for one in found]
    assert along[:2] == [("tensor", "all-reduce"), ("data+tensor", "all-reduce")]
    assert along[2][1] == "all-reduce between slices"


def test_what_goes_between_slices_takes_the_time_of_the_network():
    assert V5E.network_bytes_per_second == V5E_NETWORK
    mesh, cluster = mesh_of(data=2, fsdp=8), SimpleNamespace(platform="tpu", accelerator=V5E)
    program = parse.read(recorded.entry(*pair("ALL_REDUCE", OF_SLICE, "f32[4096,1024]", "f32[4096,1024]")))
    found = collectives(program, mesh.shape, over_slices(mesh))
    assumed = Assumptions()
    ((latency, seconds),) = transfer_seconds(found, mesh, cluster, assumed).values()
    assert seconds == pytest.approx(2**24 / (0.8 * V5E_NETWORK))
    assert latency == assumed.slices_latency_seconds
    inside = dataclasses.replace(found[0], axes="data+fsdp", kind="all-reduce")
    assert transfer_seconds([inside], mesh, cluster, assumed)[inside.name][1] < seconds / 30
    assert timing(mesh, cluster, program, assumed).step_seconds == pytest.approx(latency + seconds)
    assert bandwidth(mesh, cluster, "data") == V5E_NETWORK
    assert bandwidth(mesh, cluster, "fsdp") == V5E.link_bytes_per_second / 2


def test_a_transfer_between_slices_is_hidden_beside_products():
    lines = pair("ALL_REDUCE", OF_SLICE, "f32[64,1024]", "f32[64,1024]")
    product = "%dot.1 = f32[4096,4096]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    beside = ["%w = f32[4096,4096]{1,0} constant({...})", *lines[:3], product, *lines[3:]]
    mesh, cluster = mesh_of(data=2, fsdp=8), SimpleNamespace(platform="tpu", accelerator=V5E)
    found = collectives(parse.read(recorded.entry(*beside)), mesh.shape, over_slices(mesh))
    assert found[0].is_overlapped
    assert layer_gradients(found, "data", found[0].wire_bytes, 1).overlapped_fraction == 1
    modelled = timing(mesh, cluster, parse.read(recorded.entry(*beside)), Assumptions())
    assert modelled.step_seconds == pytest.approx(modelled.compute_seconds)
    assert modelled.wire_seconds > 0.1 * modelled.step_seconds


def test_inside_a_slice_nothing_waits_for_what_goes_between_slices():
    lines = pair("ALL_REDUCE", OF_SLICE, "f32[64,1024]", "f32[64,1024]")
    inside = "%b = f32[4096,1024]{1,0} all-reduce(%w), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum"
    program = parse.read(recorded.entry("%w = f32[4096,1024]{1,0} constant({...})", *lines[:3], inside, *lines[3:]))
    mesh, cluster = mesh_of(data=2, fsdp=8), SimpleNamespace(platform="tpu", accelerator=V5E)
    seconds = transfer_seconds(collectives(program, mesh.shape, over_slices(mesh)), mesh, cluster, Assumptions())
    assert timing(mesh, cluster, program, Assumptions()).step_seconds == pytest.approx(max(map(sum, seconds.values())))


def test_axes_that_leave_a_slice_or_a_host_of_gpus_are_warned_of(monkeypatch):
    assert advice(mesh_of(data=2, fsdp=8)) == advice(mesh_of(pipeline=2, fsdp=8)) == []
    ((what, change),) = advice(mesh_of(fsdp=16))
    assert what == "fsdp crosses slices and sends in each layer"
    assert change == "let data or pipeline cross them instead"
    monkeypatch.setattr(Chip, "platform", "gpu")
    assert advice(mesh_of(fsdp=16)) == []
    ((what, _),) = advice(mesh_of(data=2, tensor=8))
    assert what == "tensor crosses hosts and sends in each layer"
    assert advice(mesh_of(data=2, tensor=8), num_machines=1) == []


def test_explain_prints_the_warning(monkeypatch):
    monkeypatch.setattr(explain, "advice", lambda mesh: [("fsdp leaves a slice", "let data leave it")])
    said = explain.text(assembled(config(), fsdp=8))
    assert "\nwarning      fsdp leaves a slice; let data leave it\n" in said


def test_the_first_slice_is_a_mesh_of_its_own_chips():
    mesh = mesh_of(4, data=2, pipeline=4, fsdp=2)
    assert dict(first_slice(mesh).shape) == dict.fromkeys(AXES, 1) | {"pipeline": 2, "fsdp": 2}
    assert {chip.slice_index for chip in first_slice(mesh).devices.flat} == {0}
    assert first_slice(first_slice(mesh)).size == 4


def test_a_mesh_on_parts_of_several_slices_is_refused_before_the_compiler_ends_the_process():
    """XLA aborts where slices have different numbers of partitions."""
    with pytest.raises(
        UserError, match=r"12 devices; allowed: at most the 8 devices of a slice, or complete .*nearest: mesh.data=8"
    ):
        plan_command.main(["--config=configs/tiny.py", "--cluster=2xv5e:2x4", "--config.mesh.data=12"])
    options = MeshOptions(data=8)
    assert mesh_shape(options, 16, simulated=False, slice_size=8)["data"] == 8


def test_a_search_takes_a_slice_as_what_is_fast():
    options = Config(batch_size=64, sequence_length=1024, model=DecoderOptions(2, 1024, 2048, 32, 32, vocab_size=1024))
    cluster = Cluster("2xv5e:4x4", "tpu", range(32), 8, V5E, num_slices=2)
    assert cluster.devices_each == 16
    alone = dataclasses.replace(cluster, num_slices=1)
    assert alone.devices_each == 4
    largest = [
        max(one.shape["tensor"] for one in candidates.candidates(options, each, only_mesh=True))
        for each in (cluster, alone)
    ]
    assert largest == [16, 32]
    weights = estimate.weights_of(options)
    seconds = [
        estimate.estimate_seconds(options, dict.fromkeys(AXES, 1) | shape, weights, V5E, cluster.devices_each)
        for shape in ({"data": 2, "fsdp": 16}, {"fsdp": 32})
    ]
    assert seconds[0] < seconds[1]


@pytest.mark.gpu_compiler
def test_a_plan_of_two_slices_has_what_goes_between_them():
    """The compiler's sends add up to what has to cross data, and one slice less would have none."""
    small = Config(
        batch_size=16,
        sequence_length=128,
        mesh=MeshOptions(data=2, fsdp=4),
        model=DecoderOptions(1, 128, 256, num_heads=2, num_kv_heads=2, vocab_size=256),
        precision=PrecisionOptions("bfloat16"),
    )
    plan = planned("2xv5e:2x2", small)
    between = {row.axis: row.wire_bytes for row in plan.traffic if row.kind.endswith("between slices")}
    assert between == {"data": pytest.approx(plan.minimum["data"], rel=0.2)}
    assert text_report.sent_along(plan, "fsdp") > 0.7 * plan.minimum["fsdp"]
    said = text_report.text(plan)
    assert "slices outermost; 2 slices, crossed by data" in said
    assert "between slices at 80% of 3.125 GB/s a chip (cloud.google.com/tpu/docs/v5e" in said
    assert "crosses slices" not in said
