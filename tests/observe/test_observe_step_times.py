"""The step clock on a simulated host and device, and what log lines and utilization say."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.assembly.facts import throughput_of
from meshtrain.config.schema import Config
from meshtrain.observe import step_times
from meshtrain.observe.throughput import Throughput
from meshtrain.step.precision import PrecisionOptions


class Machine:
    """A host and a device with a queue; results are the times at which the device has them."""

    def __init__(self):
        self.now_seconds = 100.0
        self.device_free_seconds = 0.0
        self.waited_for = []

    def now(self):
        return self.now_seconds

    def work(self, seconds):
        self.now_seconds += seconds

    def dispatch(self, seconds):
        self.device_free_seconds = max(self.device_free_seconds, self.now_seconds) + seconds
        return self.device_free_seconds

    def wait(self, ready_seconds):
        self.waited_for.append(ready_seconds)
        self.now_seconds = max(self.now_seconds, ready_seconds)

    def clock(self):
        return step_times.StepClock(now=self.now, wait=self.wait)


def run(machine, clock, *, steps, device_seconds, data_seconds=0.0):
    completed = []
    for step in steps:
        with clock.waiting_for_data():
            machine.work(data_seconds)
        completed += clock.dispatched(step, machine.dispatch(device_seconds))
    return completed


def test_one_step_stays_in_flight_but_for_the_first():
    machine = Machine()
    clock = machine.clock()
    results = [machine.dispatch(1.0) for _ in range(4)]
    assert [done.step for done in clock.dispatched(1, results[0])] == [1]
    assert clock.dispatched(2, results[1]) == []
    assert machine.waited_for == results[:1]
    assert [done.step for done in clock.dispatched(3, results[2])] == [2]
    assert [done.step for done in clock.dispatched(4, results[3])] == [3]
    assert machine.waited_for == results[:3]
    assert [done.step for done in clock.drain()] == [4]
    assert clock.drain() == []


def test_a_step_takes_as_long_as_the_device_not_as_its_dispatch():
    machine = Machine()
    clock = machine.clock()
    completed = run(machine, clock, steps=range(1, 7), device_seconds=2.0, data_seconds=0.25) + clock.drain()
    assert [done.step for done in completed] == [1, 2, 3, 4, 5, 6]
    assert [done.step_seconds for done in completed[2:]] == [2.0] * 4
    # Only the data for step 2 came while the device had nothing to do.
    assert completed[1].step_seconds == 2.25
    assert machine.now_seconds == 100.0 + 2.25 + 2.25 + 4 * 2.0


def test_the_first_step_stands_apart():
    machine = Machine()
    clock = machine.clock()
    machine.work(30.0)  # compilation
    completed = run(machine, clock, steps=[1], device_seconds=2.0)
    assert completed[0].is_first
    assert clock.averages(100) == {"first_step_seconds": 32.0}
    assert clock.averages(100) == {}
    run(machine, clock, steps=[2, 3, 4], device_seconds=2.0)
    averages = clock.averages(100)
    assert averages["step_seconds"] == 2.0
    assert "first_step_seconds" not in averages


def test_averages_cover_the_steps_since_the_last_call():
    machine = Machine()
    clock = machine.clock()
    run(machine, clock, steps=range(1, 4), device_seconds=1.0)
    clock.drain()
    assert clock.averages(50)["tokens_per_second"] == 50.0
    run(machine, clock, steps=range(4, 8), device_seconds=4.0)
    clock.drain()
    averages = clock.averages(50)
    assert averages == {
        "step_seconds": 4.0,
        "data_seconds": 0.0,
        "host_seconds": 0.0,
        "device_wait_seconds": 3.0,  # of four steps, the last was drained
        "data_share": 0.0,
        "tokens_per_second": 12.5,
    }


def test_slow_data_shows_in_step_time_and_share():
    machine = Machine()
    clock = machine.clock()
    run(machine, clock, steps=[1], device_seconds=1.0)
    clock.averages(10)
    start_seconds = machine.now_seconds
    completed = run(machine, clock, steps=range(2, 10), device_seconds=1.0, data_seconds=3.0) + clock.drain()
    averages = clock.averages(10)
    assert sum(done.step_seconds for done in completed) == machine.now_seconds - start_seconds
    assert sum(done.data_seconds for done in completed) == 8 * 3.0
    assert averages["data_share"] == pytest.approx(24.0 / 25.0)
    assert averages["step_seconds"] == pytest.approx(25.0 / 8.0)
    assert all(done.data_seconds <= done.step_seconds for done in completed)


def test_a_pause_belongs_to_no_step():
    machine = Machine()
    clock = machine.clock()
    run(machine, clock, steps=range(1, 4), device_seconds=1.0)
    clock.drain()
    with clock.pause(), clock.waiting_for_data():
        machine.work(500.0)
    run(machine, clock, steps=range(4, 6), device_seconds=1.0)
    clock.drain()
    averages = clock.averages(1)
    assert averages["step_seconds"] == 1.0
    assert averages["data_seconds"] == 0.0


def test_the_host_s_own_work_is_neither_data_nor_a_wait_nor_a_pause():
    machine = Machine()
    clock = machine.clock()
    for step in range(1, 7):
        machine.work(0.5)  # logging, say
        with clock.waiting_for_data():
            machine.work(0.125)
        machine.work(0.25)
        clock.dispatching()
        clock.dispatched(step, machine.dispatch(1.0))
        if step == 1:
            clock.averages(1)
        if step == 4:
            clock.drain()
            with clock.pause(), clock.waiting_for_data():
                machine.work(500.0)
    clock.drain()
    averages = clock.averages(1)
    assert averages["host_seconds"] == 0.75
    assert averages["device_wait_seconds"] == 0.375 / 5
    assert averages["data_seconds"] == 0.125


def test_a_pause_needs_a_drained_clock():
    machine = Machine()
    clock = machine.clock()
    run(machine, clock, steps=range(1, 3), device_seconds=1.0)
    with pytest.raises(AssertionError), clock.pause():
        pass


def test_results_of_real_steps_are_there_and_readable():
    step = jax.jit(lambda x: {"loss": jnp.sum(x @ x), "grad_norm": jnp.float32(2.5)})
    clock = step_times.StepClock()
    completed = []
    for number in range(1, 5):
        completed += clock.dispatched(number, step(jnp.full((8, 8), number, jnp.float32)))
        assert all(leaf.is_ready() for done in completed for leaf in done.result.values())
    completed += clock.drain()
    assert [step_times.scalars(done.result)["loss"] for done in completed] == [512.0 * n * n for n in range(1, 5)]
    assert type(step_times.scalars(completed[0].result)["grad_norm"]) is float
    assert min(done.step_seconds for done in completed) > 0


def test_a_failed_step_is_not_swallowed():
    def wait(result):
        raise RuntimeError(result)

    clock = step_times.StepClock(wait=wait)
    with pytest.raises(RuntimeError, match="out of memory"):
        clock.dispatched(1, "out of memory")


def test_utilization_agrees_with_palm():
    # Chowdhery et al. 2022: PaLM 540B at 238.3 K tokens/s on 6,144 TPU v4 has a MFU of 46.2 %.
    flops = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    clock = types.SimpleNamespace(averages=lambda units, unit: {f"{unit}_per_second": 238.3e3})
    of_peak = [Throughput("tokens", 1, flops, 6144, peak).since_last_row(1, clock)["mfu"] for peak in (275e12, None)]
    assert of_peak == [pytest.approx(0.462, abs=5e-4), None]


@pytest.mark.parametrize(("policy", "peak"), [("bfloat16", 989.4e12), ("float32", 494.7e12)])
def test_throughput_is_that_of_the_whole_mesh_in_the_compute_dtype(policy, peak):
    """Devices that are not there: for simulated ones no peak is known, and MFU is never logged."""
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    assembly = types.SimpleNamespace(
        task=types.SimpleNamespace(unit="tokens", num_units=512, flops_per_token=6e9),
        mesh=types.SimpleNamespace(devices=np.array([device] * 8), size=8),
        config=Config(precision=PrecisionOptions(policy)),
    )
    assert throughput_of(assembly) == Throughput("tokens", 512, 6e9, 8, peak)


def test_loads_of_experts_are_scalars_of_a_row_and_not_of_its_line():
    values = step_times.scalars({"loss": jnp.float32(2), "load_each": jnp.float32([0.5, 1.5])})
    assert values == {"loss": 2.0, "load_each/0": 0.5, "load_each/1": 1.5}
    assert step_times.log_line(values | {"bleu/4": 1.0}) == "loss 2.0000  bleu/4 1"


def test_log_line():
    values = {
        "step": 20,
        "my_metric": 0.123456,
        "mfu": 0.4567,
        "model_flops_per_second": 1.234e15,
        "loss": 3.14159265,
        "learning_rate": 3e-4,
        "grad_norm": 0.98765,
        "tokens": 163840,
        "tokens_per_second": 12345.6,
        "step_seconds": 0.66311,
        "data_seconds": 0.008,
        "data_share": 0.0121,
    }
    assert step_times.log_line(values, num_steps=2000) == (
        "step   20/2000  loss 3.1416  learning rate 0.0003  grad norm 0.988  12,346 tokens/s  0.663 s/step  "
        "data wait 1.2%  1.23 PFLOP/s  MFU 45.7%  my metric 0.1235"
    )


def test_log_line_leaves_out_what_is_not_known():
    assert step_times.log_line({"step": 3, "loss": float("nan"), "mfu": None, "model_flops_per_second": 2.5e9}) == (
        "step 3  loss nan  2.5 GFLOP/s"
    )
    assert step_times.log_line({"step": 3, "eval_loss": 2.0}) == "step 3  eval loss 2.0000"
