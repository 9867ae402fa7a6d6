"""What is printed where: bar, log lines, phases."""

import io
import sys
from contextlib import closing

import pytest

from meshtrain.observe import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        """Returns the lines that a terminal would show: a carriage return goes back and overwrites."""
        lines = []
        for line in self.getvalue().replace("\x1b[A", "").split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


def open_terminal(monkeypatch):
    """Returns a terminal that is standard output and error; not a fixture, as pytest sets both anew before a test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_off_a_terminal_only_lines_are_printed(capsys):
    with closing(progress.Progress(10)) as bar:
        bar.advance_to(3)
        bar.line("step 3  loss 2.0")
    assert capsys.readouterr() == ("step 3  loss 2.0\n", "")


def test_other_processes_are_silent(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with closing(progress.Progress(10, is_main=False)) as bar:
        bar.advance_to(3)
        bar.line("step 3  loss 2.0")
        with progress.phase("mesh", is_main=False) as say:
            say("8 cpu devices")
    assert terminal.getvalue() == ""


def test_lines_stand_above_the_bar_unbroken(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with closing(progress.Progress(10, start_step=2)) as bar:
        bar.advance_to(5)
        bar.line("step 5  loss 2.0")
        bar.advance_to(10)
        bar.line("step 10  loss 1.0")
    bar.close()
    lines = terminal.screen()
    assert lines[:2] == ["step 5  loss 2.0", "step 10  loss 1.0"]
    assert "10/10" in lines[2]
    assert "2/10" in terminal.getvalue()


def test_the_bar_can_be_turned_off(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with closing(progress.Progress(10, show_bar=False)) as bar:
        bar.advance_to(3)
        bar.line("step 3")
    assert terminal.getvalue() == "step 3\n"


def test_phase_prints_its_time_and_text(capsys):
    times = iter([5.0, 5.1234])
    with progress.phase("mesh", now=lambda: next(times)) as say:
        say("unknown")
        say("8 cpu devices")
    assert capsys.readouterr().out == "mesh            0.12 s  8 cpu devices\n"


def test_phase_without_text(capsys):
    times = iter([0.0, 61.0])
    with progress.phase("compile", now=lambda: next(times)):
        pass
    assert capsys.readouterr().out == "compile        61.00 s\n"


def test_a_failed_phase_prints_nothing(capsys):
    with pytest.raises(ValueError), progress.phase("mesh"):
        raise ValueError
    assert capsys.readouterr().out == ""
