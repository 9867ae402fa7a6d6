"""Text with mistakes: every bad line and every bad file is reported, counted, and in the words of the program."""

import numpy as np
import pytest

from meshtrain.data.corpus import open_corpus
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest, check
from meshtrain.data.text import read_documents
from meshtrain.errors import Problem, Problems, UserError, refusals, refuse, unknown


def opened(path, **changes):
    options = DataOptions(source="text", path=str(path), validation_fraction=0, **changes)
    return open_corpus(options, DataRequest({}, {}, 4, 257, 0))


@pytest.fixture
def mixed(tmp_path):
    """Good and bad, side by side: three files in one glob."""
    lines = ['{"text": "good"}', "not json", '{"texts": "other field"}', "", '{"text": "good again"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "c.txt").write_text("as it should be")
    return tmp_path


def test_all_bad_lines_and_files_are_reported_at_once(mixed):
    with pytest.raises(UserError) as in_training:
        opened(f"{mixed}/*")
    with pytest.raises(UserError) as in_preparing:
        prepare(f"{mixed}/*", str(mixed / "out.bin"))
    wanted = ["a.jsonl, line 2 is not JSON", "has no text in", "b.txt' is not UTF-8"]
    for caught in (in_training, in_preparing):
        assert len(caught.value.problems) == len(wanted)
        for line, words in zip(caught.value.problems, wanted, strict=True):
            assert words in line
    assert sorted(path.name for path in mixed.iterdir()) == ["a.jsonl", "b.txt", "c.txt"], "nothing is written"


def test_many_are_counted_and_reading_stops_where_more_would_tell_nothing_new(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{' ' * number}no\n" for number in range(50)) + '{"text": "good"}\n')
    with pytest.raises(UserError) as caught:
        opened(path)
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1] == "... and 40 more like these"
    problems = Problems()
    for number in range(2000):
        if problems.is_enough():
            break
        problems.add(Problem.plain(f"line {number}"))
    assert problems.count == 1000
    assert problems.lines()[-1] == "... and at least 990 more like these"


def test_tokens_are_not_read_as_text(tmp_path):
    """Small ids are legal UTF-8: a model would learn from every second byte being zero."""
    (tmp_path / "a.txt").write_text("plain text " * 20)
    prepare(str(tmp_path / "a.txt"), str(tmp_path / "a.bin"))
    (tmp_path / "bare.dat").write_bytes(np.arange(1, 100, dtype="<u2").tobytes())
    for name, words in (("a.bin", "contains tokens according to 'a.bin.json'"), ("bare.dat", "which has zero bytes")):
        path = tmp_path / name
        [line] = check(DataOptions(source="text", path=str(path)))
        assert words in line
        assert "nearest: data.source=tokens" in line
        with pytest.raises(UserError, match=r"nearest: data.source=tokens"):
            opened(path)
        with pytest.raises(UserError, match=words):
            prepare(str(path), str(tmp_path / "out.bin"))
    assert check(DataOptions(source="tokens", path=str(tmp_path / "a.bin"))) == []


def test_a_list_of_nothing_says_so():
    assert unknown("end token", "x", []) == "end token: got 'x'; allowed: none"
    assert unknown("end token", "x", [], "y") == "end token: got 'x'; allowed: none; nearest: y"


def test_lines_become_an_error_and_an_error_its_lines():
    refuse([])
    with pytest.raises(UserError) as caught:
        refuse(Problems(Problem.plain(str(number)) for number in range(12)).lines())
    assert caught.value.problems == (*map(str, range(10)), "... and 2 more like these")
    assert refusals(refuse, ["a", "b"]) == ["a", "b"]
    assert refusals(refuse, []) == []


def test_what_is_wrong_with_every_line_is_said_once(tmp_path):
    no_text = "data.text_field: got 'text', which has no text in {}; allowed there: "
    for row, said in (
        ('{"texts": "a"}', f"{no_text}texts; did you mean 'texts'?"),
        ('{"a": 1}', f"{no_text}nothing; nearest: lines like"),
        ("[1]", f"{no_text}nothing; nearest: lines like"),
        ('{"text": "\\ud800"}', "data.path: {} escapes half of a surrogate pair; allowed: complete characters"),
        ("no", "data.path: {} is not JSON in UTF-8 (Expecting value: line 1 column 1 (char 0)); allowed: one JSON "),
    ):
        path = tmp_path / "a.jsonl"
        for num, places in ((1, f"{path}, line 2"), (30, f"{path}, line 2 and others")):
            path.write_text('{"text": "good"}\n' + f"{row}\n" * num)
            problems = Problems()
            assert [text for text, _ in read_documents(path, "text", problems)] == ["good"]
            [line] = problems.lines()
            assert line.startswith(said.format(places))
            assert problems.count == num
