"""Placements for people: a line for each array, and pictures of the mesh, as text and as an image."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from meshtrain.layout.axes import AXES
from meshtrain.layout.offload import is_on_host
from meshtrain.layout.partition import is_names
from meshtrain.layout.trees import leaves_with_paths, num_bytes
from meshtrain.words.tables import aligned, format_bytes

MAX_DEVICES_SHOWN = 32
# A stage's colours: its cards' background, and the slices it holds. After eight stages they start over.
STAGE_COLOURS = ("#dbe9f6", "#fdebd0", "#dff0d8", "#f4dcea", "#e6e0f3", "#f9ddd8", "#d9f0ef", "#f3efd2")
SLICE_COLOURS = ("#2b6cb0", "#c77700", "#3c8d40", "#b0357f", "#6246a8", "#c0392b", "#17807a", "#8a7a12")


@dataclasses.dataclass(frozen=True)
class Row:
    """Where one array lives.

    Attributes:
      path: its path in its tree.
      shape: its global shape.
      dtype: its dtype's name.
      names: the logical axis of each dim, or None.
      axes: the mesh axes that split each dim, those of size 1 left out.
      num_bytes: its bytes, once.
      num_bytes_per_device: the bytes of one device's piece.
      is_on_host: whether that piece waits in the host's memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[str | None, ...]
    axes: tuple[tuple[str, ...], ...]
    num_bytes: int
    num_bytes_per_device: int
    is_on_host: bool = False


def rows(abstract_tree: Any, axes_tree: Any, shardings: Any) -> list[Row]:
    """Returns a row for each array of a tree.

    Args:
      abstract_tree: arrays or `jax.ShapeDtypeStruct`s.
      axes_tree: the same structure; the leaves are tuples of logical axes.
      shardings: the same structure; the leaves are `NamedSharding`s, as `partition.placements` returns them.
    """
    names = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    homes = dict(leaves_with_paths(shardings))
    return [_row(path, array, names[path], homes[path]) for path, array in leaves_with_paths(abstract_tree)]


def _row(path: str, array: Any, names: tuple[str | None, ...], home: NamedSharding) -> Row:
    shape = tuple(array.shape)
    padded = tuple(home.spec) + (None,) * (len(shape) - len(home.spec))
    axes = tuple((part,) if isinstance(part, str) else tuple(part or ()) for part in padded)
    large = tuple(tuple(axis for axis in part if home.mesh.shape[axis] > 1) for part in axes)
    piece = math.prod(home.shard_shape(shape)) * num_bytes(array) // max(1, math.prod(shape))
    return Row(path, shape, str(array.dtype), names, large, num_bytes(array), piece, is_on_host(home))


def table(rows: Sequence[Row]) -> str:
    """Returns a line for each array and one for the totals.

    `-` stands for a dim without a logical axis or one that is not split; `a+b` splits a dim over a, then over b.
    """
    header = ("array", "shape", "dtype", "logical axes", "split over", "a device")
    lines = [
        (
            row.path,
            " x ".join(map(str, row.shape)) or "scalar",
            row.dtype,
            " ".join(name or "-" for name in row.names),
            " ".join("+".join(part) or "-" for part in row.axes),
            format_bytes(row.num_bytes_per_device) + " on its host" * row.is_on_host,
        )
        for row in rows
    ]
    num_elements = sum(math.prod(row.shape) for row in rows)
    total = format_bytes(sum(row.num_bytes for row in rows))
    piece, waiting = (
        format_bytes(sum(row.num_bytes_per_device for row in rows if row.is_on_host == where))
        for where in (False, True)
    )
    beside = f", {waiting} for each in its host's memory" if any(row.is_on_host for row in rows) else ""
    text = aligned(lines, header, align="<<<<<>")
    return f"{text}\n\n{len(rows)} arrays, {num_elements:,} elements, {total}; {piece} on each device{beside}\n"


