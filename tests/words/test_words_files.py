import os
import pathlib

import pytest

from meshtrain.words.files import replacing, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "first ä")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    write_whole(str(path), "third ä")
    assert path.read_text(encoding="utf-8") == "third ä"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_file_before(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "whole")

    def half():
        with replacing(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    did, fsync, replace = [], os.fsync, pathlib.Path.replace

    def synced(number):
        did.append("fsync")
        fsync(number)

    def replaced(path, target):
        assert path.read_text() == "new"
        did.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(pathlib.Path, "replace", replaced)
    write_whole(tmp_path / "a.json", "new")
    assert did == ["fsync", "replace"]
