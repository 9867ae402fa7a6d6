"""IDX files: what is read, and what is wrong with files that are not whole or are something else."""

import gzip
import os
import struct

import numpy as np
import pytest

from meshtrain.errors import UserError
from meshtrain.examples.idx import IMAGES, LABELS, find_images, labels_of, read, read_pairs

N, H, W = 5, 4, 3
PIXELS = np.arange(N * H * W, dtype=np.uint8).reshape(N, H, W)
NUMBERS = np.array([3, 1, 4, 1, 5], np.uint8)


def idx(array, magic=None):
    """The bytes of an IDX file, written by hand: `>` is big-endian, I an unsigned int of 4 bytes."""
    array = np.asarray(array, np.uint8)
    return struct.pack(f">{1 + array.ndim}I", magic or 0x800 + array.ndim, *array.shape) + array.tobytes()


IMAGES_FILE, LABELS_FILE = idx(PIXELS), idx(NUMBERS)


def write(folder, images=IMAGES_FILE, labels=LABELS_FILE, suffix=""):
    """Writes the two files, each left out where it is None; returns the path of the images."""
    for name, content in ((f"a-images-idx3-ubyte{suffix}", images), (f"a-labels-idx1-ubyte{suffix}", labels)):
        if content is not None:
            (folder / name).write_bytes(content)
    return folder / f"a-images-idx3-ubyte{suffix}"


@pytest.mark.parametrize(
    "images, suffix",
    [
        (IMAGES_FILE, ""),
        (gzip.compress(IMAGES_FILE), ".gz"),
        (gzip.compress(IMAGES_FILE), ""),  # what a file is stands in it, not in its name
        (gzip.compress(IMAGES_FILE[:20]) + gzip.compress(IMAGES_FILE[20:]), ".gz"),  # as pigz and dictzip write them
    ],
    # Without these, the time in the compressed bytes gives each worker of pytest tests of other names.
    ids=["plain", "compressed", "compressed, its name does not tell", "two compressed parts"],
)
def test_images_and_labels_are_read(images, suffix, tmp_path):
    path = write(tmp_path, images, gzip.compress(LABELS_FILE), suffix)
    assert find_images(str(path), "data.path") == ([path], [])
    pixels, labels = read_pairs([path, path], "data.path")
    np.testing.assert_array_equal(pixels, np.concatenate([PIXELS, PIXELS]))
    np.testing.assert_array_equal(labels, np.concatenate([NUMBERS, NUMBERS]))


