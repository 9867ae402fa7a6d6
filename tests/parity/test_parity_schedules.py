"""Every schedule that the executor runs, on every mesh with a pipeline in it: the numbers of one device, dropout on."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshtrain.assemble import assemble
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.step.precision import PrecisionOptions

ROOT = pathlib.Path(__file__).parents[2]
SCHEDULES = {
    "gpipe": PipelineOptions(schedule="gpipe", num_microbatches=4),
    "1f1b": PipelineOptions(schedule="1f1b", num_microbatches=4),
    "interleaved_1f1b": PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2),
}
MESHES = [
    {"data": data, "fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}
    for pipeline in (2, 4, 8)
    for data in (1, 2, 4)
    for fsdp in (1, 2, 4)
    for tensor in (1, 2, 4)
    if data * fsdp * tensor * pipeline == 8
]
FAST = [
    ("gpipe", {"data": 1, "fsdp": 2, "tensor": 1, "pipeline": 4}),
    ("interleaved_1f1b", {"data": 2, "fsdp": 1, "tensor": 1, "pipeline": 4}),
]


def name(mesh: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1)


CASES = [
    pytest.param(
        schedule,
        mesh,
        id=f"{schedule}-{name(mesh)}",
        marks=() if (schedule, mesh) in FAST else pytest.mark.slow,
    )
    for schedule in SCHEDULES
    for mesh in MESHES
]


def with_schedule(config, schedule, **options):
    """The configuration under a schedule. Two chunks on eight stages need more layers and more microbatches."""
    pipeline = dataclasses.replace(SCHEDULES[schedule], **options)
    return dataclasses.replace(config, pipeline=pipeline)


def deep(config):
    """Sixteen layers and eight microbatches, as eight stages of two chunks need them."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=16),
        pipeline=dataclasses.replace(config.pipeline, num_microbatches=8),
    )


def gpt2(config):
    """What the other tests' model lacks: a tied table, learned positions, LayerNorm, biases, GELU; and clipping."""
    model = dataclasses.replace(
        config.model,
        tied_embeddings=True,
        positions="learned",
        norm="layernorm",
        biases=True,
        activation="gelu",
        num_layers=4,
    )
    return dataclasses.replace(config, model=model, optimizer=dataclasses.replace(config.optimizer, clip_norm=0.3))


