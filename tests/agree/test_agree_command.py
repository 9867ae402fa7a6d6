"""The command: agreement, planted mistakes, records, and one line for each wrong argument."""

import contextlib
import io
import json
import subprocess
import sys

import jax
import pytest

from meshtrain.agree import comparison, covering, sides
from meshtrain.agree.__main__ import main
from meshtrain.errors import UserError
from meshtrain.sharding.rules import AXES
from tests.agree.conftest import ROOT

DATA, CUBE = {"data": 4}, {"data": 2, "fsdp": 2, "tensor": 2}
SIDES = {}  # task -> what one device computes, shared by the tests of this file


def shape_of(axes):
    return dict.fromkeys(AXES, 1) | axes


def reference(config, dataset):
    """The side of one device and its yardstick, without training steps."""
    if config.task not in SIDES:
        one = covering.one_device(config)
        programs = sides.programs(one.config, one.shape, jax.devices())
        side = sides.run(programs, dataset, 0)
        SIDES[config.task] = side, comparison.figures(sides.run(programs, dataset, 0, nudges=True), side)
    return SIDES[config.task]


def excess(config, dataset, axes):
    side, rounding = reference(config, dataset)
    one = covering.case(config, shape_of(axes))
    got = sides.run(sides.programs(one.config, one.shape, jax.devices()), dataset, 0)
    return comparison.beyond(comparison.figures(got, side), rounding)


@pytest.mark.parametrize("axes", [DATA, CUBE])
def test_the_model_without_a_mistake_agrees(configured, dataset, axes):
    assert excess(configured("right"), dataset, axes) == []


