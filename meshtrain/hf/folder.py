"""Compares the tensors of a Hugging Face folder with its config.json, and reads them as sharded arrays.

Arrays are built shard by shard, so a host never has a complete copy of an array of which it stores only a part. For
each leaf and each shard on this process's devices, the shard's part of every layer's tensor is copied from the mapped
file into one buffer in the decoder's layout. The buffer is then copied to the devices that store this shard. The extra
host memory is one shard, and also one expert's part of this shard if the files are quantized to 4 bits.
"""

import collections
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from meshtrain.errors import Problem, Problems, UserError, nearest, refuse
from meshtrain.files import expand_user, what_is_at
from meshtrain.hf import mxfp4, names, tensor_files
from meshtrain.hf.config_json import Described, describe_model
from meshtrain.hf.names import Weight
from meshtrain.launch import peers
from meshtrain.models.task import Params
from meshtrain.sharding.trees import leaves_with_paths

_MOST_LISTED = 1_000_000  # maximum number of tensors whose names are compared; DeepSeek-V3 has 46,000


@dataclasses.dataclass(frozen=True)
class Folder:
    """An opened Hugging Face folder, whose tensors match its config.json.

    Attributes:
      directory: the absolute path of the folder.
      model: the model that config.json describes.
      table: one row for each weight of the model, with the tensor names in these files.
      stored: name -> tensor, for the tensors that `table` names.
      left_out: the number of tensors of a multimodal folder that belong to its image model; they are not read.
    """

    directory: Path
    model: Described
    table: Sequence[Weight]
    stored: Mapping[str, tensor_files.Stored]
    left_out: int = 0


def open_folder(directory: str | Path, ignore: str | None = "") -> Folder:
    """Opens a folder with config.json and safetensors files; copies no weights.

    Args:
      directory: the path of the folder.
      ignore: unknown keys of config.json to ignore, comma separated; None ignores all unknown keys.

    Raises:
      UserError: one line for each problem of config.json and of the files, all at once.
    """
    folder = expand_user(directory).absolute()
    if (what := what_is_at(folder)) != "a folder":
        raise UserError(
            Problem(
                directory, got=what, allowed="a folder with config.json", nearest="download the model into this folder"
            )
        )
    stored, problems = tensor_files.tensors(folder)
    try:
        model = describe_model(folder, ignore)
    except UserError as error:
        raise UserError(*error.problems, *problems) from error
    table = names.as_in_files(names.weights(model.family, model.options), stored)
    refuse(problems)
    refuse(_mismatches(folder, model, table, stored))
    used = {name: one for name, one in stored.items() if not names.is_ignored(name, model.options)}
    return Folder(folder, model, table, used, sum(map(names.is_of_images, stored)))


def refuse_differences(folder: Folder) -> None:
    """Checks that all processes see the same files, because each process reads its shards from its own disk.

    All processes must call this function.

    Raises:
      UserError: the options or the tensors differ between processes.
    """
    if peers.count() == 1:
        return
    tensors = [(name, one.file.name, one.dtype, one.shape, one.begin) for name, one in sorted(folder.stored.items())]
    facts = {"config": dataclasses.asdict(folder.model), "tensors": tensors}
    hashes = {name: hashlib.sha256(json.dumps(fact).encode()).hexdigest() for name, fact in facts.items()}
    hashes["content"] = tensor_files.content_hash(folder.stored)
    peers.refuse_differences("the Hugging Face folder", hashes, peers.SAME_FILES)


def _mismatches(
    folder: Path, model: Described, table: Sequence[Weight], stored: Mapping[str, tensor_files.Stored]
) -> list[Problem]:
    """Returns an error line for each tensor that is missing, superfluous, or has another shape or an unreadable dtype.

    `table` has a row for each weight of `model`, and `stored` contains all tensors of the files by name.
    """
    size, problems = names.sizes(model.options), Problems()
    num_wanted = sum(math.prod(names.stack(rows[0], size)) for rows in names.by_tensor(table))
    if num_wanted > max(_MOST_LISTED, 2 * len(stored)):  # a corrupt layer count must not create a huge list
        return [
            Problem(
                folder,
                got=f"{len(stored)} tensors in the files",
                allowed=f"the {num_wanted} tensors of the model in config.json",
                nearest="the files that belong to it",
            )
        ]
    wanted, packed = dict[str, tuple[int, ...]](), set[str]()
    for weight in table:
        shapes = names.tensor_shapes(weight, size)
        wanted |= shapes
        packed |= shapes.keys() if weight.is_packed else set()
    left = [name for name in stored if name not in wanted and not names.is_ignored(name, model.options)]
    for name, shape in wanted.items():
        if name not in stored:
            fix = nearest(name, left) if len(left) < 100 else ""
            problems.add(
                Problem(
                    f"{folder}: {name}",
                    fault="not in the files",
                    allowed="all tensors of the model in config.json",
                    fix=fix,
                    nearest="the files that belong to it",
                )
            )
            continue
        got = stored[name]
        if got.shape != shape:
            problems.add(
                Problem(
                    f"{got.file}: {name}",
                    got=f"shape {list(got.shape)}",
                    allowed=f"{list(shape)}, by config.json",
                    nearest="the files that belong to it",
                )
            )
        readable = (mxfp4.DTYPE,) if name in packed else tuple(tensor_files.READABLE)
        problems.add(*tensor_files.unreadable({name: got}, readable))
    for name in left:
        problems.add(
            Problem(
                f"{stored[name].file}: {name}",
                fault="the model in config.json does not have this tensor",
                allowed=f"its {len(wanted)} tensors",
                nearest="the config.json that belongs to the files",
            )
        )
    return problems.lines()