def packed_batch(shape):
    """Two documents a sequence, some targets without weight."""
    generator = np.random.default_rng(3)
    return {
        "tokens": generator.integers(0, 100, shape).astype(np.int32),
        "targets": generator.integers(0, 100, shape).astype(np.int32),
        "segment_ids": np.sort(generator.integers(1, 3, shape), axis=1).astype(np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": (generator.random(shape) < 0.9).astype(np.float32),
    }


@pytest.mark.parametrize(("schedule", "mesh"), CASES)
def test_schedule_changes_no_number(schedule, mesh, base, trained, assert_same):
    config = with_schedule(base, schedule)
    if schedule == "interleaved_1f1b" and mesh["pipeline"] == 8:
        config = deep(config)
        assert_same(trained(config, **mesh), trained(deep(base)))
    else:
        assert_same(trained(config, **mesh), trained(base))


@pytest.mark.slow
def test_schedules_agree_among_themselves(base, trained, assert_same):
    """The three run the same microbatches in another order, so they may differ by rounding only."""
    mesh = {"fsdp": 2, "pipeline": 4}
    first, *others = (trained(with_schedule(base, schedule), **mesh) for schedule in SCHEDULES)
    for other in others:
        assert_same(other, first)


@pytest.mark.slow
def test_pipeline_of_eight_on_sixteen_devices():
    """In a program of its own, since the number of devices is fixed when JAX starts."""
    done = subprocess.run([sys.executable, "-c", SIXTEEN], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["data", "fsdp", "tensor"] * len(SCHEDULES), done.stdout


SIXTEEN = """
import dataclasses, runpy, sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
sys.path.insert(0, "")
parity = runpy.run_path("tests/parity/conftest.py")
here = runpy.run_path("tests/parity/test_parity_schedules.py")
train, sizes, base = parity["train"], parity["sizes"], here["deep"](parity["CONFIG"])
one = train(base, sizes())
for schedule in here["SCHEDULES"]:
    config = here["with_schedule"](base, schedule, num_microbatches=8)
    for axis in ("data", "fsdp", "tensor"):
        parity["assert_same"](train(config, sizes(pipeline=8, **{axis: 2})), one)
        print(axis)
"""


@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        ("1f1b", {"tensor": 2, "pipeline": 2}),
        pytest.param("gpipe", {"data": 2, "fsdp": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", {"fsdp": 2, "tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
    ],
)
def test_tied_table_learned_positions_biases_and_clipping(schedule, mesh, base, trained, assert_same):
    """The tied table gets its gradient from both ends, and the norm that clips is taken over all stages once."""
    config = gpt2(base)
    one = trained(config)
    assert one.grad_norms[0] > config.optimizer.clip_norm, "nothing is clipped"
    assert_same(trained(with_schedule(config, schedule), **mesh), one)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_rematerialization_inside_a_stage_changes_no_number(policy, base, trained, one_device, assert_same):
    config = dataclasses.replace(base, remat=RematOptions(policy))
    assert_same(trained(config, tensor=2, pipeline=2), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_bfloat16_is_as_far_from_float32_as_on_one_device(schedule, base, trained, one_device):
    """Sums in another order round differently: not equal, but no further from the exact gradients than rounding is.

    First gradients only: later ones belong to weights that have parted.
    """
    config = dataclasses.replace(with_schedule(base, schedule), precision=PrecisionOptions("bfloat16"))
    one, pipelined = trained(config), trained(config, tensor=2, pipeline=2)
    jax.tree.map(np.testing.assert_array_equal, pipelined.initial, one.initial)
    np.testing.assert_allclose(pipelined.losses, one.losses, rtol=2e-3)
    rounding, difference = distance(one, one_device), distance(pipelined, one_device)
    assert 0 < rounding < 0.05
    assert difference < 1.5 * rounding


def distance(got, expected) -> float:
    """The norm of the difference of two gradients over the norm of the second."""
    square = lambda x: float(np.sum(np.square(x, dtype=np.float64)))  # noqa: E731
    pairs = list(zip(jax.tree.leaves(got.gradients), jax.tree.leaves(expected.gradients), strict=True))
    return (sum(square(a - b) for a, b in pairs) / sum(square(b) for _, b in pairs)) ** 0.5


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_schedule_means_nothing_on_a_pipeline_of_size_one(schedule, base, trained, one_device, assert_same):
    assert_same(trained(with_schedule(base, schedule)), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_fewer_microbatches_than_stages(schedule, base, trained, one_device, assert_same):
    assert_same(trained(with_schedule(base, schedule, num_microbatches=2), pipeline=4), one_device)


@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [("1f1b", {"fsdp": 2, "pipeline": 4}), ("interleaved_1f1b", {"data": 2, "tensor": 2, "pipeline": 2})],
)
def test_evaluation_is_one_device_s(schedule, mesh, base):
    """Sums of loss and weight, nothing dropped, from the same weights."""
    found = []
    for config, shape in ((base, {}), (with_schedule(base, schedule), mesh)):
        axes = {"data": 1, "pipeline": 1, "fsdp": 1, "tensor": 1} | shape
        assembly = assemble(config, axes, jax.devices()[: int(np.prod(list(axes.values())))])
        state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
        numbers = packed_batch(assembly.batch["tokens"].shape)
        batch = {key: jax.device_put(numbers[key], leaf.sharding) for key, leaf in assembly.batch.items()}
        found.append(jax.device_get(assembly.eval_step(state.params, batch)))
    one, pipelined = found
    assert pipelined.keys() == one.keys() == {"loss", "weight"}
    assert pipelined["weight"] == one["weight"]
    np.testing.assert_allclose(pipelined["loss"], one["loss"], rtol=1e-5)