@pytest.mark.parametrize(
    "images, labels",
    [
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
        ("t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
    ],
)
def test_labels_have_the_name_of_their_images(images, labels, tmp_path):
    assert labels_of(tmp_path / images) == tmp_path / labels


MOST = 2**32 - 1
BROKEN = {
    "labels for images": ({"images": LABELS_FILE}, "a file of labels; allowed: 0x00000803"),
    "labels under the name of images, both": (
        {"images": LABELS_FILE, "labels": IMAGES_FILE},
        "nearest: the other of the two files",
    ),
    "labels too long": (
        {"labels": LABELS_FILE + b"\0" * 3},
        "has 16 bytes, but according to its header 8 + 5 bytes; allowed",
    ),
    "images for labels": ({"labels": IMAGES_FILE}, "a file of images; allowed: 0x00000801"),
    "no labels": ({"labels": None}, "'{folder}/a-labels-idx1-ubyte', which does not exist; allowed: a file of labels"),
    "floats": ({"images": idx(PIXELS, 0x0D03)}, "starts with 0x00000d03; allowed: 0x00000803"),
    "little-endian": ({"images": IMAGES_FILE[3::-1] + IMAGES_FILE[4:]}, "starts with 0x03080000"),
    "a picture": ({"images": b"\x89PNG\r\n\x1a\n" * 9}, "starts with 0x89504e47"),
    "one byte": ({"images": b"\0"}, "starts with 0x00; allowed"),
    "cut in its header": ({"images": IMAGES_FILE[:10]}, "ends within its header, after 10 bytes"),
    "cut": ({"images": IMAGES_FILE[:-1]}, "has 75 bytes, but according to its header 16 + 5 x 4 x 3 bytes"),
    "too long": ({"images": IMAGES_FILE + b"\0"}, "has 77 bytes, but according to its header 16 + 5 x 4 x 3 bytes"),
    "no image": ({"images": struct.pack(">4I", IMAGES, 0, H, W)}, "has 0 x 4 x 3 bytes; allowed: sizes above 0"),
    "fewer labels": (
        {"labels": idx(NUMBERS[:4])},
        "with 5 images and 'a-labels-idx1-ubyte' with 4 labels; allowed: equal",
    ),
    "a huge claim, compressed": (
        {"images": gzip.compress(struct.pack(">4I", IMAGES, MOST, MOST, MOST))},
        "according to its header 16 + 4294967295 x 4294967295 x 4294967295 bytes; allowed: complete IDX files",
    ),
    "a header that is no gzip": ({"images": b"\x1f\x8b" + bytes(50)}, "is damaged (Unknown compression method)"),
    "compressed, cut in its header": (
        {"images": gzip.compress(IMAGES_FILE)[:12]},
        "ends before the end of its compressed data",
    ),
}
BROKEN_INSIDE = {
    "compressed, cut": (gzip.compress(IMAGES_FILE)[:-12], "ends before the end of its compressed data"),
    "compressed, too short": (
        gzip.compress(IMAGES_FILE[:-1]),
        "contains 59 bytes of data, but according to its header 5 x 4 x 3",
    ),
    "compressed, too long": (
        gzip.compress(IMAGES_FILE + b"\0"),
        "contains more bytes of data, but according to its header 5 x 4",
    ),
    "compressed, another checksum": (gzip.compress(IMAGES_FILE)[:-8] + bytes(8), "is damaged (CRC check failed"),
}


@pytest.mark.parametrize("given, said", BROKEN.values(), ids=BROKEN)
def test_what_the_first_bytes_show_is_one_line(given, said, tmp_path):
    path = write(tmp_path, **given)
    _, [line] = find_images(str(path), "data.validation_path")
    assert line.startswith("data.validation_path: got '")
    assert said.format(folder=tmp_path) in line
    assert "; allowed: " in line
    assert "; nearest: " in line


@pytest.mark.parametrize("images, said", BROKEN_INSIDE.values(), ids=BROKEN_INSIDE)
def test_what_is_wrong_further_inside_is_one_line(images, said, tmp_path):
    path = write(tmp_path, images, suffix=".gz")
    assert find_images(str(path), "data.path") == ([path], [])
    with pytest.raises(UserError) as caught:
        read_pairs([path], "data.path")
    [line] = caught.value.problems
    assert line.startswith(f"data.path: got '{path}', which ")
    assert said in line


def test_all_problems_of_all_files_are_said(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    (tmp_path / "y/a-images-idx3-ubyte").write_bytes(idx(PIXELS.reshape(N, W, H)))
    _, [line] = find_images(f"{tmp_path}/*/*images*", "data.path")
    assert f"('{tmp_path}/x/a-images-idx3-ubyte' of 4 x 3, '{tmp_path}/y/a-images-idx3-ubyte' of 3 x 4)" in line
    _, lines = find_images(f"{tmp_path}/*/*", "data.path")
    assert len([line for line in lines if "a file of labels" in line]) == 2
    _, [line] = find_images(" ", "data.path")
    assert line.startswith("data.path: got ''; allowed with data.source=idx: files of images")
    _, [line] = find_images(f"{tmp_path}/z", "data.validation_path")
    assert line.startswith("data.validation_path: got ")


def test_what_is_no_file_is_one_line(tmp_path):
    path = write(tmp_path, labels=None)
    os.mkfifo(labels_of(path))
    _, [line] = find_images(str(path), "data.path")
    assert "', a pipe; allowed: a file of labels, in the folder of the images; nearest: " in line
    with pytest.raises(UserError, match="a pipe"):
        read(labels_of(path), LABELS, "data.path")
