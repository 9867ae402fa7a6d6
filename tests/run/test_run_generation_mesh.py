"""A pipeline's devices without the pipeline."""

import pytest

from meshtrain.config import default, resolve
from meshtrain.errors import UserError
from meshtrain.run.generating import without_pipeline
from meshtrain.sharding.rules import AXES

ONE = dict.fromkeys(AXES, 1)


def configured(shape, **sizes):
    config = default()
    config.model.num_layers, config.model.num_heads, config.model.num_kv_heads = 8, 4, 4
    config.batch_size = config.pipeline.num_microbatches = 8
    config.batch_size *= shape.get("data", 1) * shape.get("fsdp", 1)
    config.mesh.update(shape)
    config.model.update(sizes)
    return resolve(config), {**ONE, **shape}


@pytest.mark.parametrize(
    ("shape", "sizes", "folded"),
    [
        ({"pipeline": 4}, {}, {"tensor": 4}),
        ({"pipeline": 2, "tensor": 2, "data": 2}, {}, {"tensor": 4, "data": 2}),
        ({"pipeline": 4, "tensor": 2}, {}, {"tensor": 4, "fsdp": 2}),  # eight are more than there are heads
        ({"pipeline": 4}, {"num_kv_heads": 1}, {"fsdp": 4}),
        ({"pipeline": 8, "fsdp": 2}, {"num_kv_heads": 2}, {"fsdp": 8, "tensor": 2}),
    ],
)
def test_the_devices_go_to_tensor_as_far_as_that_fits(shape, sizes, folded):
    config, before = configured(shape, **sizes)
    after_config, after, line = without_pipeline(config, before)
    assert after == {**ONE, **folded}
    assert (after_config.mesh.tensor, after_config.mesh.pipeline) == (after["tensor"], 1)
    assert after_config.batch_size == after["data"] * after["fsdp"]
    assert line.startswith(f"the pipeline of {before['pipeline']} is folded into ")
    assert line.endswith("on the same devices")


def test_without_a_pipeline_nothing_changes():
    config, shape = configured({"data": 2})
    assert without_pipeline(config, shape) == (config, shape, "")


def test_what_fits_nowhere_is_one_line():
    config, shape = configured({"pipeline": 4}, num_heads=3, num_kv_heads=3, embed_dim=30)
    with pytest.raises(UserError) as caught:
        without_pipeline(config, shape)
    [line] = caught.value.problems
    assert line.startswith("mesh.pipeline: got 4; allowed: a size that tensor or fsdp can replace")
    assert line.endswith("nearest: --config.mesh.pipeline=1")
