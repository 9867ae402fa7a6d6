import os
import pathlib
import tempfile

import pytest

from meshtrain.files import replacing, write_whole

pytestmark = pytest.mark.quick


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


def test_a_file_of_the_user_s_beside_it_stays(tmp_path):
    (tmp_path / "a.html.new").write_text("a user's own")
    write_whole(tmp_path / "a.html", "page")
    assert (tmp_path / "a.html.new").read_text() == "a user's own"


def test_a_link_beside_it_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / "a.html.new").symlink_to(victim)
    write_whole(tmp_path / "a.html", "page")
    assert victim.read_text() == "whole"
    assert not (tmp_path / "a.html").is_symlink()


def test_nobody_knows_the_name_before_and_what_has_it_is_not_written(tmp_path, monkeypatch):
    names = set()
    for _ in range(2):
        with replacing(tmp_path / "a.html"):
            names |= {path.name for path in tmp_path.iterdir()} - {"a.html"}
    assert len(names) == 2
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / "taken").symlink_to(victim)
    monkeypatch.setattr(tempfile, "mktemp", lambda **_: str(tmp_path / "taken"))
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a.html", "page")
    assert (victim.read_text(), (tmp_path / "taken").is_symlink()) == ("whole", True)


def test_a_private_file_stays_private_while_it_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    path.touch(0o600)
    with replacing(path):
        assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_any_other(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "a.json", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "a.json"
    path.write_text("old")
    path.chmod(mode)
    write_whole(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)
