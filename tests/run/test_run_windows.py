"""What scripts/bench windows reads in a long window and in a short one: the same bytes, with as much before them."""

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import parse
from meshtrain.sharding.mesh import mesh_shape
from scripts.benchmarks import windows
from scripts.benchmarks.windows import Bytes, lines, ranges

LONG, SHORT = 256, 64


def test_ranges_of_bytes_are_neighbours_and_end_with_the_window():
    assert ranges(4096)[-2:] == [(1025, 2048), (2049, 4096)]
    assert ranges(100) == [(1, 32), (33, 64), (65, 100)]


def test_a_row_has_the_means_of_its_range_and_the_last_row_those_of_all():
    before, near = np.array([1, 32, 33, 250, 251]), np.array([1, 32, 33, 33, 32])
    found = Bytes(before, near, np.array([1.0, 2.0, 5.0, 4.0, 3.0]), np.array([3.0, 2.0, 4.0, 7.0, 4.0]))
    assert lines(found, LONG, SHORT)[2:] == [
        "| 1 to 32 | 2 | 1.500 | 2.500 | +1.000 |",
        "| 33 to 64 | 1 | 5.000 | 4.000 | -1.000 |",
        "| 129 to 256 | 2 | 3.500 | 5.500 | +2.000 |",
        "| over 64, over 32 of them in the short window | 1 | 4.000 | 7.000 | +3.000 |",
        "| all | 5 | 3.000 | 4.000 | +1.000 |",
    ]


def test_a_chart_has_a_curve_for_each_window(tmp_path):
    found = Bytes(np.arange(1, 257), np.arange(1, 257), np.ones(256), np.ones(256))
    charts = [tmp_path / name for name in ("one.svg", "two.svg")]
    for chart in charts:
        windows.draw(found, LONG, SHORT, chart)
    texts = [chart.read_text(encoding="utf-8") for chart in charts]
    assert texts[0] == texts[1]
    assert all(f"window of {window} bytes" in texts[0] for window in (LONG, SHORT))


@pytest.mark.slow
def test_three_steps_train_and_both_windows_read_the_same_bytes():
    """Sequences of 256 bytes, not 4,096. Where both windows have the same bytes before a target, losses agree."""
    words = [f"--config.{change}" for change in ("num_steps=3", f"sequence_length={LONG}", "model.window=16")]
    config, _ = parse(["--config=configs/long.py", *words])
    assembly = assemble(config, mesh_shape(config.mesh, 8, simulated=True), jax.devices())
    params = windows.trained(assembly)
    found = windows.read(assembly, params, SHORT, 3)
    assert 3 * LONG * 0.9 < len(found.before) <= 3 * LONG
    assert found.before.max() == LONG
    assert found.near.max() == SHORT
    has_same = found.before == found.near
    assert np.count_nonzero(has_same) > 3 * SHORT * 0.9
    np.testing.assert_allclose(found.long[has_same], found.short[has_same], rtol=1e-4)
    assert np.abs(found.long - found.short)[~has_same].max() > 1e-3