def read(folder: Folder, abstract_params: Params, *, shows_bar: bool = False) -> Params:
    """Reads the weights of a folder into sharded arrays; converts dtypes, and pads the vocabulary with zeros.

    Args:
      folder: the folder, from `open_folder`. Each process reads from its own disk, so call `refuse_differences` first.
      abstract_params: a pytree of jax.ShapeDtypeStruct with shardings. Stacked layers are in layer order, not grouped
        by pipeline stage.
      shows_bar: whether to draw a progress bar in bytes if standard error is a terminal.

    Returns:
      A pytree of jax.Array with the structure of `abstract_params`.

    Raises:
      UserError: one line for each weight that only the folder or only `abstract_params` has, or that has another shape.
    """
    table, size = {weight.path: weight for weight in folder.table}, names.sizes(folder.model.options)
    refuse_other_params(folder, abstract_params)
    leaves = leaves_with_paths(abstract_params)
    tensors = tensor_files.open_tensors(folder.stored)
    total = sum(_bytes_here(leaf) for _, leaf in leaves)
    arrays, not_finite = [], dict[str, None]()
    disable = None if shows_bar else True
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=disable, file=sys.stderr) as bar:
        for path, leaf in leaves:
            weight = table[path]
            stored, stack = names.tensor_names(weight, size), names.stack(weight, size)
            views: list[np.ndarray | mxfp4.Packed] = []
            if weight.is_packed:
                views += [one for name in stored for one in names.unpack_experts(tensors, name, weight, size)]
                stored, stack = [name for name in stored for _ in range(size["E"])], (*stack, size["E"])
            else:
                views += [names.as_ours(tensors[name], weight, size) for name in stored]
            arrays.append(array(views, leaf, bar.update, stack=stack, names=stored, not_finite=not_finite))
    tensor_files.warn_not_finite(folder.directory, not_finite)
    return jax.tree.unflatten(jax.tree.structure(abstract_params), arrays)


def by_name(directory: str | Path, abstract_params: Params) -> Mapping[str, tensor_files.Stored]:
    """Returns the stored weights of a custom task: path of a weight with `.` instead of `/` -> tensor.

    A tensor's name in the files is the weight's path, with `.` or `/` between its parts.

    Args:
      directory: a folder with safetensors files.
      abstract_params: a pytree of jax.ShapeDtypeStruct.

    Raises:
      UserError: a file is damaged; one line for all missing names, one for all superfluous names, and one for all wrong
        shapes; or one line for each tensor with an unreadable dtype.
    """
    stored, problems = tensor_files.tensors(expand_user(directory).absolute())
    tensors = {name.replace("/", "."): one for name, one in stored.items()}
    leaves = {path.replace("/", "."): leaf.shape for path, leaf in leaves_with_paths(abstract_params)}
    other = {name for name in leaves.keys() & tensors if leaves[name] != tensors[name].shape}
    differ = {"no": leaves.keys() - tensors, "additional": tensors.keys() - leaves, "another shape of": other}
    problems = problems or [
        Problem(
            directory,
            got=f"{what} {', '.join(sorted(some)[:5])} ({len(some)} of {len(leaves)})",
            allowed="the names and shapes of the task's weights",
            nearest="those",
        )
        for what, some in differ.items()
        if some
    ]
    refuse(problems or tensor_files.unreadable(tensors))
    return tensors


