"""The meshes to compare: a small set that covers each pair of axes, and single axes of a mesh that differs."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.smaller import Change, arguments, problems_of, to_mesh, with_change, with_level
from meshtrain.config.tasks import abstract_task
from meshtrain.models.task import Task
from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.rules import AXES, DATA, PIPELINE, batch_axes, model_axes, partitioned_axes, sizes_text

MOST_MESHES = 6
MOST_LAYERS, MOST_TOKENS = 4, 128  # of a cut model and of its sequences
_WIDE, _ONLY = "4 or more devices", "no other axis"
Shape = Mapping[str, int]
Goal = tuple[str, ...]  # axes that a mesh combines; or an axis, and _WIDE or _ONLY


class Case(NamedTuple):
    """A side to run.

    Attributes:
      name: the mesh and the options that differ from the configuration, for the report.
      config: the configuration, whose mesh is `shape`.
      shape: mesh axis -> size.
    """

    name: str
    config: Config
    shape: Shape


class Covering(NamedTuple):
    """The chosen meshes.

    Attributes:
      cases: the sides to run.
      num_legal: the number of meshes that the task allows.
      missing: combinations that allowed meshes have, but no chosen mesh.
    """

    cases: list[Case]
    num_legal: int
    missing: list[str]


def case(config: Config, shape: Shape, change: Change | None = None) -> Case:
    """Returns the side of a configuration on a mesh.

    Args:
      config: the configuration; its mesh is replaced by `shape`.
      shape: mesh axis -> size.
      change: further changes of options, dotted key -> value.
    """
    name = sizes_text(shape) or "one device"
    name += f", {config.pipeline.schedule}" if shape[PIPELINE] > 1 and not change else ""
    changed = with_change(config, {**to_mesh(shape), **(change or {})})
    return Case(", ".join([name, *_option_texts(change or {})]), changed, shape)


def one_device(config: Config) -> Case:
    """Returns the reference: one device, without microbatches and ZeRO."""
    return case(_plain(config), dict.fromkeys(AXES, 1))


def covering(config: Config, num_devices: int, configured: Shape | None, *, all_devices: bool) -> Covering:
    """Returns meshes that combine each pair of axes, with options that change the program and no number.

    The configured mesh is the first, and a mesh with only the data axis is the second: there, the data axis is manual
    for every task. A greedy choice follows. Meshes also get an option of `_extras`: ZeRO, accumulation, sequence
    parallelism, a schedule, remat.

    Args:
      config: the configuration.
      num_devices: the number of devices; meshes have all devices or half of them.
      configured: the configured mesh; None: it is not run.
      all_devices: whether a mesh must have all devices, because several processes run it.
    """
    plain, task = _plain(config), abstract_task(config)
    legal = dict[tuple[int, ...], frozenset[Goal]]()
    for size in [num_devices] if all_devices else [num_devices, num_devices // 2]:
        for shape in _shapes(size):
            if (shape[PIPELINE] == 1 or task.stages is not None) and not problems_of(case(plain, shape).config, shape):
                legal[tuple(shape.values())] = _goals(shape)
    missing = set[Goal]().union(*legal.values())
    cases = list[Case]()
    if configured is not None and math.prod(configured.values()) > 1:
        cases.append(case(config, configured))
        missing -= _goals(configured)
    extras = _extras(config, task)
    while missing and len(cases) < MOST_MESHES:
        # Ties are broken by the number of devices, then by the order of `legal`, so the choice is the same everywhere.
        key = max(
            legal, key=lambda key: ((DATA, _ONLY) in legal[key] & missing, len(legal[key] & missing), math.prod(key))
        )
        if not legal[key] & missing:
            break
        missing -= legal[key]
        shape = dict(zip(AXES, key, strict=True))
        change = next((one for one in extras if _fits(plain, shape, task, one)), None)
        if change is not None:
            extras.remove(change)
        cases.append(case(plain, shape, change))
    names = [" with ".join(goal) for goal in sorted(missing)] + [" ".join(_option_texts(change)) for change in extras]
    return Covering(cases, len(legal), names)


def single_axes(differing: Case) -> list[Case]:
    """Returns parts of a side that differs: meshes with a single axis, and the same mesh without other options."""
    plain = _plain(differing.config)
    axes = [axis for axis in AXES if differing.shape[axis] > 1]
    shapes = [dict.fromkeys(AXES, 1) | {axis: differing.shape[axis]} for axis in axes if len(axes) > 1]
    cases = [case(plain, shape) for shape in shapes]
    if plain != differing.config:
        cases.append(case(plain, differing.shape))
    return [one for one in cases if not problems_of(one.config, one.shape)]


def cut(config: Config, named: set[str], num_devices: int, shapes: Sequence[Shape]) -> tuple[Config, list[str]]:
    """Returns a smaller configuration with the same kinds of layers, and a text for each option that changed.

    Options that the command line sets stay. A cut that the configuration does not allow is left out.

    Args:
      config: the configuration.
      named: the dotted keys that the command line sets.
      num_devices: the number of devices of the largest mesh.
      shapes: the meshes that the user names; the batch stays divisible by them.
    """
    texts = list[str]()

    def reduce(key: str, old: int, candidates: Sequence[int]) -> None:
        nonlocal config
        for new in candidates:
            smaller = with_change(config, {key: new})
            if key not in named and new < old and not problems_of(_plain(smaller), dict.fromkeys(AXES, 1)):
                config = smaller
                texts.append(f"{key} {old} -> {new}")
                return

    num_layers = getattr(config.model, "num_layers", 0)
    period = _layer_period(config)
    reduce("model.num_layers", num_layers, [n for n in range(MOST_LAYERS, num_layers) if n % period == 0][:8])
    in_pipeline = max(config.pipeline.num_microbatches, 1)
    needed = [max(2 * num_devices, in_pipeline * num_devices // 2)]
    needed += [num_parts(batch_axes(), shape) * num_microbatches(config, shape) for shape in shapes]
    reduce("batch_size", config.batch_size, [math.lcm(*needed)])
    if ":" not in config.data.source:  # the length of a user's examples is unknown
        reduce("sequence_length", config.sequence_length, [MOST_TOKENS])
    if config.init_from:
        config = with_change(config, {"init_from": "", "init_base": ""})
        texts.append("init_from is not read: random weights")
    return config, texts


def _layer_period(config: Config) -> int:
    """Returns the number of which the number of layers must stay a multiple: layers differ within this period."""
    values = [getattr(config.model, name, 0) for name in ("global_every",)] + [config.remat.every]
    values.append(config.pipeline.num_chunks)
    return math.lcm(*(value for value in values if value > 0))


def _plain(config: Config) -> Config:
    """Returns the configuration without options that only split work: accumulation, ZeRO, sequence parallelism."""
    change = {"accumulation_steps": 1, "layout.sequence_parallel": False, **with_level(config, 0)}
    return with_change(config, change)


def _shapes(num_devices: int) -> Iterator[dict[str, int]]:
    """Yields each mesh of this number of devices: axis -> size."""
    sizes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for some in itertools.product(sizes, repeat=len(AXES)):
        if math.prod(some) == num_devices:
            yield dict(zip(AXES, some, strict=True))


def _option_texts(change: Change) -> list[str]:
    """Returns short texts of changed options, such as `zero.level=3` and `schedule=gpipe`."""
    words = arguments({key: value for key, value in change.items() if key != "pipeline.num_chunks"}).split()
    return [word.removeprefix("--config.").removeprefix("layout.").removeprefix("pipeline.") for word in words]


def _goals(shape: Shape) -> frozenset[Goal]:
    """Returns the goals of a mesh: pairs of axes, each axis, axes of 4 or more devices, data without another axis."""
    split = [axis for axis in AXES if shape[axis] > 1]
    wide = [(axis, _WIDE) for axis in split if shape[axis] >= 4]
    only = [(DATA, _ONLY)] if split == [DATA] else []
    return frozenset([*itertools.combinations(split, 2), *((axis,) for axis in split), *wide, *only])


def _extras(config: Config, task: Task) -> list[Change]:
    """Returns changes of options that change the program and no number: dotted key -> value."""
    extras: list[Change] = [{"accumulation_steps": 2}]
    extras += [with_level(config, level) for level in (3, 1, 2)]
    extras += [{"layout.sequence_parallel": True}]
    if task.stages is not None:
        other = "gpipe" if config.pipeline.schedule != "gpipe" else "1f1b"
        extras += [{"pipeline.schedule": other, "pipeline.num_chunks": 1}]
        extras += [{"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2}]
        extras += [{"remat.policy": "full" if config.remat.policy != "full" else "none"}]
    return extras


def _fits(config: Config, shape: Shape, task: Task, change: Change) -> bool:
    """Returns whether a change has an effect on a mesh, and is allowed there."""
    changed = case(config, shape, change).config
    level = changed.zero.effective_level
    needs_manual = level == 2 and not (task.takes_manual_axes or num_parts(partitioned_axes(), shape) == 1)
    is_unused = (
        (level > 0 and shape[DATA] == 1)
        or (changed.layout.sequence_parallel and num_parts(model_axes(), shape) == 1)
        or ("pipeline.schedule" in change and shape[PIPELINE] == 1)
    )
    return not (needs_manual or is_unused or problems_of(changed, shape))


def describe(config: Config, shape: Shape) -> dict[str, object]:
    """Returns the options in which sides may differ, for the certificate: key -> value."""
    return {
        "mesh": {axis: size for axis, size in shape.items() if size > 1},
        "zero.level": config.zero.effective_level,
        "accumulation_steps": config.accumulation_steps,
        "remat.policy": config.remat.policy,
        "precision": dataclasses.asdict(config.precision),
        **({"pipeline": dataclasses.asdict(config.pipeline)} if shape[PIPELINE] > 1 else {}),
    }
