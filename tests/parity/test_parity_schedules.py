"""Schedules on the meshes that the short table leaves out: the same numbers as plain JAX on one device, dropout on."""

import dataclasses
import itertools
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions
from tests.parity import runs
from tests.parity.comparison import SCALAR_BOUND

ROOT = pathlib.Path(__file__).parents[2]
SCHEDULES = {
    "gpipe": PipelineOptions(schedule="gpipe", num_microbatches=4),
    "1f1b": PipelineOptions(schedule="1f1b", num_microbatches=4),
    "interleaved_1f1b": PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2),
}
# Each mesh with a pipeline in it once; each schedule with pipelines of 2 and 4, and with each other axis. Levels of
# ZeRO, policies of rematerialization, the other model with clipping, and fewer microbatches than stages ride along:
# compiling is what a run costs.
FULL, DOTS = {"remat": RematOptions("full")}, {"remat": RematOptions("dots")}
LEVELS = {level: {"zero": ZeroOptions(level=level)} for level in (1, 2, 3)}
FEW = 2
CLIP_NORM = 0.3
# The tied table gets its gradient from both ends, and the norm that clips is taken over all stages once.
CLIPPED = {
    "model": runs.GPT,
    "optimizer": dataclasses.replace(runs.CONFIG.optimizer, clip_norm=CLIP_NORM),
}
MESHES = [
    ("1f1b", {"data": 2, "context": 2, "pipeline": 2}, LEVELS[2]),
    ("gpipe", {"fsdp": 2, "context": 2, "pipeline": 2}, {}),
    ("interleaved_1f1b", {"context": 2, "tensor": 2, "pipeline": 2}, DOTS),
    ("interleaved_1f1b", {"data": 2, "fsdp": 2, "pipeline": 2}, LEVELS[1] | CLIPPED),
    ("1f1b", {"data": 2, "tensor": 2, "pipeline": 2}, LEVELS[3] | CLIPPED),
    ("1f1b", {"fsdp": 2, "tensor": 2, "pipeline": 2}, FULL),
    ("gpipe", {"data": 2, "pipeline": 4}, {}),
    ("interleaved_1f1b", {"fsdp": 2, "pipeline": 4}, {}),
    ("gpipe", {"tensor": 2, "pipeline": 4}, {"num_microbatches": FEW}),
    ("1f1b", {"pipeline": 4}, {"num_microbatches": FEW}),
]
# Layers with experts run with schedules in `test_parity_experts.py`.
OF_EXPERTS = {"expert"}


def name(given):
    if not isinstance(given, dict):
        return given
    return "-".join(f"{key}{value if isinstance(value, int) else ''}" for key, value in given.items()) or "plain"


def with_schedule(schedule, config=runs.CONFIG, num_microbatches=4, **changes):
    pipeline = dataclasses.replace(SCHEDULES[schedule], num_microbatches=num_microbatches)
    return dataclasses.replace(config, pipeline=pipeline, **changes)


def deep():
    """Sixteen layers and eight microbatches, as eight stages of two chunks need them."""
    config = with_schedule("interleaved_1f1b", num_microbatches=8)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=16))


def test_each_schedule_stands_in_the_list_with_each_size_and_each_axis():
    seen = {(schedule, axis) for schedule, mesh, _ in MESHES for axis in mesh}
    assert seen == set(itertools.product(SCHEDULES, set(AXES) - OF_EXPERTS))
    sizes = {(schedule, mesh["pipeline"]) for schedule, mesh, _ in MESHES}
    assert sizes == set(itertools.product(SCHEDULES, (2, 4)))
    splits = [(mesh, changes["zero"].level) for _, mesh, changes in MESHES if "zero" in changes]
    assert {level for mesh, level in splits if mesh["data"] > 1} == {1, 2, 3}
    assert {changes["remat"].policy for _, _, changes in MESHES if "remat" in changes} == {"full", "dots"}
    few = {schedule for schedule, mesh, changes in MESHES if changes.get("num_microbatches") and mesh["pipeline"] > FEW}
    assert few == {"1f1b", "gpipe"}
    clipped = {schedule for schedule, _, changes in MESHES if "optimizer" in changes and changes["model"] == runs.GPT}
    assert clipped == {"1f1b", "interleaved_1f1b"}


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "mesh", "changes"), MESHES, ids=name)
def test_schedule_changes_no_number(schedule, mesh, changes, assert_parity, reference):
    config = with_schedule(schedule, **changes)
    if config.optimizer.clip_norm:
        assert reference(config).grad_norms[0] > CLIP_NORM, "nothing is clipped"
    assert_parity(config, **mesh)


@pytest.mark.slow
def test_pipeline_of_eight_on_sixteen_devices():
    """In a program of its own, since the number of devices is fixed when JAX starts."""
    done = subprocess.run([sys.executable, "-c", SIXTEEN], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same\n"


SIXTEEN = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
sys.path.insert(0, "")
from tests.parity import comparison, runs
from tests.parity.test_parity_schedules import deep
comparison.assert_same(runs.train(deep(), runs.sizes(pipeline=8, tensor=2)), runs.reference(deep()))
print("the same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b"])
def test_bfloat16_is_as_far_from_float32_as_on_one_device(schedule, one_in_bfloat16, reference):
    """Sums in another order round differently: not equal, but no further from the exact gradients than rounding is.

    First gradients only: later ones belong to weights that have parted.
    """
    config = dataclasses.replace(with_schedule(schedule), precision=PrecisionOptions("bfloat16"))
    pipelined, exact = runs.train(config, runs.sizes(tensor=2, pipeline=2)), reference(runs.CONFIG)
    np.testing.assert_allclose(pipelined.losses, one_in_bfloat16.losses, rtol=2e-3)
    rounding, difference = distance(one_in_bfloat16, exact), distance(pipelined, exact)
    assert 0 < rounding < 0.05
    assert difference < 1.5 * rounding


@pytest.fixture(scope="session")
def one_in_bfloat16():
    return runs.train(dataclasses.replace(runs.CONFIG, precision=PrecisionOptions("bfloat16")), runs.sizes())


def distance(got, expected) -> float:
    """The norm of the difference of two gradients over the norm of the second."""
    square = lambda x: float(np.sum(np.square(x, dtype=np.float64)))  # noqa: E731
    pairs = [(got.gradients[path], leaf) for path, leaf in expected.gradients.items()]
    return (sum(square(a - b) for a, b in pairs) / sum(square(b) for _, b in pairs)) ** 0.5


@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        pytest.param("1f1b", {"fsdp": 2, "context": 2, "pipeline": 2}, marks=pytest.mark.slow),
        ("interleaved_1f1b", {"data": 2, "tensor": 2, "pipeline": 2}),
    ],
    ids=name,
)
def test_evaluation_is_one_device_s(schedule, mesh):
    """Sums of loss and weight, nothing dropped, from the same weights."""
    config, found = with_schedule(schedule), []
    for shape in (runs.sizes(), runs.sizes(**mesh)):
        assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
        state = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed)))
        [numbers, *_] = runs.example_batches()
        batch = {key: jax.device_put(numbers[key], leaf.sharding) for key, leaf in assembly.batch.items()}
        found.append(jax.device_get(assembly.steps.evaluate(state.params, batch)))
    one, pipelined = found
    assert pipelined.keys() == one.keys() == {"loss", "weight"}
    assert pipelined["weight"] == one["weight"]
    np.testing.assert_allclose(pipelined["loss"], one["loss"], rtol=SCALAR_BOUND)
