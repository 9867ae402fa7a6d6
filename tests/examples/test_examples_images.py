"""The digits that come with the package, images by path, and which of them are held out."""

import collections
import fnmatch
import pathlib
import tomllib

import jax
import numpy as np
import pytest

from meshtrain.data.sources import DataRequest
from meshtrain.errors import UserError
from meshtrain.examples.idx import read_pairs
from meshtrain.examples.images import DIGITS, ImageOptions, open_images
from tests.examples.test_examples_idx import NUMBERS, PIXELS, idx, write

ROOT = pathlib.Path(__file__).parents[2]
MOST_BYTES = 60_000
# Of each digit, as the data set's own page counts its test part.
COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def opened(size=(8, 8, 1), num_classes=10, **options):
    batch = {"images": jax.ShapeDtypeStruct((1, *size), np.uint8)} if size else {}
    asked = DataRequest(batch, {"labels": num_classes} if num_classes else {}, 1, 0, 0)
    return open_images(ImageOptions(**{"source": "digits", **options}), asked)


def pixels_of(examples):
    return collections.Counter(
        example["images"].tobytes() for example in map(examples.__getitem__, range(len(examples)))
    )


def test_the_digits_are_those_of_the_data_set():
    pixels, labels = read_pairs([DIGITS], "data.path")
    assert pixels.shape == (1797, 8, 8)
    assert np.bincount(labels).tolist() == COUNTS
    sixteenths = pixels / 255 * 16
    np.testing.assert_allclose(sixteenths, np.round(sixteenths), atol=0.05)
    # Its first line begins 0,0,5,13,9,1,0,0 and ends with the label 0.
    assert np.round(sixteenths[0, 0]).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert labels[:10].tolist() == list(range(10))


def test_the_digits_are_small_credited_and_in_the_package():
    files = sorted(DIGITS.parent.iterdir())
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    source = (DIGITS.parent / "SOURCE.txt").read_text(encoding="utf-8")
    for word in ("Alpaydin", "Kaynak", "UCI", "CC BY 4.0", "Changed:"):
        assert word in source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["meshtrain"]
    names = [path.relative_to(ROOT / "meshtrain").as_posix() for path in files]
    assert not [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def test_a_share_is_held_out_by_the_hash_of_the_pixels():
    data = opened(validation_fraction=0.2)
    assert (len(data.train), len(data.validation)) == (1438, 359)
    assert data.summary.startswith("1,438 + 359 handwritten digits (UCI, Alpaydin and Kaynak), 8 x 8 pixels")
    train, held = pixels_of(data.train), pixels_of(data.validation)
    assert not train & held
    assert (train + held).total() == 1797
    fewer = opened(validation_fraction=0.1)
    assert not pixels_of(fewer.validation) - held, "a smaller share is a part of a larger one"
    assert fewer.fingerprint != data.fingerprint
    assert opened(validation_fraction=0.2).fingerprint == data.fingerprint
    assert min(np.bincount([data.validation[i]["labels"] for i in range(359)])) > 20, "all digits are among them"
    assert len(opened(validation_fraction=0.0).validation) == 0


def test_an_example_is_an_image_its_label_and_its_weight():
    data = opened()
    example = data.train[np.int64(3)]
    assert {name: (array.shape, array.dtype.name) for name, array in example.items()} == {
        "images": ((8, 8, 1), "uint8"),
        "labels": ((), "int32"),
        "weights": ((), "float32"),
    }
    assert example["weights"] == 1


def test_images_by_path_stay_in_their_split_in_another_order(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, order in ((one, slice(None)), (other, slice(None, None, -1))):
        folder.mkdir()
        write(folder, idx(PIXELS[order]), idx(NUMBERS[order]))
    made = [
        opened((4, 3, 1), source="idx", path=f"{folder}/a-images-idx3-ubyte", validation_fraction=0.4)
        for folder in (one, other)
    ]
    assert pixels_of(made[0].validation) == pixels_of(made[1].validation)
    assert len(made[0].validation) == 2
    assert made[0].fingerprint != made[1].fingerprint, "by number they are other examples"
    labels = [{e["images"].tobytes(): int(e["labels"]) for e in map(m.train.__getitem__, range(3))} for m in made]
    assert labels[0] == labels[1]


def test_validation_images_may_have_files_of_their_own(tmp_path):
    train, held = tmp_path / "train", tmp_path / "held"
    for folder, part in ((train, slice(0, 3)), (held, slice(3, 5))):
        folder.mkdir()
        write(folder, idx(PIXELS[part]), idx(NUMBERS[part]))
    paths = {"path": f"{train}/*images*", "validation_path": f"{held}/*images*"}
    data = opened((4, 3, 1), source="idx", **paths)
    np.testing.assert_array_equal(data.train.pixels, PIXELS[:3])
    np.testing.assert_array_equal(data.validation.labels, NUMBERS[3:])
    swapped = opened((4, 3, 1), source="idx", path=paths["validation_path"], validation_path=paths["path"])
    assert swapped.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"size": (28, 28, 1)},
            r"grey images of 4 x 3 pixels; allowed for this task: 28 x 28, .*model\.height=4, model\.w",
        ),
        ({"size": (4, 3, 3)}, r"allowed for this task: 4 x 3 with model\.channels = 3, .*model\.channels=1"),
        (
            {"num_classes": 5},
            r"^data\.path: got label 5 of image 4; allowed: 0 to 4, .*nearest: model\.num_classes=6, or the labels",
        ),
        ({"num_classes": 3}, r"^data\.path: got label 3 of image 0; allowed: 0 to 2, .*nearest: model\.num_classes=6"),
    ],
)
def test_images_that_do_not_fit_the_task_are_one_line(given, said, tmp_path):
    path = str(write(tmp_path))
    with pytest.raises(UserError, match=said) as caught:
        opened(**{"size": (4, 3, 1), "source": "idx", "path": path, **given})
    assert len(caught.value.problems) == 1
    with pytest.raises(UserError) as caught:
        opened(**{"size": (4, 3, 1), "source": "idx", "path": path, "validation_path": path, **given})
    assert [line.partition(":")[0] for line in caught.value.problems] == ["data.path", "data.validation_path"]
