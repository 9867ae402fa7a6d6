"""The record of what the program decides, computes and says: it is the same twice, and a change shows."""

import json

import pytest

from meshtrain.config import config
from scripts.benchmarks import net


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A function (name, losses) -> the folder of a record with the parts placements and losses."""

    def made(name, losses="1 3.25 0.5\n"):
        parts = {"placements": lambda: {"a.txt": "w replicated\n"}, "losses": lambda: {"a.txt": losses}}
        monkeypatch.setattr(net, "parts", lambda like: parts)
        assert net.main(["record", str(tmp_path / name)]) == 0
        return tmp_path / name

    return made


def compared(capsys, *words):
    code = net.main(["compare", *map(str, words)])
    return code, capsys.readouterr().out.splitlines()


def test_a_record_equals_itself_made_again(recorded, capsys):
    folders = recorded("older"), recorded("newer")
    capsys.readouterr()
    assert compared(capsys, *folders) == (0, ["0 files differ"])


def test_a_changed_a_missing_and_a_new_file_are_differences(recorded, capsys):
    older, newer = recorded("older"), recorded("newer")
    (newer / "placements" / "a.txt").write_text("w split\n")
    (newer / "placements" / "b.txt").write_text("v split\n")
    (newer / "losses" / "a.txt").unlink()
    capsys.readouterr()
    code, lines = compared(capsys, older, newer)
    assert code == 1
    assert {"-w replicated", "+w split", "+v split", "-1 3.25 0.5", "3 files differ"} <= set(lines)


def test_losses_may_differ_by_a_share_that_is_given(recorded, capsys):
    folders = recorded("older"), recorded("newer", "1 3.2500001 0.5\n")
    assert compared(capsys, *folders)[0] == 1
    assert compared(capsys, *folders, "--relative=1e-6")[0] == 0
    assert compared(capsys, *folders, "--relative=1e-9")[0] == 1
    assert compared(capsys, folders[0], recorded("shorter", ""), "--relative=1")[0] == 1


def test_broken_inputs_are_compared_one_by_one_wherever_they_stand(recorded, capsys):
    older, newer = recorded("older"), recorded("newer")
    for folder, file, lines in ((older, "a.txt", "# x\n1\n# y\n2\n# z\n3\n"), (newer, "b.txt", "# y\n4\n# x\n1\n")):
        (folder / "errors").mkdir()
        (folder / "errors" / file).write_text(lines)
    capsys.readouterr()
    code, lines = compared(capsys, older, newer)
    assert code == 1
    assert {"only in one of the two, not compared: 1 broken inputs", "-2", "+4", "1 files differ"} <= set(lines)


def test_a_part_that_one_record_lacks_is_named(recorded, capsys):
    older, newer = recorded("older"), recorded("newer")
    (newer / "losses" / "a.txt").unlink()
    (newer / "losses").rmdir()
    capsys.readouterr()
    assert compared(capsys, older, newer) == (0, ["only in one of the two, not compared: losses", "0 files differ"])


def test_an_unknown_part_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        net.main(["record", str(tmp_path), "--parts=charts,chart"])
    assert "--parts: got chart; allowed: placements, charts, " in capsys.readouterr().err


def test_charts_and_placements_are_recorded(monkeypatch):
    monkeypatch.setattr(net.golden, "CONFIGS", ["3d"])
    assert net.charts()["1f1b_4_8_1.txt"].splitlines()[1].startswith("stage 0  F0")
    assert "allowed" in net.charts()["1f1b_4_8_2.txt"], "why there is none"
    assert "params/embedding/table" in net.placements()["3d.txt"]


def test_random_configurations_are_those_of_an_older_record(monkeypatch, tmp_path):
    monkeypatch.setattr(net, "HOSTILE", {})
    monkeypatch.setattr(net, "NUM_RANDOM", 6)
    first = net.errors(None)
    (tmp_path / "errors").mkdir()
    cases = json.loads(first[net.RANDOM])[::2]
    (tmp_path / "errors" / net.RANDOM).write_text(json.dumps(cases))
    again = net.errors(tmp_path)
    assert json.loads(again[net.RANDOM]) == cases
    assert again["random.txt"].count("# case ") == 3

    monkeypatch.setattr(config, "batch_problems", lambda *given: ["batch_size: a new line"])
    assert "batch_size: a new line" in net.errors(tmp_path)["random.txt"]
