"""Charts of lines over numbers of devices."""

from meshtrain.observe.line_charts import Line, Panel, figure_of, line_chart

PANEL = Panel(
    "strong",
    [Line("data", [(8, 8.0), (16, 14.0)]), Line("fsdp", [(8, 7.0)])],
    True,
    Line("in proportion", [(8, 8.0), (16, 16.0)]),
)


def test_each_point_has_a_marker():
    (place,) = figure_of([PANEL], "a note").axes
    marked = [line for line in place.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in marked] == [[8.0, 14.0], [7.0]]
    assert [text.get_text() for text in place.get_legend().get_texts()] == ["in proportion", "data", "fsdp"]
    assert (place.get_xscale(), place.get_yscale()) == ("log", "log")


def test_shares_start_at_zero():
    (place,) = figure_of([Panel("weak", [Line("data", [(8, 1.0), (16, 1.1)])])], "").axes
    bottom, top = place.get_ylim()
    assert bottom == 0
    assert top > 1.1
    assert place.get_yscale() == "linear"


def test_a_chart_of_a_page_says_what_it_is():
    drawn = line_chart([PANEL], "a note")
    assert drawn.startswith('<svg class="still" role="img" aria-label="lines over devices"')
    assert "a note" in drawn
