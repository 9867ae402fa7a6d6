"""A run that has just ended has a page."""

import html

from meshtrain.report import __main__ as report


def test_a_real_run_becomes_a_page(straight, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert report.main([str(straight.directory), f"--html={page}"]) == 0
    assert capsys.readouterr().out == f"written      {page} ({page.stat().st_size / 1e6:.1f} MB)\n"
    text = page.read_bytes().decode()
    sample = (straight.directory / "samples.txt").read_bytes().decode()
    assert f"<pre>{html.escape(sample)}</pre>" in text
    for part in ("10 of 10", "fsdp 2 (cpu)", "Memory of a device", "picture of the mesh", '"text":"evaluation loss"'):
        assert part in text
    assert "<h2>Schedule" not in text, "there is no pipeline"
