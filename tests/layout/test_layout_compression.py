"""Options of compression: contradictions, and the bytes that a device sends by formula."""

import pytest

from meshtrain.layout.compression import CompressionOptions, problems

INT8, TOPK = CompressionOptions(kind="int8"), CompressionOptions(kind="topk")


@pytest.mark.parametrize(
    "options, level, num_replicas, line",
    [
        (
            INT8, 2, 8,
            "compression.kind: got int8 with zero.level=2, which reduces the gradients of each microbatch; allowed: "
            "zero.level 0 or 1; nearest: zero.level=1",
        ),
        (
            CompressionOptions(kind="topk", block=16, kept=17), 0, 8,
            "compression.kept: got 17; allowed: 1 to compression.block = 16; nearest: 16",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_named(options, level, num_replicas, line):
    assert problems(options, level, num_replicas) == [line]


@pytest.mark.parametrize(
    "options, level, num_replicas",
    [
        (INT8, 0, 8), (TOPK, 1, 8), (CompressionOptions(), 3, 8), (TOPK, 3, 1),
        (CompressionOptions(kind="int8", block=16, kept=17), 0, 8),
        (CompressionOptions(kind="topk", block=16, kept=16), 0, 8),
    ],
)  # fmt: skip
def test_what_has_no_effect_stays_legal(options, level, num_replicas):
    assert problems(options, level, num_replicas) == []


def test_bytes_of_an_element():
    assert INT8.wire_bytes(8) == pytest.approx(1.7773, abs=1e-4)
    assert INT8.wire_bytes(8, is_scattered=True) == INT8.wire_bytes(8) / 2
    assert TOPK.wire_bytes(8) == TOPK.wire_bytes(8, is_scattered=True) == 0.875
    assert TOPK.wire_bytes(64) > 2 * 63 / 64 * 4 * 0.99, "no fewer than the float32 all-reduce"


def test_only_feedback_of_a_compressed_sum_has_a_residual():
    chosen = [(kind, feedback) for kind in ("none", "int8", "topk") for feedback in (True, False)]
    found = {
        (kind, feedback): CompressionOptions(kind=kind, feedback=feedback).has_residual for kind, feedback in chosen
    }
    assert [options for options, has in found.items() if has] == [("int8", True), ("topk", True)]
