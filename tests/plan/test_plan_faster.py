"""Kernels by part of the model, and the advice to unroll layers if memory is free."""

import dataclasses
from types import SimpleNamespace

import pytest

from meshtrain.errors import UserError
from meshtrain.models.remat import RematOptions
from meshtrain.plan import findings, planner, text_report
from meshtrain.plan.cost.memory import Memory
from meshtrain.plan.hlo import parse
from meshtrain.plan.search import candidates, faster
from meshtrain.plan.timing import kernels, streams
from meshtrain.sharding.rules import AXES
from tests.plan import recorded
from tests.plan.conftest import H100, shape_of

GIB = 2**30
FULL, UNROLLED = RematOptions("full"), RematOptions("none", unroll=True)
CLUSTER = SimpleNamespace(accelerator=H100, devices_each=8, platform="cuda")


def scope(path):
    return f'metadata={{op_name="jit(step)/{path}"}}'


def test_kernels_of_a_part_move_arrays_between_them_for_nothing():
    backward = "transpose(jvp())/while/body/Layer/mlp_norm/mul"
    text = recorded.entry(
        "%x = f32[1024]{0} parameter(0)",
        f"%a = f32[1024]{{0}} negate(%x), {scope(backward)}",
        f"%b = f32[1024]{{0}} multiply(%a, %x), {scope(backward)}",
        f"%c = f32[1024]{{0}} negate(%b), {scope('jvp()/checkpoint/rematted_computation/Layer/mlp/mul')}",
        f"%d = f32[1024]{{0}} negate(%c), {scope('jit(_where)/select_n')}",
    )
    rows = {row.part: row for row in kernels.kernels_by_part(parse.read(text), H100, streams.Assumptions())}
    assert set(rows) == {"Layer/mlp_norm", "Layer/mlp", kernels.OUTSIDE}
    norm, mlp = rows["Layer/mlp_norm"], rows["Layer/mlp"]
    assert (norm.count, norm.moved_bytes) == (2, 5 * 4096)
    assert norm.minimum_bytes == 2 * 4096, "x is read once, a is not moved, b is written"
    assert mlp.moved_bytes == mlp.minimum_bytes == 2 * 4096
    assert norm.recomputed_seconds == 0
    assert mlp.recomputed_seconds == mlp.seconds > 0


@pytest.mark.parametrize(
    "path, is_recomputed",
    [
        ("jvp()/while/body/eval_jaxpr/jvp(Layer)/mlp/mul", False),
        ("transpose(jvp())/while/body/eval_jaxpr/transpose(jvp(Layer))/mlp/mul", False),
        ("transpose(jvp())/while/body/eval_jaxpr/jvp(Layer)/mlp/mul", True),
        ("transpose(jvp())/while/body/checkpoint/rematted_computation/Layer/mlp/mul", True),
    ],
)
def test_a_forward_pass_inside_of_the_backward_pass_is_recomputed(path, is_recomputed):
    text = recorded.entry("%x = f32[1024]{0} parameter(0)", f"%a = f32[1024]{{0}} negate(%x), {scope(path)}")
    [row] = kernels.kernels_by_part(parse.read(text), H100, streams.Assumptions())
    assert row.part == "Layer/mlp"
    assert (row.recomputed_seconds > 0) is is_recomputed


def test_kernels_take_the_seconds_of_the_simulated_step():
    program = parse.read(recorded.GPU_LOOPS)
    [row] = kernels.kernels_by_part(program, H100, streams.Assumptions())
    assert row.count == 15
    assert row.seconds == pytest.approx(streams.Streams(program, H100, {}, streams.Assumptions()).step()[1])
    assert row.part == kernels.PRODUCTS


def memory(peak):
    compiler = SimpleNamespace(peak_bytes=peak, temporary_bytes=0)
    result = dict.fromkeys((field.name for field in dataclasses.fields(Memory)), 0)
    return Memory(**result | {"compiler": compiler, "capacity_bytes": 70 * GIB, "fits": peak < 70 * GIB})


