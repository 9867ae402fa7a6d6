"""A Hugging Face folder starts a task of one's own where its tensors have the names of the task's weights."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from docs.guide.own_model import get_config
from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.hf import export, folder
from meshtrain.run import base_weights, initial_state, preflight


def saved(directory, shapes, dtype="float32"):
    """Writes random tensors of these shapes, and the config.json of a model that this program does not know."""
    directory.mkdir()
    tensors = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    export.write_file(directory / "model.safetensors", shapes, tensors.values(), dtype)
    (directory / "config.json").write_text(json.dumps({"model_type": "eight_bytes"}))
    return tensors


def test_a_task_of_ones_own_begins_with_a_folder_on_its_mesh(tmp_path):
    tensors = saved(tmp_path / "model", {"up": (512, 256), "down": (256, 64), "table": (384, 64)}, "bfloat16")
    config = resolve(get_config(), {"init_from": str(tmp_path / "model"), "batch_size": "8"})
    assembly = assemble(config, dataclasses.asdict(config.mesh), jax.devices())
    assert preflight.check(config, tmp_path / "run", 0) == []
    base_weights.refuse_other_weights(assembly, tmp_path / "run")
    params = initial_state.initial_state(assembly).params
    for name, tensor in tensors.items():
        assert params[name].sharding == assembly.state.params[name].sharding
        np.testing.assert_array_equal(params[name], tensor.astype(jax.numpy.bfloat16).astype(np.float32))
    saved(tmp_path / "other", {"up": (512, 255), "down.kernel": (256, 64), "table": (384, 64)})
    other = dataclasses.replace(assembly, config=dataclasses.replace(config, init_from=str(tmp_path / "other")))
    with pytest.raises(UserError) as caught:
        base_weights.refuse_other_weights(other, tmp_path / "run")
    assert [line.partition(": got ")[2].partition("; allowed")[0] for line in caught.value.problems] == [
        "no down (1 of 3)",
        "additional down.kernel (1 of 3)",
        "another shape of up (1 of 3)",
    ]


@pytest.mark.parametrize("name", ["layer.0.kernel", "layer/0/kernel"])
def test_parts_of_a_path_have_dots_or_slashes_between_them(name, tmp_path):
    [tensor] = saved(tmp_path / "model", {name: (2, 3)}).values()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=here)
    for tree in ({"layer": {"0": {"kernel": leaf}}}, {name: leaf}, {"layer.0": {"kernel": leaf}}):
        [got] = jax.tree.leaves(folder.read_by_name(tmp_path / "model", tree))
        np.testing.assert_array_equal(got, tensor)
