"""Pictures of the mesh, as text and as images."""

import jax
import pytest

from meshtrain.observe.mesh_picture import MAX_DEVICES_SHOWN, mesh_figure, mesh_text
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.rules import AXES
from tests.sharding.conftest import shape_of


def test_a_mesh_in_letters():
    assert mesh_text(shape_of(data=2, pipeline=2, tensor=2)) == (
        "8 devices = data 2 x pipeline 2 x tensor 2\n"
        "\n"
        "data 0: share 1 of 2 of the batch\n"
        "        tensor     0   1\n"
        "    pipeline 0   [0] [1]   layers 1/2\n"
        "    pipeline 1   [2] [3]   layers 2/2\n"
        "\n"
        "data 1: share 2 of 2 of the batch\n"
        "        tensor     0   1\n"
        "    pipeline 0   [4] [5]   layers 1/2\n"
        "    pipeline 1   [6] [7]   layers 2/2\n"
    )


def test_parts_of_sequences_in_letters():
    assert mesh_text(shape_of(fsdp=2, context=4)) == (
        "8 devices = fsdp 2 x context 4\n"
        "\n"
        "data 0: shares 1 to 2 of 2 of the batch, each sequence in 4 parts\n"
        "          fsdp     0   0   0   0   1   1   1   1\n"
        "       context     0   1   2   3   0   1   2   3\n"
        "    pipeline 0   [0] [1] [2] [3] [4] [5] [6] [7]   layers 1/1\n"
    )


def test_a_device_with_a_part_of_each_sequence_has_a_piece_of_the_batch_in_both_directions():
    """Two shares of the batch across, four parts of each sequence down: a piece is an eighth."""
    figure = mesh_figure(shape_of(fsdp=2, context=4))
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    pieces = [at for at in zip(widths, heights, strict=True) if at == pytest.approx((0.38, 0.04))]
    assert len(pieces) == 8
    assert any("by context into rows: parts of each sequence" in text.get_text() for text in figure.axes[0].texts)
    assert not any("parts of each" in text.get_text() for text in mesh_figure(shape_of(data=8)).axes[0].texts)


@pytest.mark.parametrize(("sizes", "labels"), [({"data": 2, "expert": 4}, 0), ({"data": 2, "pipeline": 4}, 4)])
def test_stages_are_named_where_there_is_a_pipeline(sizes, labels):
    texts = mesh_figure(shape_of(**sizes)).axes[0].texts
    assert sum(text.get_text().startswith("pipeline ") for text in texts) == labels
    assert min(text.get_fontsize() for text in texts) >= 7.5, "points: 10 pixels on a page"


def test_labels_of_many_axes_stand_below_each_other():
    texts = [text.get_text() for text in mesh_figure(shape_of(**dict.fromkeys(AXES, 2))).axes[0].texts]
    assert "fsdp 0\nexpert 1\ncontext 0\ntensor 1" in texts
    assert "data 0" in texts, "the first of those for which there is no room"
    assert "fsdp 0, tensor 1" in [text.get_text() for text in mesh_figure(shape_of(fsdp=2, tensor=2)).axes[0].texts]


def test_devices_in_letters_are_those_of_the_mesh():
    sizes = shape_of(data=1, pipeline=2, fsdp=2, tensor=2)
    text = mesh_text(sizes)
    for index in make_mesh(sizes, jax.devices()).devices[0, 1].flat:
        assert f"[{index.id}]" in next(line for line in text.split("\n") if "pipeline 1" in line)
    assert "shares 1 to 2 of 2" in text


def test_a_large_mesh_loses_its_middle():
    text = mesh_text(shape_of(data=64, pipeline=8, tensor=8))
    assert "4096 devices" in text
    assert "[4095]" in text
    assert "..." in text
    assert text.count("[") <= MAX_DEVICES_SHOWN
    assert mesh_text(shape_of(data=8)).count("...") == 0


@pytest.mark.parametrize("sizes", [shape_of(data=2, pipeline=2, tensor=2), shape_of(data=64, fsdp=4, tensor=8)])
def test_a_picture_is_written(tmp_path, sizes):
    path = tmp_path / "mesh.png"
    mesh_figure(sizes).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_card_for_each_device(tmp_path):
    path = tmp_path / "mesh.svg"
    mesh_figure(shape_of(data=2, pipeline=2, tensor=2)).savefig(path)
    text = path.read_text()
    # matplotlib keeps each text as a comment beside its outlines.
    assert [f"<!-- device {i} -->" in text for i in range(9)] == [True] * 8 + [False]
    assert "<!-- tensor 1 -->" in text
    assert "<!-- fsdp 0" not in text
