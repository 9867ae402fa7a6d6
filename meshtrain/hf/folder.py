"""A Hugging Face folder: its tensors compared with its config.json, and read as sharded arrays.

Arrays are made shard by shard: no array exists whole on a host that has a part of it. For each leaf and each shard of
it on this process' devices, the shard's part of every layer's tensor is copied from the mapped file into one buffer in
our layout, and the buffer goes to the devices that hold this shard. So the extra memory of a host is one shard, and
the part of one expert where files are in 4 bits.
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

from meshtrain.errors import Problems, UserError, nearest, refuse
from meshtrain.files import expanded, what_is_at
from meshtrain.hf import mxfp4, names, tensor_files
from meshtrain.hf.config_json import Described, described
from meshtrain.hf.names import Weight
from meshtrain.launch import peers
from meshtrain.models.task import Params
from meshtrain.sharding.trees import leaves_with_paths

_MOST_LISTED = 1_000_000  # tensors of a model; DeepSeek-V3 has 46,000


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder whose files and config.json agree.

    Attributes:
      directory: absolute.
      model: what config.json describes.
      table: a row for each weight of the model, with the names of these files.
      stored: name -> tensor, those of the table alone.
      left_out: how many tensors belong to a model of images beside it.
    """

    directory: Path
    model: Described
    table: Sequence[Weight]
    stored: Mapping[str, tensor_files.Stored]
    left_out: int = 0


def opened(directory: str | Path, ignore: str | None = "") -> Folder:
    """Opens a folder with config.json and one or several safetensors files. It reads headers and no tensor.

    For `ignore` see `config.described`.

    Raises:
      UserError: one line for each problem of config.json and of the files, all at once.
    """
    folder = expanded(directory).absolute()
    if (what := what_is_at(folder)) != "a folder":
        raise UserError(
            f"{directory}: got {what}; allowed: a folder with config.json; nearest: download the model there"
        )
    stored, problems = tensor_files.tensors(folder)
    try:
        model = described(folder, ignore)
    except UserError as error:
        raise UserError(*error.problems, *problems) from error
    table = names.as_in_files(names.weights(model.family, model.options), stored)
    refuse(problems)
    refuse(_mismatches(folder, model, table, stored))
    used = {name: one for name, one in stored.items() if not names.is_ignored(name, model.options)}
    return Folder(folder, model, table, used, sum(map(names.is_of_images, stored)))


def refuse_differences(folder: Folder) -> None:
    """Compares what all processes see of a folder: they read their own parts of it. All processes call it.

    Raises:
      UserError: a process sees other options, or other tensors.
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
) -> list[str]:
    """Returns one line for each tensor that is missing, left over, or of another shape or dtype than the table's."""
    size, problems = names.sizes(model.options), Problems()
    num_wanted = sum(math.prod(names.stack(rows[0], size)) for rows in names.by_tensor(table))
    if num_wanted > max(_MOST_LISTED, 2 * len(stored)):  # of a foreign number, no list is made
        return [f"{folder}: got {len(stored)} tensors in the files; allowed: the {num_wanted} of the model in "
                "config.json; nearest: the files that belong to it"]  # fmt: skip
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
                f"{folder}: {name}: not in the files; allowed: all tensors of the model in config.json"
                f"{fix or '; nearest: the files that belong to it'}"
            )
            continue
        got = stored[name]
        if got.shape != shape:
            problems.add(
                f"{got.file}: {name}: got shape {list(got.shape)}; allowed: {list(shape)}, by config.json; nearest: "
                "the files that belong to it"
            )
        readable = (mxfp4.DTYPE,) if name in packed else tuple(tensor_files.READABLE)
        problems.add(*tensor_files.unreadable({name: got}, readable))
    for name in left:
        problems.add(
            f"{stored[name].file}: {name}: the model in config.json has no such tensor; allowed: its {len(wanted)} "
            "tensors; nearest: the config.json that belongs to the files"
        )
    return problems.lines()


def read(folder: Folder, abstract_params: Params, *, shows_bar: bool = False) -> Params:
    """Reads the weights of a folder onto shardings; dtypes are converted, rows of padding are zero.

    Args:
      folder: opened; each process reads from its own disk, so call `refuse_differences` first.
      abstract_params: pytree of jax.ShapeDtypeStruct with shardings, layers in layer order.
      shows_bar: whether to draw a bar with bytes if standard error is a terminal.

    Returns:
      A pytree of jax.Array of the same structure.

    Raises:
      UserError: one line for each leaf that the folder does not have, or that has another shape there.
    """
    table, size = {weight.path: weight for weight in folder.table}, names.sizes(folder.model.options)
    refuse_other_params(folder, abstract_params)
    leaves = leaves_with_paths(abstract_params)
    tensors = tensor_files.opened(folder.stored)
    total = sum(_bytes_here(leaf) for _, leaf in leaves)
    arrays, not_finite = [], dict[str, None]()
    disable = None if shows_bar else True
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=disable, file=sys.stderr) as bar:
        for path, leaf in leaves:
            weight = table[path]
            stored, stack = names.tensor_names(weight, size), names.stack(weight, size)
            views: list[np.ndarray | mxfp4.Packed] = []
            if weight.is_packed:
                views += [one for name in stored for one in names.packed_as_ours(tensors, name, weight, size)]
                stored, stack = [name for name in stored for _ in range(size["E"])], (*stack, size["E"])
            else:
                views += [names.as_ours(tensors[name], weight, size) for name in stored]
            arrays.append(array(views, leaf, bar.update, stack=stack, names=stored, not_finite=not_finite))
    tensor_files.warn_not_finite(folder.directory, not_finite)
    return jax.tree.unflatten(jax.tree.structure(abstract_params), arrays)


