"""Still charts: bars as long as what they stand for, labels as text, nothing that would be fetched."""

import re

import pytest
from matplotlib.figure import Figure

from meshtrain.observe import charts
from meshtrain.observe.charts import Line, Panel
from meshtrain.observe.page import STYLE


def widths(svg):
    """{colour: width} of the bars, in points of the picture."""
    found = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*" clip-path[^>]* style="fill: (#\w+)"/>', svg)
    return {colour: float(right) - float(left) for left, right, colour in found}


def test_bars_are_as_long_as_their_bytes():
    svg = charts.bars([("a", 4 << 30), ("b", 1 << 30), ("c", 0)], ("capacity", 6 << 30))
    long, short = (widths(svg)[charts.COLOURS[number]] for number in (0, 1))
    assert long == pytest.approx(4 * short)
    for text in (">4 GiB<", ">1 GiB<", ">0 B<", ">capacity 6 GiB<", ">a<"):
        assert text in svg


def test_neighbours_share_a_colour():
    assert set(widths(charts.bars([("a", 1.0), ("b", 1.0), ("c", 1.0)], None, step=2))) == set(charts.COLOURS[:2])


def test_parts_of_a_device_have_their_colours_whatever_stands_beside_them():
    held = ["parameters", "gradients", "optimizer", charts.EXTRA, "batch", charts.ACTIVATIONS, charts.PEAK]
    of_all = widths(charts.bars([(label, 1.0 + place) for place, label in enumerate(held)], None))
    assert len(of_all) == len(held)
    longest = max(of_all, key=of_all.get)
    assert longest not in charts.COLOURS, "the peak is no part beside the others"
    assert set(widths(charts.bars([(charts.PEAK, 2.0), ("parameters", 1.0)], None))) == {longest, charts.COLOURS[0]}


def test_points_are_labelled_and_coloured_by_whether_they_fit():
    svg = charts.scatter([(1.0, 1 << 30, "data <2>", True), (2.0, 3 << 30, "fsdp 2", False)], 2 << 30)
    for text in ("data &lt;2&gt;", ">fsdp 2<", ">capacity<", ">2 GiB<", charts.FITS[True], charts.FITS[False]):
        assert text in svg


def test_a_chart_is_an_element_that_needs_nothing_else_and_changes_nothing_else():
    svg = charts.svg(Figure(figsize=(1, 1)), "nothing")
    assert svg.startswith('<svg class="still" role="img" aria-label="nothing" ')
    assert svg.count("<svg") == svg.count("</svg>") == 1
    assert "://" not in svg
    assert "<style" not in svg
    assert charts.bars([("a", 1.0)], None) == charts.bars([("a", 1.0)], None), "the same bytes each time"


PANEL = Panel(
    "strong",
    [Line("data", [(8, 8.0), (16, 14.0)]), Line("fsdp", [(8, 7.0)])],
    True,
    Line("in proportion", [(8, 8.0), (16, 16.0)]),
)


@pytest.mark.parametrize(
    "drawn",
    [
        lambda: charts.bars([("a", 1.0)], None),
        lambda: charts.scatter([(1.0, 1 << 30, "data 2", True)], None),
        lambda: charts.line_chart([PANEL], "a note"),
    ],
    ids=["bars", "scatter", "lines"],
)
def test_charts_are_as_wide_as_the_page(drawn):
    page_pixels = int(re.search(r"max-width:(\d+)px", STYLE)[1])
    pixels = float(re.search(r' width="([\d.]+)pt"', drawn())[1]) * 96 / 72
    assert 0.95 * page_pixels <= pixels <= page_pixels


def test_dollars_are_text():
    assert ">$a$ and $b$<" in charts.bars([("$a$ and $b$", 1.0)], None)


def test_each_point_has_a_marker():
    (place,) = charts.figure_of([PANEL], "a note").axes
    marked = [line for line in place.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in marked] == [[8.0, 14.0], [7.0]]
    assert [text.get_text() for text in place.get_legend().get_texts()] == ["in proportion", "data", "fsdp"]
    assert (place.get_xscale(), place.get_yscale()) == ("log", "log")


def test_shares_start_at_zero():
    (place,) = charts.figure_of([Panel("weak", [Line("data", [(8, 1.0), (16, 1.1)])])], "").axes
    bottom, top = place.get_ylim()
    assert bottom == 0
    assert top > 1.1
    assert place.get_yscale() == "linear"


def test_a_chart_of_a_page_says_what_it_is():
    drawn = charts.line_chart([PANEL], "a note")
    assert drawn.startswith('<svg class="still" role="img" aria-label="lines over devices"')
    assert "a note" in drawn
