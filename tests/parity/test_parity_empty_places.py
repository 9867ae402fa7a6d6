"""Layers that the pipeline does not divide: the last places are empty, and no number changes."""

import dataclasses

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.hf import export, tensor_files
from meshtrain.models.lora import LoraOptions
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.trees import leaves_with_paths
from tests.parity import runs
from tests.parity.comparison import SCALAR_BOUND
from tests.parity.test_parity_families import DEEPSEEK

IN_CHUNKS = PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2)
GPIPE = PipelineOptions(schedule="gpipe", num_microbatches=4)
AGAIN = {level: {"zero": ZeroOptions(level=level), "remat": RematOptions("full")} for level in (1, 2, 3)}


def of(num_layers, model=runs.LLAMA, pipeline=None, optimizer="adam", **changes):
    changes |= {"pipeline": pipeline or runs.CONFIG.pipeline}
    config = dataclasses.replace(runs.CONFIG, model=dataclasses.replace(model, num_layers=num_layers), **changes)
    return runs.with_optimizer(config, optimizer, clip_norm=0.0 if optimizer == "adam" else 0.1)


# Three layers on two stages of two places; five on two stages of two chunks of two places, a chunk of which is empty.
FAST = {
    "5-tensor": (of(5, pipeline=IN_CHUNKS), {"tensor": 2, "pipeline": 2}),
}
SLOW = {
    "3-data": (of(3, **AGAIN[1]), {"data": 2, "pipeline": 2}),
    "3-context": (of(3, runs.GPT, GPIPE), {"context": 2, "pipeline": 2}),
    "3-muon": (of(3, optimizer="muon", **AGAIN[2]), {"data": 2, "pipeline": 2}),
    "3-adafactor": (of(3, optimizer="adafactor"), {"fsdp": 2, "pipeline": 2}),
    "5-data": (of(5, pipeline=IN_CHUNKS, optimizer="adamw"), {"data": 2, "fsdp": 2, "pipeline": 2}),
    "5-level3": (of(5, runs.QWEN, IN_CHUNKS, **AGAIN[3]), {"data": 2, "pipeline": 2}),
    # A dense layer before those five.
    "6-expert": (
        of(6, DEEPSEEK, IN_CHUNKS, remat=RematOptions("selective")),
        {"data": 2, "expert": 2, "pipeline": 2},
    ),
    "6-gemma": (of(6, runs.GEMMA), {"pipeline": 4}),
}


@pytest.mark.parametrize(
    ("config", "mesh"),
    [pytest.param(*case, id=name) for name, case in FAST.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_empty_places_change_no_number(config, mesh, assert_parity):
    assert_parity(config, **mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["5-tensor", "6-expert"])
def test_evaluation_passes_empty_places_by(name):
    config, mesh = (FAST | SLOW)[name]
    found = []
    for shape in (runs.sizes(), runs.sizes(**mesh)):
        assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
        state = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed)))
        [numbers, *_] = runs.example_batches()
        batch = {key: jax.device_put(numbers[key], leaf.sharding) for key, leaf in assembly.batch.items()}
        found.append(jax.device_get(assembly.steps.evaluate(state.params, batch)))
    one, pipelined = found
    assert pipelined["weight"] == one["weight"]
    np.testing.assert_allclose(pipelined["loss"], one["loss"], rtol=SCALAR_BOUND)


def test_empty_places_are_in_no_count_no_checkpoint_and_no_export(tmp_path, exact_bits):
    """From such a mesh to one device and back: every array of the state, bit by bit."""
    config, mesh = FAST["5-tensor"]
    assembly = assemble(config, runs.sizes(**mesh), jax.devices()[:4])
    one = assemble(config, runs.sizes(), jax.devices()[:1])
    assert assembly.task.num_parameters == one.task.num_parameters
    # The pipeline divides another dim, so that a device saves no more than its share.
    down = assembly.states.kept.params["layers"]["mlp"]["down"]
    assert int(np.prod(down.sharding.shard_shape(down.shape))) == down.size // 4
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    generator = np.random.default_rng(0)
    drawn = lambda leaf: jax.device_put(generator.random(leaf.shape).astype(leaf.dtype), leaf.sharding)  # noqa: E731
    state = dataclasses.replace(state, opt_state=jax.tree.map(drawn, assembly.state.opt_state))
    kept, options = assembly.steps.to_kept(state), CheckpointOptions()
    with Checkpoints(tmp_path, options) as checkpoints:
        checkpoints.save(1, kept, {})
        checkpoints.save(2, checkpoints.restore(1, one.states.kept), {})
        restored = checkpoints.restore(2, assembly.states.kept)
    jax.tree.map(np.testing.assert_array_equal, restored, kept)
    weights = one.steps.init(jax.random.key_data(jax.random.key(0))).params
    for name, params in {"one": weights, "stages": restored.params}.items():
        (tmp_path / name).mkdir()
        export.write_weights(tmp_path / name, "llama", config.model, params, "float32", LoraOptions())
    exported = [(tmp_path / name / tensor_files.ONE_FILE).read_bytes() for name in ("one", "stages")]
    assert exported[0] == exported[1]
    again = assembly.steps.from_kept(restored)
    for (path, leaf), before in zip(leaves_with_paths(again), jax.tree.leaves(state), strict=True):
        if "layers/" in path:
            assert leaf.shape[:2] == (2, 4), path
            leaf, before = (np.asarray(array).reshape(8, -1) for array in (leaf, before))
            assert not leaf[5:].any(), path
            leaf, before = leaf[:5], before[:5]
        np.testing.assert_array_equal(leaf, before, err_msg=path)
