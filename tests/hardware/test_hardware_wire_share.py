"""Bytes that a device sends in a collective over a ring."""

import pytest

from meshtrain.hardware.links import RING, wire_share

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("operation", "share"),
    [("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75), ("all-reduce", 1.5), (RING, 1.5),
     ("collective-permute", 1.0), ("collective-broadcast", 1.0)],
)  # fmt: skip
def test_what_a_device_sends_in_a_ring_of_four(operation, share):
    assert wire_share(operation, 4) == share
