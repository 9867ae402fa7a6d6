"""What does not go with sequences that are split over devices."""

import dataclasses

import jax.numpy as jnp
import pytest

from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.decoder_cost import kernels
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("sizes", "model", "text"),
    [
        ({}, {}, ""),
        ({"context": 4}, {}, "all-to-all over context: each device computes 2 of 8 heads"),
        (
            {"context": 4, "tensor": 2}, {},
            "all-to-all over context: each device computes 1 of 8 heads, with each key and value head repeated 2 times",
        ),
        (
            {"context": 8, "tensor": 2}, {"window": 64, "global_every": 2},
            "all-gather of keys and values over context, because 8 heads are not a multiple of 16 devices per "
            "sequence: "
            "each device computes its queries with all keys, 2.78 times the products of attention",
        ),
    ],
    ids=["one device", "heads", "repeated heads", "keys"],
)  # fmt: skip
def test_what_is_exchanged_is_said(sizes, model, text):
    options = dataclasses.replace(DecoderOptions(), num_heads=8, num_kv_heads=4, num_layers=2, **model)
    (found,) = kernels(options, 256, jnp.float32, "cpu", dict.fromkeys(AXES, 1) | sizes, 256)
    assert found.exchange == text