def by_name(directory: str | Path, abstract_params: Params) -> Mapping[str, tensor_files.Stored]:
    """Returns name -> tensor for a task's own weights: a name is a path, with `.` or `/` between its parts.

    Raises:
      UserError: one line for all names that are missing, one for those left over, and one for those of another shape.
    """
    stored, problems = tensor_files.tensors(expanded(directory).absolute())
    tensors = {name.replace("/", "."): one for name, one in stored.items()}
    leaves = {path.replace("/", "."): leaf.shape for path, leaf in leaves_with_paths(abstract_params)}
    other = {name for name in leaves.keys() & tensors if leaves[name] != tensors[name].shape}
    differ = {"no": leaves.keys() - tensors, "besides": tensors.keys() - leaves, "another shape of": other}
    problems = problems or [
        f"{directory}: got {what} {', '.join(sorted(some)[:5])} ({len(some)} of {len(leaves)}); allowed: the names and "
        "shapes of the task's weights; nearest: those"
        for what, some in differ.items()
        if some
    ]
    refuse(problems or tensor_files.unreadable(tensors))
    return tensors


def read_by_name(directory: str | Path, abstract_params: Params) -> Params:
    """Reads a task's own weights onto shardings, see `by_name`; dtypes are converted."""
    tensors = tensor_files.opened(by_name(directory, abstract_params))
    not_finite, leaves = dict[str, None](), []
    for path, leaf in leaves_with_paths(abstract_params):
        views = [tensors[path.replace("/", ".")]]
        leaves.append(array(views, leaf, stack=(), names=[path], not_finite=not_finite))
    tensor_files.warn_not_finite(directory, not_finite)
    return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves)


def refuse_other_params(folder: Folder, abstract_params: Params) -> None:
    """Compares the paths and shapes of parameters with those of a folder; reads no tensor.

    Raises:
      UserError: one line for each difference.
    """
    options, size = folder.model.options, names.sizes(folder.model.options)
    shapes = {}
    for weight in folder.table:
        dims = [size[letter] for letter in weight.layout.split()]
        shapes[weight.path] = [*names.stack(weight, size), *dims]
    given, problems = dict(leaves_with_paths(abstract_params)), list[str]()
    fix = f"nearest: the options that `python -m meshtrain hf config {folder.directory}` prints"
    for path in shapes.keys() | given.keys():
        if path not in given or path not in shapes:
            where = "in the folder, not in this run" if path in shapes else "in this run, not in the folder"
            problems.append(f"{folder.directory}: {path}: {where}; allowed: the same weights; {fix}")
            continue
        got, allowed = list(given[path].shape), shapes[path]
        # The vocabulary may be padded.
        if len(got) != len(allowed) or any(
            have != want and not (want == options.vocab_size and have > want)
            for have, want in zip(got, allowed, strict=True)
        ):
            problems.append(f"{folder.directory}: {path}: got shape {got}; allowed: {allowed}; {fix}")
    refuse(sorted(problems))


def _by_index(leaf: jax.ShapeDtypeStruct) -> Mapping[tuple[tuple[int, int], ...], list[jax.Device]]:
    """Returns (begin, end) of each dim -> the devices of this process that hold this shard."""
    shards = collections.defaultdict(list)
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        spans = tuple(part.indices(length)[:2] for part, length in zip(index, leaf.shape, strict=True))
        shards[spans].append(device)
    return shards


def _bytes_here(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of the different shards of a leaf on this process' devices."""
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
    """Returns a leaf; its leading dims are those of `stack`, and `views` has the tensor of each place in them.

    `advance` gets the bytes of each shard as it is read. `names` are those of the views; `not_finite` gets the names of
    views with NaN or infinity in this leaf's dtype as keys; None: they are not looked for.
    """
    shards = []
    for spans, devices in _by_index(leaf).items():
        buffer = np.zeros([end - begin for begin, end in spans], leaf.dtype)
        outer, inner = spans[: len(stack)], tuple(slice(*span) for span in spans[len(stack) :])
        for slot in np.ndindex(*[end - begin for begin, end in outer]):
            place = [begin + number for (begin, _), number in zip(outer, slot, strict=True)]
            number = int(np.ravel_multi_index(place, stack)) if stack else 0
            target = buffer[(*slot, ...)]  # a view, also of a buffer without dims
            _fill(target, views[number][inner])
            if not_finite is not None and not tensor_files.has_only_finite(target):
                not_finite[names[number]] = None
        # A copy: on CPUs an array could otherwise share the buffer with one on another device.
        shards += [jax.device_put(buffer, device, may_alias=False) for device in devices]
        jax.block_until_ready(shards[-len(devices) :])  # the buffer is free before the next one is made
        advance(buffer.nbytes)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _fill(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into the first rows of `target`: rows after it pad the vocabulary."""
    target[tuple(slice(0, length) for length in source.shape)] = source
