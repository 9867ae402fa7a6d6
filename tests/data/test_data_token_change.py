"""A token file that somebody writes while a run reads it: one line, where a memory map would be a bus error."""

import os

import numpy as np
import pytest

from meshtrain.data.packing import TokenStream
from meshtrain.data.prepare import main as prepare
from meshtrain.data.token_files import FileIds, OpenFile, open_token_files
from meshtrain.errors import UserError


@pytest.fixture
def path(tmp_path):
    """A token file of 4,000 bytes of text."""
    (tmp_path / "text.txt").write_text("abcd " * 800)
    prepare([f"--path={tmp_path / 'text.txt'}", f"--output={tmp_path / 't.bin'}"])
    return tmp_path / "t.bin"


def shorten(path):
    os.truncate(path, 1000)


def empty(path):
    path.write_bytes(b"")


def overwrite(path):
    content, before = path.read_bytes(), path.stat()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def grow(path):
    with path.open("ab") as file:
        file.write(b"ab" * 100)


@pytest.mark.parametrize("stays_open", [True, False])
@pytest.mark.parametrize("change", [shorten, empty, overwrite, grow])
def test_a_file_that_changes_is_one_line_that_names_it(path, change, stays_open):
    stream = TokenStream((FileIds(OpenFile(path, "uint16", stays_open=stays_open), 0, 4001),), 256).cut(0, 4000)
    assert stream.read(0, 5).tolist() == [*b"abcd "]
    change(path)
    with pytest.raises(
        UserError, match=f"^data.path: '{path}' changed while the run was reading it .* nearest: "
    ) as error:
        stream.read(3000, 3100)
    assert len(error.value.problems) == 1


def test_the_ids_of_a_file_are_those_of_a_memory_map_and_a_removed_file_is_read_on(path):
    [ids], _ = open_token_files([path], 257)
    mapped = np.memmap(path, "<u2", "r")
    assert len(ids) == len(mapped) == 4001
    for part in (slice(0, 0), slice(5, 9), slice(3990, None), slice(None, -1), slice(9, 5)):
        np.testing.assert_array_equal(np.asarray(ids[part]), mapped[part])
        np.testing.assert_array_equal(np.asarray(ids[100:][part]), mapped[100:][part])
    os.replace(path, path.with_name("other"))
    path.write_bytes(b"others")
    np.testing.assert_array_equal(np.asarray(ids), mapped)


def test_more_files_than_descriptors_are_opened_for_each_read(path, monkeypatch):
    monkeypatch.setattr("meshtrain.data.token_files._MOST_OPEN", 1)
    before = len(os.listdir("/proc/self/fd"))
    parts, _ = open_token_files([path, path], 257)
    assert len(os.listdir("/proc/self/fd")) == before
    assert np.asarray(parts[1][:4]).tobytes() == b"a\0b\0c\0d\0"
