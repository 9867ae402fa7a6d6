"""Builds a self-contained HTML page from its parts: headings, tables, preformatted text."""

import html
from collections.abc import Sequence

# The page cannot open any address; only scripts and styles inside the file are allowed.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;color:#1d2733;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}h3{font-size:1rem;font-weight:600}
pre{background:#f4f6f8;padding:1rem;overflow:auto;font-size:12px}svg.still{max-width:100%;height:auto}
svg.still *{stroke-linejoin:round;stroke-linecap:butt}.fits{color:#1a7f37}.not{color:#c0262d}.unclear{color:#9a6700}
.wide{overflow:auto}.wide svg.still{max-width:none}table{border-collapse:collapse;font-size:13px}
td,th{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid #e3e7ec;vertical-align:top}
td.number{text-align:right;font-variant-numeric:tabular-nums}"""
WIDE = '<div class="wide">{}</div>'  # content that is wider than the page scrolls instead of shrinking


def page(title: str, parts: Sequence[str]) -> str:
    """Returns a complete HTML page.

    Args:
      title: the title as text.
      parts: the content, each part as HTML.
    """
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    head += f'\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{STYLE}</style>'
    body = "\n".join(parts)
    return f"{head}\n<h1>{html.escape(title)}</h1>\n{body}\n</html>\n"


def heading(text: str, level: int = 2) -> str:
    """Returns a text as an HTML heading; level 2 is below the page's title."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def preformatted(text: str) -> str:
    """Returns a text as a preformatted HTML block, which keeps line breaks and spaces."""
    return f"<pre>{html.escape(text)}</pre>"


def fold(summary: str, inside: str) -> str:
    """Returns a foldable HTML block: the HTML `inside` is visible after a click on the summary."""
    return f"<details><summary>{html.escape(summary)}</summary>{inside}</details>"


def table(rows: Sequence[Sequence[str]], header: Sequence[str], align: str = "") -> str:
    """Returns an HTML table, which scrolls if it is wider than the page.

    Args:
      rows: the cells of each row as text; each row has the length of the header.
      header: the column titles.
      align: `<` or `>` for each column; missing columns are left-aligned.
    """
    sides = align.ljust(len(header), "<")
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = [f"<tr>{titles}</tr>"]
    for row in rows:
        cells = (
            f'<td class="number">{html.escape(cell)}</td>' if side == ">" else f"<td>{html.escape(cell)}</td>"
            for cell, side in zip(row, sides, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return WIDE.format(f"<table>{''.join(lines)}</table>")
