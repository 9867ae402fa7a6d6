"""What does not go with sequences that are split over devices."""

import dataclasses

import jax.numpy as jnp
import pytest

from meshtrain.config.config import resolve
from meshtrain.errors import UserError
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.decoder_cost import kernels
from meshtrain.sharding.axes import AXES

CASES = {
    "tokens": (
        {"mesh.context": "4", "sequence_length": "254"},
        "sequence_length: got 254; allowed: a multiple of 4, as rule 'residual_sequence' splits it over "
        "mesh.context = 4; nearest: 256",
    ),
    "tokens between layers": (
        {"mesh.context": "4", "mesh.tensor": "2", "layout.sequence_parallel": "true", "sequence_length": "252"},
        "sequence_length: got 252; allowed: a multiple of 8, as rule 'residual_sequence' splits it over "
        "mesh.context = 4 x mesh.tensor = 2; nearest: 256",
    ),
    "weights": (
        {
            "mesh.context": "4",
            "mesh.fsdp": "2",
            "model.embed_dim": "132",
            "model.num_heads": "2",
            "model.num_kv_heads": "2",
        },
        "model.embed_dim: got 132 for dim 'embed' of embedding/table and 8 more; allowed: a multiple of 8, as it is "
        "split over mesh.fsdp = 2 x mesh.context = 4; nearest: 136, or mesh.fsdp x mesh.context = 6",
    ),
}


@pytest.mark.parametrize(("overrides", "line"), CASES.values(), ids=list(CASES))
def test_contradictions_are_one_line_before_compiling(overrides, line):
    with pytest.raises(UserError) as caught:
        resolve({}, overrides)
    assert caught.value.problems == (line,)


def test_a_kernel_that_takes_no_parts_is_refused_where_keys_are_gathered():
    given = {"mesh.context": "8", "model.num_heads": "4", "precision.policy": "bfloat16", "model.attention": "cudnn"}
    with pytest.raises(UserError) as caught:
        resolve({}, given)
    assert caught.value.problems == (
        "model.attention: got cudnn with model.num_heads = 4, no multiple of 8 = mesh.context = 8, so that keys are "
        "gathered for parts of the queries; allowed: auto, xla, blockwise; nearest: model.attention=auto, or "
        "mesh.context=4",
    )
    assert resolve({}, given | {"model.attention": "blockwise"}).mesh.context == 8


@pytest.mark.parametrize(
    ("sizes", "model", "text"),
    [
        ({}, {}, ""),
        ({"context": 4}, {}, "all-to-all over context: a device attends with 2 of 8 heads"),
        (
            {"context": 4, "tensor": 2}, {},
            "all-to-all over context: a device attends with 1 of 8 heads, each key and value head 2 times",
        ),
        (
            {"context": 8, "tensor": 2}, {"window": 64, "global_every": 2},
            "all-gather of keys and values over context, as 8 heads are no multiple of 16 devices a sequence: a device "
            "computes its queries with all keys, 2.78 times the products of attention",
        ),
    ],
    ids=["one device", "heads", "repeated heads", "keys"],
)  # fmt: skip
def test_what_is_exchanged_is_said(sizes, model, text):
    options = dataclasses.replace(DecoderOptions(), num_heads=8, num_kv_heads=4, num_layers=2, **model)
    (found,) = kernels(options, 256, jnp.float32, "cpu", dict.fromkeys(AXES, 1) | sizes, 256)
    assert found.exchange == text
