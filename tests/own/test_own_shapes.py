"""The docs' example with images: short, learns on two axes from the command line, and the mesh changes nothing."""

import json
import pathlib

import numpy as np

from meshtrain.main import main

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "guide" / "own_images.py"
MOST_LINES = 105
CHANGES = ("observe.progress=no", "observe.tensorboard=no", "log_every=1")


def rows(folder, *changes):
    words = [f"--config.{change}" for change in (*CHANGES, *changes)]
    assert main(["--config=docs/guide/own_images.py", f"--workdir={folder}", *words]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_it_learns_and_one_device_has_the_same_losses(tmp_path):
    both = rows(tmp_path / "both", "num_steps=60")
    layout = (tmp_path / "both" / "layout.txt").read_text()
    [kernel] = [line.split() for line in layout.splitlines() if line.startswith("params/Conv_0/kernel ")]
    assert kernel[-7:] == ["filters", "-", "-", "-", "fsdp", "2.53", "KiB"]
    assert both[-1]["eval_accuracy"] > 0.9
    alone = rows(tmp_path / "alone", "num_steps=3", "mesh.data=1", "mesh.fsdp=1", "accumulation_steps=2")
    losses = [[row["loss"] for row in one if "loss" in row and row["step"] <= 3] for one in (alone, both)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
