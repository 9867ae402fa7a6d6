"""Draws the mesh as text and as an image: the shards of batch, layers and weights on each device.

There is a block (a panel) for each index of the axes that only split the batch, such as data. In a block, the stages of
the pipeline are rows, and the axes that split weights (fsdp, context, tensor) are columns.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.rules import AXES, PIPELINE, batch_axes, model_axes, sequence_axes, sizes_text, storage_axes

if TYPE_CHECKING:  # imported in functions, because the import takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DEVICES_SHOWN = 32
LABEL = 0.62  # height in inches above the cards of a panel: its title, and a line with the labels of the columns
# The colours of a stage: the background of its cards, and its slices. They repeat after eight stages.
STAGE_COLOURS = ("#dbe9f6", "#fdebd0", "#dff0d8", "#f4dcea", "#e6e0f3", "#f9ddd8", "#d9f0ef", "#f3efd2")
SLICE_COLOURS = ("#2b6cb0", "#c77700", "#3c8d40", "#b0357f", "#6246a8", "#c0392b", "#17807a", "#8a7a12")


def _weight_axes() -> tuple[str, ...]:
    """Returns the axes that split the weights of one stage, in mesh order."""
    return tuple(axis for axis in AXES if axis in (*storage_axes(), *model_axes()) and axis != PIPELINE)


def _block_axes() -> tuple[str, ...]:
    """Returns the axes over which complete stages are replicated, in mesh order."""
    return tuple(axis for axis in AXES if axis not in (PIPELINE, *_weight_axes()))


def _drawn_indices(shape: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns axis -> the indices to draw: all indices of a small mesh; in a large mesh, long axes are shortened.

    Of a shortened axis the first indices and the last index are drawn.
    """
    room = {axis: min(shape[axis], MAX_DEVICES_SHOWN + 1) for axis in AXES}
    while math.prod(room.values()) > MAX_DEVICES_SHOWN:
        room[max(room, key=lambda axis: room[axis])] -= 1
    return {axis: [*range(num - 1), shape[axis] - 1 if num > 1 else 0] for axis, num in room.items()}