# Mistake -> a mesh on which it changes numbers, and the first quantity that differs.
MISTAKES = {
    "psum_twice": ({"tensor": 2}, "loss"),
    "psum_missing": ({"tensor": 2}, "loss"),
    "dropout_one_key": (DATA, "loss"),
    "dropout_by_axis": ({"fsdp": 2, "tensor": 2}, "loss"),
    "dropout_by_place": (DATA, "loss"),
    "mean_of_means": (DATA, "counts"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_user_is_found(configured, dataset, mistake):
    axes, kind = MISTAKES[mistake]
    found = excess(configured(mistake), dataset, axes)
    assert found[0].key[0] == kind, found
    leaves = {one.key[1] for one in found if one.key[0] == "gradient"}
    assert leaves == {"table", "up", "down"}, "all gradients follow from the wrong array"


def run(argv):
    """The exit code and the output of the command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(argv)
    return code, out.getvalue()


def test_the_command_compares_records_and_writes_a_certificate(words, tmp_path):
    path, certificate = str(tmp_path / "one.npz"), tmp_path / "agree.json"
    assert run([*words("right"), "--steps=1", f"--record={path}"])[0] == 0
    code, out = run(
        [*words("right"), "--steps=1", f"--against={path}", "--mesh=data=2,tensor=2", f"--json={certificate}"]
    )
    assert code == 0, out
    assert "data 2 x tensor 2" in out
    assert out.endswith(f"agrees: 1 side, {out.split()[-2]} figures\n")
    content = json.loads(certificate.read_text())
    [side] = content["sides"]
    assert (content["agrees"], side["verdict"], side["mesh"]) == (True, "agrees", {"data": 2, "tensor": 2})
    assert side["worst"]["gradient"]["value"] < 5e-6
    assert {"jax", "config_sha256", "sources", "platform", "cuts"} <= content.keys()
    with pytest.raises(UserError, match=r"^task: got 'tests.agree.mistakes:mean_of_means', but "):
        main([*words("mean_of_means"), "--steps=1", f"--against={path}"])
    with pytest.raises(UserError, match=r"^--steps: got 2; allowed: the number of steps in the record; nearest: 1$"):
        main([*words("right"), "--steps=2", f"--against={path}"])


@pytest.mark.slow
def test_a_mistake_may_change_no_number_on_a_mesh(configured, dataset):
    """The partitioner sees the global batch; only a manual data axis gives each device the same mask."""
    assert excess(configured("dropout_one_key"), dataset, CUBE) == []


@pytest.mark.slow
def test_the_command_names_the_axis_that_differs(words):
    code, out = run([*words("psum_missing"), "--steps=1", "--mesh=data=2,tensor=2"])
    assert code == 1
    assert "\n    data 2: agrees; tensor 2: differs\n" in out
    assert out.endswith("\ndiffers: 1 of 1 sides\n")


@pytest.mark.slow
def test_a_mesh_on_which_the_task_cannot_run_is_a_row(words, monkeypatch):
    def fails(config, placement):
        if placement.mesh is not None and placement.mesh.size > 1:
            raise RuntimeError("not on a mesh\nsecond line")
        return mistakes.make("right")(config, placement)

    from tests.agree import mistakes

    fails.options = mistakes.Options
    monkeypatch.setattr(mistakes, "right", fails)
    code, out = run([*words("right"), "--steps=1", "--mesh=data=2"])
    assert code == 1
    assert "does not run\n    RuntimeError: not on a mesh\n" in out


def test_a_task_that_draws_its_own_random_numbers_is_rejected(words):
    line = r"^task: got 'tests.agree.mistakes:own_randomness', whose initial weights \(\w+\) differ between two runs"
    with pytest.raises(UserError, match=line):
        run([*words("own_randomness"), "--steps=1", "--mesh=data=2"])


WRONG = {
    "--mesh=dta=2": "--mesh: got 'dta'; allowed: data, pipeline, fsdp, expert, context, tensor; did you mean 'data'?",
    "--mesh=data=0": "--mesh: got 'data=0'; allowed: AXIS=SIZE,... with sizes of at least 1; nearest: --mesh=data=2",
    "--mesh=data": "--mesh: got 'data'; allowed: AXIS=SIZE,... with sizes of at least 1; nearest: --mesh=data=2",
    "--mesh=data=16": "mesh: got 16 devices; allowed: at most the 8 available CPU devices; nearest: restart ",
    "--mesh=data=2,pipeline=2": "mesh.pipeline: got 2, but this task has no pipeline stages; allowed: 1; nearest: ",
    "--steps=0": "--steps: got 0; allowed: 1 to 300, the configuration's num_steps; nearest: --steps=1",
    "--steps=x": "--steps: invalid int value: 'x'; allowed: ",
    "--record=a.npz --against=b.npz": "--record: got 'a.npz' together with --against; allowed: --record or ",
    "--record=a.npz --mesh=data=2": "--record: got 'a.npz' together with --mesh; allowed: --record or --mesh, ",
    "--record=a.txt": "--record: got 'a.txt'; allowed endings: .npz; nearest: --record=a.txt.npz",
    "--against=none.npz": "--against: got 'none.npz': nothing there; allowed: a file that --record has written; ",
    "--json=a.txt": "--json: got 'a.txt'; allowed endings: .json; nearest: --json=a.txt.json",
    "--config.reduction.name=int8": "reduction.name: got int8, with which the numbers depend on the number of replicas",
    "--config.model.width=200000": "model: got 134,400,000 parameters, after the cuts; allowed: at most ",
    "--step=2": "arguments: got '--step'; allowed: ",
}


@pytest.mark.parametrize("argv, line", WRONG.items())
def test_a_wrong_argument_is_one_line(words, argv, line):
    with pytest.raises(UserError) as caught:
        main([*words("right"), *argv.split()])
    [problem] = caught.value.problems
    assert str(problem).startswith(line), problem


@pytest.mark.slow
def test_two_processes_agree_with_the_record_of_one_device_and_find_other_initial_weights(words, tmp_path):
    def start(processes, mistake, *more):
        launch = ["launch", f"--processes={processes}", "--", "-m", "meshtrain"] if processes > 1 else []
        command = [sys.executable, "-m", "meshtrain", *launch, "agree", *words(mistake), "--steps=1", *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    for mistake, expected in (("right", 0), ("init_by_process", 1)):
        path = tmp_path / f"{mistake}.npz"
        done = start(1, mistake, f"--record={path}")
        assert done.returncode == 0, done.stderr
        done = start(2, mistake, f"--against={path}", "--mesh=data=2,fsdp=2,tensor=2")
        assert done.returncode == expected, done.stdout + done.stderr
        assert ("initial weights: table: not the same bits" in done.stdout) == bool(expected), done.stdout