def read_by_name(directory: str | Path, abstract_params: Params) -> Params:
    """Returns the weights of a custom task as sharded arrays, in the structure of `abstract_params`.

    The arrays have the dtypes and shardings of `abstract_params`. `by_name` explains the names of the tensors and the
    errors.
    """
    tensors = tensor_files.open_tensors(by_name(directory, abstract_params))
    not_finite, leaves = dict[str, None](), []
    for path, leaf in leaves_with_paths(abstract_params):
        views = [tensors[path.replace("/", ".")]]
        leaves.append(array(views, leaf, stack=(), names=[path], not_finite=not_finite))
    tensor_files.warn_not_finite(directory, not_finite)
    return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves)


def refuse_other_params(folder: Folder, abstract_params: Params) -> None:
    """Checks that a run's parameters have the paths and shapes of a folder's weights; reads no tensor.

    The run may pad the vocabulary, so its vocabulary dims may be larger than the folder's.

    Raises:
      UserError: one line for each difference.
    """
    options, size = folder.model.options, names.sizes(folder.model.options)
    shapes = {}
    for weight in folder.table:
        dims = [size[letter] for letter in weight.layout.split()]
        shapes[weight.path] = [*names.stack(weight, size), *dims]
    given, problems = dict(leaves_with_paths(abstract_params)), list[Problem]()
    fix = f"the options that `python -m meshtrain hf config {folder.directory}` prints"
    for path in shapes.keys() | given.keys():
        if path not in given or path not in shapes:
            where = "in the folder, not in this run" if path in shapes else "in this run, not in the folder"
            problems.append(
                Problem(f"{folder.directory}: {path}", fault=where, allowed="the same weights", nearest=fix)
            )
            continue
        got, allowed = list(given[path].shape), shapes[path]
        # The run may pad the vocabulary, so its dim may be larger than the file's.
        if len(got) != len(allowed) or any(
            have != want and not (want == options.vocab_size and have > want)
            for have, want in zip(got, allowed, strict=True)
        ):
            problems.append(Problem(f"{folder.directory}: {path}", got=f"shape {got}", allowed=allowed, nearest=fix))
    refuse(sorted(problems))


def _by_index(leaf: jax.ShapeDtypeStruct) -> Mapping[tuple[tuple[int, int], ...], list[jax.Device]]:
    """Returns the distinct shards of a leaf on this process: (begin, end) of each dim -> devices with this shard."""
    shards = collections.defaultdict(list)
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        spans = tuple(part.indices(length)[:2] for part, length in zip(index, leaf.shape, strict=True))
        shards[spans].append(device)
    return shards


def _bytes_here(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of the distinct shards of a leaf on this process's devices."""
    return sum(int(np.prod([end - begin for begin, end in spans])) * leaf.dtype.itemsize for spans in _by_index(leaf))


def array(
    views: Sequence[np.ndarray | mxfp4.Packed],
    leaf: jax.ShapeDtypeStruct,
    advance: Callable[[int], object] = lambda num_bytes: None,
    *,
    stack: tuple[int, ...],
    names: Sequence[str] = (),
    not_finite: dict[str, None] | None = None,
) -> jax.Array:
    """Builds the sharded array of a leaf from the tensors of its layers (and experts).

    Args:
      views: the tensor at each index of the leaf's stacked dims, in row-major order.
      leaf: the shape, dtype and sharding of the array.
      advance: number of bytes -> None, for a progress bar; called with the size of each shard after it is read.
      stack: the sizes of the stacked dims, which are the leading dims of the leaf: (layers, experts), (layers,) or ().
      names: the names of the tensors in `views`, for `not_finite`.
      not_finite: a dict to which the names of tensors are added that contain NaN or infinity in this leaf's dtype; None
        skips this check.
    """
    shards = []
    for spans, devices in _by_index(leaf).items():
        buffer = np.zeros([end - begin for begin, end in spans], leaf.dtype)
        outer, inner = spans[: len(stack)], tuple(slice(*span) for span in spans[len(stack) :])
        for slot in np.ndindex(*[end - begin for begin, end in outer]):
            place = [begin + number for (begin, _), number in zip(outer, slot, strict=True)]
            number = int(np.ravel_multi_index(place, stack)) if stack else 0
            target = buffer[(*slot, ...)]  # `...` gives a view even if the buffer has no dims
            _fill(target, views[number][inner])
            if not_finite is not None and not tensor_files.has_only_finite(target):
                not_finite[names[number]] = None
        # Force a copy: on CPU, arrays on several devices could otherwise share this buffer.
        shards += [jax.device_put(buffer, device, may_alias=False) for device in devices]
        jax.block_until_ready(shards[-len(devices) :])  # the buffer is free before the next one is made
        advance(buffer.nbytes)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _fill(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into the leading part of `target`, which may be larger; the other entries pad the vocabulary."""
    target[tuple(slice(0, length) for length in source.shape)] = source