def plan_of(config, peak=20 * GIB, seconds=1.423, recomputed=0.202):
    """Returns a plan of a step that was not compiled."""
    shape = {axis: getattr(config.mesh, axis) for axis in AXES}
    assembly = SimpleNamespace(config=config, mesh=SimpleNamespace(shape=shape))
    plan = dict.fromkeys(field.name for field in dataclasses.fields(planner.Plan))
    plan |= {
        "cluster": CLUSTER,
        "compiled": SimpleNamespace(assembly=assembly),
        "memory": memory(peak),
        "timing": streams.Timing(seconds, seconds, seconds, seconds, 0.0, 1.0),
        "kernels": (kernels.Kernels("Layer/mlp", 1.0, seconds, recomputed, 0.0, 0.0),),
    }
    return planner.Plan(**plan)


def test_free_memory_suggests_a_compiled_change(small, monkeypatch):
    config = small({"data": 8}, remat=FULL, accumulation_steps=1)
    tried = []

    def compiled(changed, shape, cluster, assumptions):
        tried.append(changed)
        if len(tried) == 1:
            raise UserError("rejected")
        return plan_of(changed, 30 * GIB, 1.182, 0.0)

    changes = [findings.UNROLLED, findings.UNROLLED | {"accumulation_steps": 2}]
    monkeypatch.setattr(faster, "changes", lambda *_: iter(changes))
    monkeypatch.setattr(planner, "plan", compiled)
    plan = faster.with_faster(plan_of(config))
    assert [one.remat for one in tried] == [UNROLLED, UNROLLED]
    assert [one.accumulation_steps for one in tried] == [1, 2]
    [found] = findings.free_memory(plan)
    assert found.what == "50 GiB free and 202 of 1,423 ms recomputed"
    assert found.change == (
        "remat.policy=none, remat.unroll=true, accumulation_steps=2: 1,182 ms instead of 1,423, peak 30 GiB (compiled)"
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"peak": 71 * GIB}, id="does not fit"),
        pytest.param({"recomputed": 0.01}, id="recomputes little"),
        pytest.param({"seconds": 1.19}, id="not faster"),
    ],
)
def test_no_change_is_suggested_that_gains_nothing(changes, small, monkeypatch):
    config = small({"data": 8}, remat=FULL)
    monkeypatch.setattr(planner, "plan", lambda changed, *_: plan_of(changed, 30 * GIB, 1.182, 0.0))
    assert faster.with_faster(plan_of(config, **changes)).faster is None


def test_changes_are_those_that_fit_and_are_not_slower_by_the_estimates(small):
    shape = shape_of(data=8)
    # With two microbatches, this small model would need more time for the sums of gradients than for recomputation.
    assert list(faster.changes(small(remat=FULL), shape, CLUSTER)) == [findings.UNROLLED]
    twice = small(remat=FULL, accumulation_steps=2)
    assert list(faster.changes(twice, shape, CLUSTER)) == [findings.UNROLLED]
    tiny = SimpleNamespace(accelerator=dataclasses.replace(H100, memory_bytes=1), devices_each=8)
    assert list(faster.changes(small(remat=FULL), shape, tiny)) == []


@pytest.mark.parametrize("mesh, remat, expected", [({"data": 8}, FULL, True), ({"data": 8}, UNROLLED, False),
                                                   ({"data": 4, "pipeline": 2}, FULL, False)])  # fmt: skip
def test_layers_in_a_loop_can_be_unrolled(mesh, remat, expected, small):
    assert findings.can_unroll(small(remat=remat), shape_of(**mesh)) is expected


def test_a_search_unrolls_layers_that_recompute_nothing(small):
    ways = list(candidates.ways(small(), shape_of(data=8), only_mesh=False))
    assert {(way["remat.policy"], way.get("remat.unroll", False)) for way in ways} == {
        ("none", True), ("selective", False), ("full", False)
    }  # fmt: skip


def test_the_report_lists_kernels_and_their_bytes(small):
    table = text_report.kernels(plan_of(small({"data": 8}, remat=FULL)))
    assert "Layer/mlp" in table
    assert "202 ms" in table
