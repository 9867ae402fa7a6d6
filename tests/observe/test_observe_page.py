"""Parts of a page: text stays text, and no address is opened."""

from meshtrain.observe import page

RISKY = "<script>alert('1')</script> & \"2\""
SAFE = "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt; &amp; &quot;2&quot;"


def test_text_is_escaped_everywhere():
    parts = [
        page.heading(RISKY, 3),
        page.preformatted(RISKY),
        page.fold(RISKY, ""),
        page.table([[RISKY, "2"]], [RISKY, "n"], "<>"),
    ]
    text = page.page(RISKY, parts)
    assert "<script" not in text
    assert text.count(SAFE) == 7, "title and h1, heading, text, summary, cell and header"


def test_a_page_says_that_nothing_may_be_fetched():
    text = page.page("x", ["<p>y</p>"])
    assert text.startswith("<!doctype html>\n")
    assert "Content-Security-Policy\" content=\"default-src 'none';" in text
    assert "://" not in text
    assert text.index("Content-Security-Policy") < text.index("<p>y</p>")


def test_numbers_stand_to_the_right():
    assert '<td>a</td><td class="number">1</td>' in page.table([["a", "1"]], ["name", "n"], "<>")