def _shown(shape: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns the indices to draw of each axis: all of a small mesh; else the longest axes lose their middle."""
    room = {axis: shape[axis] for axis in AXES}
    while math.prod(room.values()) > MAX_DEVICES_SHOWN:
        room[max(room, key=lambda axis: room[axis])] -= 1
    return {axis: [*range(num - 1), shape[axis] - 1] for axis, num in room.items()}


def _device(shape: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Position in the mesh, row by row: ((data * P + pipeline) * F + fsdp) * N + tensor."""
    index = 0
    for axis in AXES:
        index = index * shape[axis] + at[axis]
    return index


def _title(shape: Mapping[str, int]) -> str:
    num_devices = math.prod(shape[axis] for axis in AXES)
    sizes = " x ".join(f"{axis} {shape[axis]}" for axis in AXES if shape[axis] > 1)
    return f"{num_devices} devices = {sizes}" if sizes else "1 device"


def _gap(indices: Sequence[int], i: int) -> bool:
    """Whether indices are left out before the i-th one that is shown."""
    return i > 0 and indices[i] - indices[i - 1] > 1


def mesh_text(shape: Mapping[str, int]) -> str:
    """Returns a picture of a mesh in letters: a block for each index of data, stages downwards, fsdp and tensor across.

    Args:
      shape: the size of each axis. Of a large mesh the middle is left out.
    """
    shown = _shown(shape)
    columns = [(f, t) for f in shown["fsdp"] for t in shown["tensor"]]
    width = len(str(math.prod(shape[axis] for axis in AXES) - 1)) + 3
    lines = [_title(shape)]
    for i, d in enumerate(shown["data"]):
        lines.append("  ...\n" if _gap(shown["data"], i) else "")
        first = d * shape["fsdp"]
        last = first + shape["fsdp"] - 1
        shares = f"share {first + 1}" if first == last else f"shares {first + 1} to {last + 1}"
        lines.append(f"data {d}: {shares} of {shape['data'] * shape['fsdp']} of the batch")
        for axis in ("fsdp", "tensor"):
            if shape[axis] > 1:
                heads = [str(f if axis == "fsdp" else t) for f, t in columns]
                lines.append(f"  {axis:>12}  " + "".join(f"{head:>{width}}" for head in heads))
        for j, p in enumerate(shown["pipeline"]):
            if _gap(shown["pipeline"], j):
                lines.append(f"  {'...':>12}")
            at = [{"data": d, "pipeline": p, "fsdp": f, "tensor": t} for f, t in columns]
            cells = "".join(f"{f'[{_device(shape, where)}]':>{width}}" for where in at)
            lines.append(f"  {f'pipeline {p}':>12}  {cells}   layers {p + 1}/{shape['pipeline']}")
    return "\n".join(lines) + "\n"


def draw_mesh(shape: Mapping[str, int], path_png: str | Path) -> None:
    """Writes a picture of a mesh: a card for each device with its slice of the batch, the layers and the weights.

    Panels are the indices of data, rows the stages of the pipeline, columns fsdp and tensor.

    Args:
      shape: the size of each axis. Of a large mesh the middle is left out.
      path_png: the file to write; its ending chooses the format.
    """
    from matplotlib.figure import Figure

    shown = _shown(shape)
    num_columns, num_rows = len(shown["fsdp"]) * len(shown["tensor"]), len(shown["pipeline"])
    panels_across = max(1, min(len(shown["data"]), 8 // num_columns))
    panels_down = -(-len(shown["data"]) // panels_across)
    panel_width, panel_height = num_columns * 1.12 + 0.3, num_rows * 1.5 + 0.72
    width, height = max(4.6, panels_across * (panel_width + 0.2) + 1.2), panels_down * (panel_height + 0.2) + 1.35
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set(xlim=(0, width), ylim=(height, 0))
    canvas.set_axis_off()
    canvas.text(0.25, 0.4, _title(shape), fontsize=13, weight="bold", va="center")
    for i, d in enumerate(shown["data"]):
        x = 1.1 + (i % panels_across) * (panel_width + 0.2)
        y = 0.75 + (i // panels_across) * (panel_height + 0.2)
        _box(canvas, x, y, panel_width, panel_height, "#f6f7f9", "#b8bfc9", rounding=0.12)
        heading = f"data {d}" if not _gap(shown["data"], i) else f"…   data {d}"
        canvas.text(x + 0.18, y + 0.22, heading, fontsize=9.5, weight="bold", va="center", color="#333a44")
        for j, p in enumerate(shown["pipeline"]):
            top = y + 0.62 + j * 1.5
            if i % panels_across == 0:
                before = "…\n" if _gap(shown["pipeline"], j) else ""
                canvas.text(0.98, top + 0.65, f"{before}pipeline {p}", fontsize=9, ha="right", va="center")
            for k in range(num_columns):
                f, t = shown["fsdp"][k // len(shown["tensor"])], shown["tensor"][k % len(shown["tensor"])]
                left = x + 0.2 + k * 1.12
                if j == 0:
                    column = [f"{axis} {at}" for axis, at in (("fsdp", f), ("tensor", t)) if shape[axis] > 1]
                    canvas.text(left + 0.5, y + 0.46, ", ".join(column), fontsize=7, ha="center", va="center")
                _card(canvas, left, top, shape, {"data": d, "pipeline": p, "fsdp": f, "tensor": t})
    cuts = [f"{axis} into {parts}" for axis, parts in (("fsdp", "rows"), ("tensor", "columns")) if shape[axis] > 1]
    split = f" Weights are split by {' and by '.join(cuts)}." if cuts else ""
    note = f"Filled: what a device holds.{split}"
    canvas.text(0.25, height - 0.3, note, fontsize=8, va="center", color="#4a525e")
    figure.savefig(path_png)


def _box(
    canvas: Any, x: float, y: float, width: float, height: float, face: str, edge: str, rounding: float = 0.0
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
    canvas.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=0.8)
    )


def _card(canvas: Any, x: float, y: float, shape: Mapping[str, int], at: Mapping[str, int]) -> None:
    """One device: the share of the batch on top, the layers at the left, the piece of each weight at the right."""
    paper = STAGE_COLOURS[at["pipeline"] % len(STAGE_COLOURS)]
    ink = SLICE_COLOURS[at["pipeline"] % len(SLICE_COLOURS)]
    _box(canvas, x + 0.05, y + 0.05, 1.0, 1.36, "#c9ced6", "#c9ced6", rounding=0.08)
    _box(canvas, x, y, 1.0, 1.36, paper, ink, rounding=0.08)
    canvas.text(x + 0.5, y + 0.17, f"device {_device(shape, at)}", fontsize=7.5, ha="center", va="center", color="#222")
    share, num_shares = at["data"] * shape["fsdp"] + at["fsdp"], shape["data"] * shape["fsdp"]
    for left, below, word in ((0.5, 0.56, "batch"), (0.22, 1.28, "layers"), (0.66, 1.28, "weights")):
        canvas.text(x + left, y + below, word, fontsize=5.5, ha="center", va="center", color="#4a525e")
    _slices(canvas, (x + 0.12, y + 0.32, 0.76, 0.16), (1, num_shares), (0, share), ink)
    _slices(canvas, (x + 0.12, y + 0.66, 0.2, 0.54), (shape["pipeline"], 1), (at["pipeline"], 0), ink)
    _slices(canvas, (x + 0.44, y + 0.66, 0.44, 0.54), (shape["fsdp"], shape["tensor"]), (at["fsdp"], at["tensor"]), ink)


def _slices(
    canvas: Any, frame: tuple[float, float, float, float], grid: tuple[int, int], own: tuple[int, int], ink: str
) -> None:
    """A rectangle cut into rows and columns, one piece of it filled."""
    x, y, width, height = frame
    (num_rows, num_columns), (row, column) = grid, own
    _box(canvas, x, y, width, height, "white", "#8c95a3")
    piece_width, piece_height = width / num_columns, height / num_rows
    _box(canvas, x + column * piece_width, y + row * piece_height, piece_width, piece_height, ink, ink)
    # Past 16 pieces the lines would cover what they divide.
    if num_columns <= 16:
        canvas.vlines([x + i * piece_width for i in range(1, num_columns)], y, y + height, "#8c95a3", linewidth=0.6)
    if num_rows <= 16:
        canvas.hlines([y + i * piece_height for i in range(1, num_rows)], x, x + width, "#8c95a3", linewidth=0.6)
