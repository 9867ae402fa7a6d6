"""What is worked out rather than read: minima, whether it fits, findings, modelled time, candidates."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.hardware import accelerators
from meshtrain.hardware.links import Link, Links
from meshtrain.lab.compression import CompressionOptions
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.plan import findings
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cost import lower_bound, memory
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.collectives import Collective, Traffic, collectives, sent_along
from meshtrain.plan.timing.streams import (
    Assumptions,
    Hidden,
    Sending,
    Streams,
    _ends,
    bandwidth,
    devices_by,
    exchange_bandwidth,
    link_lines,
    links_of,
    sending_of,
    transfer_seconds,
)
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES, LayoutOptions
from meshtrain.step.precision import PrecisionOptions
from tests.plan import recorded
from tests.plan.conftest import H100, assembled


@pytest.mark.parametrize(
    ("peak", "capacity", "uncertainty", "refused", "expected"),
    [
        (50, 100, 10, False, True),
        (95, 100, 10, False, None),
        (105, 100, 10, False, None),
        (120, 100, 10, False, False),
        (None, 100, 0, True, False),
        (50, None, 0, False, None),
    ],
)
def test_fits(peak, capacity, uncertainty, refused, expected):
    assert memory.fits(peak, capacity, uncertainty, refused=refused) is expected


def test_capacity_leaves_room_for_the_runtime():
    for one in accelerators.ACCELERATORS:
        assert 0.9 * one.memory_bytes < accelerators.usable_bytes(one) < one.memory_bytes


TABLE_AND_HEAD, LAST_NORM = 2 * 256 * 64, 64  # elements of the small model that are not in its layers


def test_the_least_of_fsdp_is_in_the_compute_dtype_two_gathers_of_layers_one_of_all_else_and_a_scatter(small):
    config = small({"fsdp": 8}, precision=PrecisionOptions("bfloat16"))
    found = lower_bound.wire_bytes_minimum(assembled(config))
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # norms are whole
    assert found == {"fsdp": 7 / 8 * 2 * (3 * layers + 2 * TABLE_AND_HEAD)}


def test_a_model_without_a_stack_gathers_each_of_its_weights_once(small):
    """Outside of a loop the compiler keeps what it has gathered for the backward pass."""
    config = small({"fsdp": 8})
    assembly = assembled(config)
    names = [tuple(name for name in one if name != "layers") for one in assembly.states.names]
    states = dataclasses.replace(assembly.states, names=names)
    found = lower_bound.wire_bytes_minimum(dataclasses.replace(assembly, states=states))
    assert found == {"fsdp": 7 / 8 * 4 * 2 * (assembly.task.num_parameters - 5 * 64)}


def test_the_least_of_data_is_an_all_reduce_in_float32(small):
    assembly = assembled(small({"data": 8}, precision=PrecisionOptions("bfloat16")))
    assert lower_bound.wire_bytes_minimum(assembly) == {"data": 2 * 7 / 8 * 4 * assembly.task.num_parameters}


@pytest.mark.parametrize(
    ("level", "reduce", "copies", "spared"),
    [
        (0, "float32", 8, 0),
        (0, "bfloat16", 4, 0),
        (1, "bfloat16", 2 + 4, 0),
        (2, "bfloat16", 2 * 2 + 4, 0),
        # Two gathers of layers, one of all else, and a scatter of each microbatch, in the compute dtype.
        (3, "float32", 2 * 3 * 2, 2 * 2),
    ],
)
def test_the_least_of_data_follows_the_wire_dtype_and_zero(small, level, reduce, copies, spared):
    precision = PrecisionOptions("bfloat16", reduce_dtype=reduce)
    config = small({"data": 8}, precision=precision, zero=ZeroOptions(level), accumulation_steps=2)
    assembly = assembled(config)
    least = copies * assembly.task.num_parameters - spared * (TABLE_AND_HEAD + LAST_NORM)
    assert lower_bound.wire_bytes_minimum(assembly) == {"data": 7 / 8 * least}


@pytest.mark.parametrize(
    ("kind", "level", "bytes_each"),
    [("int8", 0, 2 * 7 / 8 * 260 / 256), ("int8", 1, 7 / 8 * (260 / 256 + 4)), ("topk", 0, 7 * 4 * 8 / 256)],
)
def test_the_least_of_compressed_gradients(small, kind, level, bytes_each):
    assembly = assembled(small({"data": 8}, zero=ZeroOptions(level), reduction=CompressionOptions(kind)))
    (least,) = lower_bound.wire_bytes_minimum(assembly).values()
    assert least == pytest.approx(bytes_each * assembly.task.num_parameters)


def test_weights_that_no_level_splits_are_all_reduced(small):
    """A norm of 64 does not divide by 3: its moments stay whole at level 2, and its gradients are reduced once."""
    model = DecoderOptions(
        num_layers=2,
        embed_dim=64,
        mlp_dim=129,
        num_heads=3,
        num_kv_heads=3,
        head_dim=16,
        vocab_size=258,
        vocab_multiple=6,
    )
    config = small({"data": 3}, batch_size=6, zero=ZeroOptions(2), accumulation_steps=2, model=model)
    assembly = assemble(config, dict.fromkeys(AXES, 1) | {"data": 3}, clusters.open_cluster("cpu:8").devices[:3])
    norms = 5 * 64
    split = assembly.task.num_parameters - norms
    assert lower_bound.wire_bytes_minimum(assembly) == {"data": 2 / 3 * 4 * (2 * norms + (2 + 1) * split)}


def test_with_fsdp_level_three_stores_weights_over_both_axes(small):
    assembly = assembled(small({"data": 2, "fsdp": 4}, zero=ZeroOptions(3)))
    norms = 5 * 64  # whole over fsdp, split over data
    matrices = assembly.task.num_parameters - norms
    found = lower_bound.wire_bytes_minimum(assembly)
    sent = 7 / 8 * (3 * matrices - TABLE_AND_HEAD) + 1 / 2 * (3 * norms - LAST_NORM)
    assert found == {"data+fsdp": 4 * sent}


def test_a_frozen_weight_is_gathered_and_its_gradient_not_sent(small):
    frozen = assembled(small({"fsdp": 8}, optimizer=OptimizerOptions(trainable="mlp/")))
    matrices = frozen.task.num_parameters - 5 * 64
    trained = 2 * 3 * 64 * 128
    assert lower_bound.wire_bytes_minimum(frozen) == {"fsdp": 7 / 8 * 4 * (2 * matrices - TABLE_AND_HEAD + trained)}
    frozen = assembled(small({"data": 8}, optimizer=OptimizerOptions(trainable="mlp/")))
    assert lower_bound.wire_bytes_minimum(frozen) == {"data": 2 * 7 / 8 * 4 * trained}


def test_what_is_sent_along_joined_axes_counts_each_of_them():
    rows = [row("data", 1.0), row("fsdp", 2.0), row("data+fsdp", 4.0), row("data+tensor", 8.0)]
    assert [sent_along(rows, axes) for axes in ("data", "data+fsdp", "tensor")] == [9.0, 15.0, 0.0]


@pytest.mark.parametrize(
    ("remat", "sequence_parallel", "reductions"),
    [
        (RematOptions("none"), True, 4),
        (RematOptions("dots"), False, 4),  # without sequence parallelism a norm's output needs no gather
        (RematOptions("dots"), True, 5),
        (RematOptions("full"), False, 5),
        (RematOptions("full"), True, 5.5),  # both gathers and the scatter after attention
        (RematOptions("full", every=2), False, 4.5),
    ],
    ids=str,
)
def test_the_least_of_tensor_is_four_sums_a_layer_and_what_remat_repeats(small, remat, sequence_parallel, reductions):
    layout = LayoutOptions(sequence_parallel)
    found = lower_bound.wire_bytes_minimum(assembled(small({"tensor": 4, "data": 2}, remat=remat, layout=layout)))
    activations = 16 / 2 * 32 * 64 * 4
    assert found["tensor"] == 2 * 3 / 4 * (reductions * 2 + 2) * activations


def test_the_least_of_the_pipeline_is_an_activation_each_way(small):
    assembly = assembled(small({"pipeline": 2}))
    activations = 16 / 2 * 32 * 64 * 4
    assert lower_bound.wire_bytes_minimum(assembly) == {"pipeline": 2 * 2 * activations}
    # 1f1b, two stages, two microbatches: three rows each way, each with a permute.
    assert lower_bound.executor_bytes(assembly) > 6 * activations


def test_idle_rows_send_what_layers_send(small):
    """1f1b on two stages: each idles in one of three rows a way. Look-up and head are sent twice in any case."""
    assembly = assembled(small({"pipeline": 2, "tensor": 2, "fsdp": 2}))
    least = lower_bound.wire_bytes_minimum(assembly)
    outer = 2 * 256 * 64 / 8  # table and head, on one device
    assert lower_bound.idle_share(assembly) == pytest.approx(1 / 3)
    by_others = {"fsdp": 2 * 2 * 4 * outer, "tensor": 2 * 1 / 2 * 2 * 2 * (16 / 2 / 2 * 32 * 64 * 4)}
    idle = lower_bound.idle_bytes(assembly, {axis: 1.5 * bytes for axis, bytes in least.items()})
    assert idle == {axis: pytest.approx((1.5 * least[axis] - by_others[axis]) / 3) for axis in ("fsdp", "tensor")}
    assert lower_bound.idle_bytes(assembled(small({"data": 8})), {"data": 1.0}) == {}


def test_model_flops_count_attention_half_or_whole(small):
    assembly = assembled(small({"data": 8}))
    causal, full = lower_bound.model_flops(assembly)
    attention = 12 * 2 * 32 * 64 * (16 * 32 / 8)
    assert full - causal == pytest.approx(attention / 2)
    assert full == assembly.task.flops_per_token * 16 * 32 / 8


def row(axis, wire_bytes, overlapped=1.0):
    return Traffic(axis, "all-gather", 1, wire_bytes, wire_bytes, 1.0, overlapped, ("models/layers.py:1",))


def test_far_above_the_minimum_is_a_finding_and_near_it_none():
    (found,) = findings._traffic("fsdp", 1e9, [row("fsdp", 2e9)])
    assert "fsdp sends" in found.what
    assert "2.00 times" in found.what
    assert "models/layers.py:1" in found.what
    assert findings._traffic("fsdp", 1e9, [row("fsdp", 1.1e9)]) == []
    assert findings._traffic("pipeline", 2e9, [row("pipeline", 2e9)]) == []


def test_an_axis_that_has_to_send_nothing_and_does_is_a_finding():
    (found,) = findings._traffic("data", 0.0, [row("data", 2e9)])
    assert found.what.startswith("data sends 1.86 GiB, although the minimum is 0")


def test_unhidden_traffic_is_a_finding():
    (found,) = findings._traffic("fsdp", 1e9, [row("fsdp", 1e9, overlapped=0.1)])
    assert found.what.startswith("only 10%")
    assert findings._traffic("context", 1e9, [row("context", 1e9, overlapped=0.1)]) == []


def test_hidden_seconds_decide_whether_traffic_is_a_finding():
    """Transfers hide behind other kernels than matrix products as well."""
    rows = [row("data", 1e9, overlapped=0.04)]
    sending = {("data", "all-gather"): Sending(6e-3, 4e-3)}
    assert findings._traffic("data", 1e9, rows, sending) == []
    (found,) = findings._traffic("data", 1e9, rows, {("data", "all-gather"): Sending(6e-3, 1e-3)})
    assert found.what == "only 1 of 6 ms of transfers along data are hidden"


def test_the_compilers_warnings_are_findings():
    lines = [
        "E0000 spmd_partitioner.cc:630] [SPMD] Involuntary full rematerialization. The compiler was not able to go ...",
        "W1121 hlo_rematerialization.cc:3231] Can't reduce memory use below 60.68GiB (65158077335 bytes) by "
        "rematerialization; only reduced to 74.55GiB (80052486992 bytes), down from 75.45GiB originally",
        "I0000 nothing of interest",
    ]
    found = findings._messages(lines, "none")
    assert len(found) == 2
    assert "remat.policy=full" in found[1].change
    assert "remat.policy=full" not in findings._messages(lines, "full")[1].change, "it is set"
    assert "involuntary full rematerialization" in found[0].what
    assert "60.68GiB" in found[1].what
    assert "74.55GiB" in found[1].what


def streams(text, transfers=(), **given):
    program = parse.read(text)
    return Streams(program, H100, dict(transfers), Assumptions(), **given).step()


PRODUCT = "%dot.{0} = f32[4096,4096]{{1,0}} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
START = "%all-gather-start = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}"
DONE = "%all-gather-done = f32[64]{0} all-gather-done(%all-gather-start)"
ARGUMENTS = ("%w = f32[4096,4096]{1,0} parameter(0)", "%x = f32[8]{0} parameter(1)")


def test_a_transfer_beside_a_product_costs_nothing_until_it_is_longer():
    (alone, product, _) = streams(recorded.entry(*ARGUMENTS, PRODUCT.format(1)))
    assert alone == product > 0
    hidden = recorded.entry(*ARGUMENTS, START, PRODUCT.format(1), DONE)
    short, long = ({"all-gather-start": seconds} for seconds in (product / 2, 3 * product))
    assert streams(hidden, short)[0] == pytest.approx(product)
    assert streams(hidden, long)[0] == pytest.approx(3 * product)
    bare = recorded.entry(*ARGUMENTS, PRODUCT.format(1), START, DONE)
    assert streams(bare, short)[0] == pytest.approx(1.5 * product)


def test_hidden_are_the_seconds_that_a_step_would_take_without_a_transfer():
    text = recorded.entry(*ARGUMENTS, START, PRODUCT.format(1), DONE)
    product = streams(text, {"all-gather-start": 0.0})[0]
    (gather,) = collectives(parse.read(text), {"data": 2})
    for share, hidden in ((0.5, 0.5), (3.0, 1.0)):
        walked = Streams(parse.read(text), H100, {gather.name: share * product}, Assumptions())
        (found,) = sending_of(walked, [gather]).values()
        assert found == pytest.approx((share * product, hidden * product))
    walked = Streams(
        parse.read(recorded.entry(*ARGUMENTS, PRODUCT.format(1), START, DONE)),
        H100,
        {gather.name: product},
        Assumptions(),
    )
    assert sending_of(walked, [gather], 2.0) == {("data", "all-gather"): pytest.approx((2 * product, 0.0))}


def test_the_ends_of_the_interval_hide_all_transfers_or_none():
    program = parse.read(recorded.entry(*ARGUMENTS, PRODUCT.format(1), START, DONE, PRODUCT.format(2)))
    (_, products, _) = Streams(program, H100, {"all-gather-start": 0.0}, Assumptions()).step()
    wire, assumed, share = products / 4, Assumptions(), H100.product_share
    low, high = _ends(program, H100, {"all-gather-start": wire}, assumed)
    launches, slow = 2 * assumed.launch_seconds, 2 * assumed.slow_launch_seconds
    work = (products - launches) * share
    assert low == pytest.approx(work / (share + 0.05) + launches)
    assert high == pytest.approx(work / (share - 0.1) + slow + wire)


def test_each_kernel_of_a_gpu_is_launched_and_a_tpu_has_none():
    text = recorded.entry(*ARGUMENTS, *(f"%copy.{number} = f32[8]{{0}} copy(%x)" for number in range(40)))
    tpu = next(one for one in accelerators.ACCELERATORS if one.name == "v5p")
    small = 2 * 8 * 4 / (H100.memory_bytes_per_second * Assumptions().memory_efficiency)
    assert streams(text)[0] == pytest.approx(40 * (Assumptions().launch_seconds + small))
    assert Streams(parse.read(text), tpu, {}, Assumptions()).step()[0] < 1e-8


def test_what_nothing_can_hide_is_in_the_low_end_as_well():
    synchronous = START.replace("all-gather-start(%x)", 'all-gather-start(%x), is="{\\"is_sync\\":true}"').replace(
        '\\"', '"'
    )
    bare = recorded.entry(*ARGUMENTS, PRODUCT.format(1), synchronous, DONE)
    product = streams(bare, {"all-gather-start": 0.0}, hidden=Hidden.ALL)[0]
    assert streams(bare, {"all-gather-start": product}, hidden=Hidden.ALL)[0] == pytest.approx(2 * product)
    hidden = recorded.entry(*ARGUMENTS, PRODUCT.format(1), START, DONE)
    long = {"all-gather-start": 3 * product}
    assert streams(hidden, long, hidden=Hidden.ALL)[0] >= 3 * product


def on_two_hosts(**sizes):
    """A mesh of imagined devices, half of them on each host."""
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    devices = np.vectorize(lambda i: SimpleNamespace(process_index=int(2 * i >= numbers.size)), otypes=[object])(
        numbers
    )
    return SimpleNamespace(devices=devices, axis_names=tuple(sizes), shape=sizes)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [("data", {0: 1, 1: 1}), ("tensor", {0: 4}), ("data+tensor", {0: 4, 1: 4}), ("irregular", {0: 4, 1: 4})],
)
def test_the_hosts_of_a_group(axes, expected):
    assert devices_by(on_two_hosts(data=2, tensor=4), axes, "process_index") == expected


def test_in_an_all_to_all_each_device_sends_what_leaves_its_host_itself():
    """Half of the peers in an all-to-all along both axes are on the other host, where a ring crosses over once."""
    mesh, cluster = on_two_hosts(data=2, tensor=4), SimpleNamespace(platform="cuda", accelerator=H100)
    link, network = H100.link_bytes_per_second, H100.network_bytes_per_second
    found = [exchange_bandwidth(mesh, cluster, axes) for axes in ("tensor", "data", "data+tensor")]
    assert found == [link, network, pytest.approx(network * 7 / 4)]
    assert bandwidth(mesh, cluster, "data+tensor") > found[2]
    both = [collective(kind, "data+tensor", 8, 1e9) for kind in ("all-to-all", "all-gather")]
    seconds = transfer_seconds(both, mesh, cluster, Assumptions())
    assert seconds["all-to-all.data+tensor"][1] == pytest.approx(1e9 / (0.8 * network * 7 / 4))
    assert seconds["all-to-all.data+tensor"][1] > seconds["all-gather.data+tensor"][1]


def test_on_a_torus_an_all_to_all_travels_a_quarter_of_its_ring():
    mesh = on_two_hosts(data=2, context=8)
    cluster = SimpleNamespace(
        platform="tpu", accelerator=next(one for one in accelerators.ACCELERATORS if one.name == "v5e")
    )
    for axis, share in (("context", 4 * 7 / 64), ("data", 1)):
        assert exchange_bandwidth(mesh, cluster, axis) == pytest.approx(bandwidth(mesh, cluster, axis) * share)


def collective(kind, axes, group_size, wire_bytes):
    return Collective(f"{kind}.{axes}", kind, axes, group_size, 1, 0.0, wire_bytes, False, False, "")


def test_measured_links_replace_the_assumptions_where_they_are_alike():
    mesh = on_two_hosts(data=2, pipeline=2, fsdp=4)
    cluster = SimpleNamespace(platform="cuda", accelerator=H100)
    found = [
        collective("all-reduce", "data", 2, 1e9),
        collective("all-reduce", "data+fsdp", 8, 1e9),
        collective("all-reduce", "fsdp", 4, 1e9),
        collective("collective-permute", "pipeline", 2, 1e6),  # a permute's groups are pairs
        collective("all-gather", "fsdp", 4, 1e9),
    ]
    assumed = transfer_seconds(found, mesh, cluster, Assumptions())
    measured = Links("NVIDIA H100 80GB HBM3", (
        Link("data", "all-reduce", 2, 2, 50e-6, 20e9),
        Link("pipeline", "collective-permute", 4, 1, 9e-6, 100e9),
        Link("fsdp", "all-reduce", 4, 2, 1.0, 1.0),  # between hosts: another network
    ))  # fmt: skip
    assumptions = Assumptions(links=measured)
    seconds = transfer_seconds(found, mesh, cluster, assumptions)
    assert seconds["all-reduce.data"] == pytest.approx((50e-6, 0.05))
    assert seconds["collective-permute.pipeline"] == pytest.approx((9e-6, 1e-5))
    for name in ("all-reduce.data+fsdp", "all-reduce.fsdp", "all-gather.fsdp"):
        assert seconds[name] == assumed[name], name
    lines = link_lines(links_of(found, mesh, assumptions))
    assert "measured: all-reduce along data, 2 devices on 2 hosts, takes 50.0 us plus its bytes at 20 GB/s" in lines
    assert [line.split()[0] for line in lines].count("assumed,") == 3
    assert links_of(found, mesh, Assumptions()) == {}


def test_loops_cost_their_body_each_time():
    whole, computed, _ = streams(recorded.GPU_LOOPS)
    assert whole == computed == pytest.approx(15 * streams(recorded.GPU_LOOPS.replace('"n":"5"', '"n":"1"').replace(
        '"n":"3"', '"n":"1"'))[0])  # fmt: skip
