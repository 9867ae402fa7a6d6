"""Data sources of labelled images: the handwritten digits included in this package, or IDX files.

The digits are the test part of Optical Recognition of Handwritten Digits by E. Alpaydin and C. Kaynak, from the UCI
Machine Learning Repository, CC BY 4.0; see digits/SOURCE.txt.

N: images, H: height, W: width, both in pixels.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meshtrain.data.corpus import tokenizer_for, vocabulary_of
from meshtrain.data.dataset import Dataset, open_user_data
from meshtrain.data.sources import DataOptions, DataRequest, Source, fraction_problems, unread, url_problems_of
from meshtrain.data.weighted_paths import PATH, VALIDATION_PATH, Part, shared_files
from meshtrain.errors import Problem, refuse
from meshtrain.examples.idx import find_images, read_pairs
from meshtrain.files import identities
from meshtrain.options import option

DIGITS = Path(__file__).parent / "digits" / "images-idx3-ubyte.gz"


@dataclasses.dataclass(frozen=True)
class ImageOptions(DataOptions):
    """The options of the data sources `digits` and `idx`."""

    validation_fraction: float = option(
        0.05, "share of the images kept for validation, 0 to below 1", minimum=0, only_for={"validation_path": ("",)}
    )


@dataclasses.dataclass(frozen=True)
class Images:
    """A sequence of examples: `images` uint8 [H, W, 1], `labels` int32 scalar, and `weights`, the float32 scalar 1.

    Attributes:
      pixels: all images, uint8 [N, H, W]; 0 is the background.
      labels: class of each image, [N], any integer dtype.
    """

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        label = np.asarray(self.labels[index], np.int32)
        return {"images": self.pixels[index][..., None], "labels": label, "weights": np.ones((), np.float32)}


def open_images(options: ImageOptions, asked: DataRequest) -> Dataset:
    """Returns the dataset of the included digits, or of the IDX files of `data.path`; all images are in memory.

    Without validation files, images are sorted by a hash of their pixels, and the first images, a fixed share, are the
    validation set. So the position of an image in the files does not matter. Copies of an image have the same hash, so
    they are in the same set, unless the boundary between the two sets falls between them.

    Args:
      options: data options with the source `digits` or `idx`.
      asked: the data request. If the task's batch has the entries `images` [B, H, W, 1] and `labels`, the size of
        images and the number of classes are checked.

    Raises:
      UserError: has one line for each missing or invalid file, for images whose size is not the task's, and for labels
        that exceed the task's classes.
    """
    key, key_of_validation, what = "data.path", "data.validation_path", "handwritten digits (UCI, Alpaydin and Kaynak)"
    if options.source == "digits":
        train = read_pairs([DIGITS], key)
    else:
        train, what = read_pairs(_files(options.path, key), key), f"images of {options.path}"
    problems = _problems(key, train, asked)
    if options.source == "idx" and options.validation_path:
        validation = read_pairs(_files(options.validation_path, key_of_validation), key_of_validation)
        problems += _problems(key_of_validation, validation, asked)
    else:
        train, validation = _split_by_hash(*train, options.validation_fraction)
    refuse(problems)
    digest = hashlib.sha256()
    for array in (*train, *validation):
        digest.update(np.ascontiguousarray(array).data)
    digest.update(f"{train[0].shape} {validation[0].shape}".encode())
    height, width = train[0].shape[1:]
    return Dataset(
        train=Images(*train),
        validation=Images(*validation),
        fingerprint=digest.hexdigest(),
        summary=f"{len(train[0]):,} + {len(validation[0]):,} {what}, {height} x {width} pixels",
    )


def open_each(options: ImageOptions, asked: DataRequest) -> dict[str, Images]:
    """Returns {path: the examples of this IDX file} for the files of `data.path`, without a validation split.

    Args:
      options: data options with the source `idx`.
      asked: the data request, with the task's batch and the number of classes.

    Raises:
      UserError: has one line for each missing or invalid file, for images whose size is not the task's, and for labels
        that exceed the task's classes.
    """
    key = "data.path"
    pairs = {str(path): read_pairs([path], key) for path in _files(options.path, key)}
    refuse([line for pair in pairs.values() for line in _problems(key, pair, asked)])
    parts = {name: Images(*pair) for name, pair in pairs.items()}
    for name, images in parts.items():
        open_user_data(Dataset(images, images, name), asked.batch, asked.limits, num_eval_batches=0)
    return parts


def _files(paths: str, key: str) -> list[Path]:
    files, problems = find_images(paths, key)
    refuse(problems)
    return files


def _problems(key: str, pair: tuple[np.ndarray, np.ndarray], asked: DataRequest) -> list[Problem]:
    """Returns up to two error lines: images do not have the task's size, and labels exceed the task's classes.

    Args:
      key: name of the option that contains the paths, for error lines.
      pair: images uint8 [N, H, W] and labels [N].
      asked: the data request with the task's batch and the number of classes.
    """
    pixels, labels = pair
    height, width = pixels.shape[1:]
    size = asked.batch["images"].shape[1:] if "images" in asked.batch else ()
    num_classes = asked.limits["labels"] if "labels" in asked.limits else 0
    problems = []
    if size and size != (height, width, 1):
        wanted = " x ".join(map(str, size[:2]))
        colours = "" if size[2:] == (1,) else f" with model.channels = {size[-1]}"
        fix = f"model.height={height}, model.width={width}, model.channels=1"
        problems.append(
            Problem(
                key,
                got=f"grey images of {height} x {width} pixels",
                condition="for this task",
                allowed=f"{wanted}{colours}, see Task.batch",
                nearest=fix,
            )
        )
    if num_classes and labels.max() >= num_classes:
        first = int(np.argmax(labels >= num_classes))
        problems.append(
            Problem(
                key,
                got=f"label {labels[first]} of image {first}",
                allowed=f"0 to {num_classes - 1}, below the task's number of classes",
                nearest=f"model.num_classes={labels.max() + 1}, or the labels of these images",
            )
        )
    return problems


def _split_by_hash(
    pixels: np.ndarray, labels: np.ndarray, fraction: float
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Splits images and labels into (training, validation); images with the smallest hashes are for validation.

    Args:
      pixels: images uint8 [N, H, W].
      labels: class of each image, [N].
      fraction: share of the images for validation, 0 to below 1.
    """
    hashes = [hashlib.sha256(image.tobytes()).digest() for image in pixels]
    is_held = np.zeros(len(pixels), bool)
    is_held[sorted(range(len(pixels)), key=hashes.__getitem__)[: round(len(pixels) * fraction)]] = True
    return (pixels[~is_held], labels[~is_held]), (pixels[is_held], labels[is_held])


def check(options: ImageOptions, reads_data: bool) -> list[Problem]:
    """Returns an error line for each invalid option of the sources `digits` and `idx`.

    If `reads_data` is true, the headers of the image and label files are read, and there is an error line for each
    invalid file.
    """
    inputs = ("path", "validation_path") if options.source == "idx" else ()
    urls = url_problems_of(options) if inputs else []
    problems = unread(options, inputs, lambda path: "idx") + fraction_problems(options) + urls
    if reads_data and inputs and not urls:
        files, found = find_images(options.path, PATH)
        problems += found
        if options.validation_path:
            held, found = find_images(options.validation_path, VALIDATION_PATH)
            both = (Part("", options.path, files), Part("", options.validation_path, held, VALIDATION_PATH))
            problems += found + shared_files(both, identities)
    return problems


digits = Source(open_images, check, tokenizer_for, vocabulary_of, ImageOptions)
idx = dataclasses.replace(digits, open_files=open_each)