def _positions(indices: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[dict[str, int]]:
    """Returns {axis: index} for each position along the axes in `names`; the index of the last axis changes fastest.

    Args:
      indices: axis -> the indices to draw.
      names: the axes of the positions.
    """
    return [dict(zip(names, at, strict=True)) for at in itertools.product(*(indices[axis] for axis in names))]


def _index(shape: Mapping[str, int], at: Mapping[str, int], names: Sequence[str] = AXES) -> int:
    """Returns the row-major index of a position along the axes in `names`; by default, its device number.

    Args:
      shape: axis -> its size.
      at: axis -> the index of the position.
      names: the axes, slowest first.
    """
    index = 0
    for axis in names:
        index = index * shape[axis] + at[axis]
    return index


def _gap(shape: Mapping[str, int], positions: Sequence[Mapping[str, int]], i: int, names: Sequence[str]) -> bool:
    """Returns whether positions between the i-th drawn position and the drawn position before it are omitted.

    Args:
      shape: axis -> its size.
      positions: the drawn positions, in order.
      i: the index of a drawn position.
      names: the axes of the positions, slowest first.
    """
    return i > 0 and _index(shape, positions[i], names) != _index(shape, positions[i - 1], names) + 1


def _title(shape: Mapping[str, int]) -> str:
    sizes = sizes_text(shape)
    return f"{math.prod(shape.values())} devices = {sizes}" if sizes else "1 device"


def _heading(shape: Mapping[str, int], at: Mapping[str, int], always: str = "") -> str:
    """Returns a position as text, such as `data 0, fsdp 1`; axes of size 1 are omitted, except the axis `always`.

    Args:
      shape: axis -> its size.
      at: axis -> the index of the position.
      always: an axis that is included even if its size is 1; '': no such axis.
    """
    return ", ".join(f"{axis} {index}" for axis, index in at.items() if shape[axis] > 1 or axis == always)


def _shares(shape: Mapping[str, int], block: Mapping[str, int]) -> str:
    """Describes which shards of the batch the devices of a block compute, such as `shares 1 to 4`.

    Args:
      shape: axis -> its size.
      block: axis -> the index of the block along the axes that replicate complete stages.
    """
    names = batch_axes()
    inside = {axis: range(shape[axis]) for axis in names if axis not in block}
    held = sorted(_index(shape, {**block, **at}, names) + 1 for at in _positions(inside, list(inside)))
    if len(held) == 1:
        return f"share {held[0]}"
    if held[-1] - held[0] == len(held) - 1:
        return f"shares {held[0]} to {held[-1]}"
    return f"shares {', '.join(map(str, held))}"


def mesh_text(shape: Mapping[str, int]) -> str:
    """Draws a mesh as text: blocks with stages of the pipeline as rows, and axes that split weights as columns.

    There is a block for each position along the axes that only split the batch, such as data.

    Args:
      shape: axis -> its size. The middle of a large mesh is omitted.
    """
    shown = _drawn_indices(shape)
    blocks, across = _positions(shown, _block_axes()), _positions(shown, _weight_axes())
    num_shares, num_pieces = num_parts(batch_axes(), shape), num_parts(sequence_axes(), shape)
    in_parts = f", each sequence in {num_pieces} parts" if num_pieces > 1 else ""
    width = len(str(math.prod(shape.values()) - 1)) + 3
    lines = [_title(shape)]
    for i, block in enumerate(blocks):
        lines.append("  ...\n" if _gap(shape, blocks, i, _block_axes()) else "")
        heading = _heading(shape, block, always=_block_axes()[0])
        lines.append(f"{heading}: {_shares(shape, block)} of {num_shares} of the batch{in_parts}")
        for axis in _weight_axes():
            if shape[axis] > 1:
                lines.append(f"  {axis:>12}  " + "".join(f"{at[axis]:>{width}}" for at in across))
        for j, p in enumerate(shown[PIPELINE]):
            if j > 0 and p != shown[PIPELINE][j - 1] + 1:
                lines.append(f"  {'...':>12}")
            cells = "".join(f"{f'[{_index(shape, {**block, PIPELINE: p, **at})}]':>{width}}" for at in across)
            lines.append(f"  {f'{PIPELINE} {p}':>12}  {cells}   layers {p + 1}/{shape[PIPELINE]}")
    return "\n".join(lines) + "\n"


def mesh_figure(shape: Mapping[str, int]) -> "Figure":
    """Draws a mesh: a card for each device with its slices of the batch, the layers and the weights.

    There is a panel for each position along the axes that only split the batch, such as data. In a panel, rows are
    stages of the pipeline, and columns are positions along fsdp, context and tensor.

    Args:
      shape: axis -> its size. The middle of a large mesh is omitted.
    """
    from matplotlib.figure import Figure

    shown = _drawn_indices(shape)
    blocks, across = _positions(shown, _block_axes()), _positions(shown, _weight_axes())
    panels_across = max(1, min(len(blocks), 8 // len(across)))
    panels_down = -(-len(blocks) // panels_across)
    panel_width, panel_height = len(across) * 1.12 + 0.3, len(shown[PIPELINE]) * 1.5 + 0.1 + _above(shape)
    width, height = max(4.6, panels_across * (panel_width + 0.2) + 1.2), panels_down * (panel_height + 0.2) + 1.35
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set(xlim=(0, width), ylim=(height, 0))
    canvas.set_axis_off()
    canvas.text(0.25, 0.4, _title(shape), fontsize=13, weight="bold", va="center")
    for i, block in enumerate(blocks):
        x = 1.1 + (i % panels_across) * (panel_width + 0.2)
        y = 0.75 + (i // panels_across) * (panel_height + 0.2)
        _box(canvas, x, y, panel_width, panel_height, "#f6f7f9", "#b8bfc9", rounding=0.12)
        heading = _heading(shape, block, always=_block_axes()[0])
        heading = f"…   {heading}" if _gap(shape, blocks, i, _block_axes()) else heading
        canvas.text(x + 0.18, y + 0.22, heading, fontsize=9.5, weight="bold", va="center", color="#333a44")
        if i % panels_across == 0 and shape[PIPELINE] > 1:
            _stages(canvas, y + _above(shape), shown[PIPELINE])
        _cards(canvas, x, y, shape, block, shown[PIPELINE], across)
    canvas.text(0.25, height - 0.3, _note(shape), fontsize=8, va="center", color="#4a525e")
    return figure


def _note(shape: Mapping[str, int]) -> str:
    """Returns the caption of the figure, which explains the filled slices on the cards."""
    into = [f"{axis} into {'rows' if axis in storage_axes() else 'columns'}" for axis in _weight_axes()
            if shape[axis] > 1]  # fmt: skip
    split = f" Weights are split by {' and by '.join(into)}." if into else ""
    sequences = [axis for axis in sequence_axes() if shape[axis] > 1]
    down = f" The batch is split by {' and '.join(sequences)} into rows: parts of each sequence." if sequences else ""
    return f"Filled: the parts on this device.{split}{down}"


def _above(shape: Mapping[str, int]) -> float:
    """Returns the height in inches above the cards of a panel, for its title and the labels of its columns.

    The label of a column with three or more axes has a line for each axis.
    """
    num_axes = sum(shape[axis] > 1 for axis in _weight_axes())
    return LABEL + (0.14 * (num_axes - 1) if num_axes > 2 else 0)


def _stages(canvas: "Axes", y: float, stages: Sequence[int]) -> None:
    """Draws the labels of the stages to the left of a row of panels.

    Args:
      canvas: the axes of the figure, in inches.
      y: the top of the first row of cards.
      stages: the indices of the drawn stages.
    """
    for j, p in enumerate(stages):
        before = "…\n" if j > 0 and p != stages[j - 1] + 1 else ""
        canvas.text(0.98, y + j * 1.5 + 0.65, f"{before}{PIPELINE} {p}", fontsize=9, ha="right", va="center")


def _cards(
    canvas: "Axes",
    x: float,
    y: float,
    shape: Mapping[str, int],
    block: Mapping[str, int],
    stages: Sequence[int],
    across: Sequence[Mapping[str, int]],
) -> None:
    """Draws the cards of one panel, and the headings of its columns.

    Args:
      canvas: the axes of the figure, in inches.
      x: the left end of the panel.
      y: the top of the panel.
      shape: axis -> its size.
      block: axis -> the index of the panel's block.
      stages: the indices of the drawn stages, which are the rows.
      across: the positions along the weight axes, which are the columns.
    """
    top = y + _above(shape)
    for k, at in enumerate(across):
        left = x + 0.2 + k * 1.12
        heading = _heading(shape, at)
        heading = heading.replace(", ", "\n") if _above(shape) > LABEL else heading
        canvas.text(left + 0.5, top - 0.08, heading, fontsize=8, ha="center", va="bottom")
        for j, p in enumerate(stages):
            _card(canvas, left, top + j * 1.5, shape, {**block, PIPELINE: p, **at})


def _box(
    canvas: "Axes", x: float, y: float, width: float, height: float, face: str, edge: str, rounding: float = 0.0
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
    canvas.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=0.8)
    )


def _card(canvas: "Axes", x: float, y: float, shape: Mapping[str, int], at: Mapping[str, int]) -> None:
    """Draws one device: its shard of the batch on top, its layers on the left, its shard of weights on the right.

    Args:
      canvas: the axes of the figure, in inches.
      x: the left end of the card.
      y: the top of the card.
      shape: axis -> its size.
      at: axis -> the index of the device.
    """
    stage = at[PIPELINE]
    paper, ink = STAGE_COLOURS[stage % len(STAGE_COLOURS)], SLICE_COLOURS[stage % len(SLICE_COLOURS)]
    _box(canvas, x + 0.05, y + 0.05, 1.0, 1.36, "#c9ced6", "#c9ced6", rounding=0.08)
    _box(canvas, x, y, 1.0, 1.36, paper, ink, rounding=0.08)
    canvas.text(x + 0.5, y + 0.17, f"device {_index(shape, at)}", fontsize=8.5, ha="center", va="center", color="#222")
    for left, below, word in ((0.5, 0.56, "batch"), (0.22, 1.28, "layers"), (0.66, 1.28, "weights")):
        canvas.text(x + left, y + below, word, fontsize=7.5, ha="center", va="center", color="#4a525e")
    rows = storage_axes()
    columns = tuple(axis for axis in _weight_axes() if axis not in rows)
    batch, tokens, stages, down, across = (
        (num_parts(names, shape), _index(shape, at, names))
        for names in (batch_axes(), sequence_axes(), (PIPELINE,), rows, columns)
    )
    for frame, (num_rows, row), (num_columns, column) in (
        ((x + 0.12, y + 0.32, 0.76, 0.16), tokens, batch),
        ((x + 0.12, y + 0.66, 0.2, 0.54), stages, (1, 0)),
        ((x + 0.44, y + 0.66, 0.44, 0.54), down, across),
    ):
        _slices(canvas, frame, (num_rows, num_columns), (row, column), ink)


def _slices(
    canvas: "Axes", frame: tuple[float, float, float, float], grid: tuple[int, int], own: tuple[int, int], ink: str
) -> None:
    """Draws a rectangle that is divided into rows and columns, with one piece filled.

    Args:
      canvas: the axes of the figure, in inches.
      frame: left end, top, width and height of the rectangle.
      grid: the numbers of rows and columns.
      own: the row and the column of the filled piece.
      ink: the colour of the filled piece.
    """
    x, y, width, height = frame
    (num_rows, num_columns), (row, column) = grid, own
    _box(canvas, x, y, width, height, "white", "#8c95a3")
    piece_width, piece_height = width / num_columns, height / num_rows
    _box(canvas, x + column * piece_width, y + row * piece_height, piece_width, piece_height, ink, ink)
    # With more than 16 pieces the lines would cover the pieces.
    if num_columns <= 16:
        canvas.vlines([x + i * piece_width for i in range(1, num_columns)], y, y + height, "#8c95a3", linewidth=0.6)
    if num_rows <= 16:
        canvas.hlines([y + i * piece_height for i in range(1, num_rows)], x, x + width, "#8c95a3", linewidth=0.6)
