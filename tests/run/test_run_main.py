"""A run, seen from outside: what it writes, what it says, how often it compiles, how it ends."""

import contextlib
import importlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

import meshtrain
from meshtrain import errors, explain
from meshtrain.checkpoint.other_runs import find
from meshtrain.cli.flags import load
from meshtrain.config import mesh_checks
from meshtrain.config.resolve import parse
from meshtrain.config.resume import from_json
from meshtrain.main import main
from meshtrain.models.task import TAKEN
from meshtrain.plan import __main__ as plan
from meshtrain.run import existing_run
from meshtrain.sharding.rules import AXES

ROOT = pathlib.Path(__file__).parents[2]
FSDP = ("mesh.fsdp=2",)


def test_a_run_leaves_what_outside_programs_read(straight):
    names = {path.name for path in straight.directory.iterdir()}
    files = {"config.json", "corpus.json", "device.json", "layout.txt", "metrics.jsonl", "samples.txt", ".lock"}
    assert names == files | {"tensorboard", "checkpoints"}
    config = from_json((straight.directory / "config.json").read_text())
    assert (config.mesh.fsdp, config.num_steps) == (2, 10)
    layout = (straight.directory / "layout.txt").read_text()
    for path, leaf in jax.tree_util.tree_leaves_with_path(straight.result.state):
        assert jax.tree_util.keystr(path, simple=True, separator="/") in layout
        assert leaf.sharding.mesh.shape["fsdp"] == 2
    with find(straight.directory) as checkpoints:
        assert checkpoints.steps() == [10], "the last step saves, whatever the interval"
    assert list((straight.directory / "tensorboard").iterdir())


def test_a_tasks_metric_hides_no_column(straight):
    columns = {name for row in straight.rows if "loss" in row for name in row}
    assert columns <= {*TAKEN, "tokens", "tokens_per_second"}


def test_it_records_what_a_device_holds(straight):
    facts = json.loads((straight.directory / "device.json").read_text())
    assert facts["mesh"] == dict.fromkeys(AXES, 1) | {"fsdp": 2}
    assert facts["device"] == "cpu"
    leaves = jax.tree.leaves(straight.result.state.params)
    assert facts["parameters_bytes"] == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert facts["moments_bytes"] >= 2 * facts["parameters_bytes"], "Adam has two"
    assert facts["peak_bytes"] > facts["temporary_bytes"] > facts["gradients_bytes"] == facts["parameters_bytes"]
    assert facts["batch_bytes"] == 5 * 8 * 32 * 4 // 2


def test_each_row_says_what_it_should(straight):
    steps = [row for row in straight.rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 11))
    wanted = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_seconds"}
    for row in steps[1:]:
        assert set(row) >= wanted | {"data_seconds", "data_share"}
        assert all(math.isfinite(row[name]) for name in wanted)
        assert row["tokens"] == row["step"] * 8 * 32
    assert steps[0]["first_step_seconds"] > 0
    assert [row["step"] for row in straight.rows if "eval_loss" in row] == [4, 8, 10]


def test_it_learns(straight):
    losses = list(straight.losses.values())
    assert losses[-1] < losses[0] - 0.3
    evaluated = [row["eval_loss"] for row in straight.rows if "eval_loss" in row]
    assert evaluated[-1] < evaluated[0] - 0.1


def test_it_ends_with_a_summary(straight):
    said = straight.output[straight.output.index("done: step 10") :]
    for words in ("validation loss", "bigram model", "not better", "tokens            2,560", "tokens a second"):
        assert words in said
    assert str(straight.directory) in said
    assert "a sample\n  | def " in said
    sample = (straight.directory / "samples.txt").read_text()
    assert [f"  | {line}" for line in sample.splitlines()] == said[said.index("a sample") :].splitlines()[1:]
    facts = json.loads((straight.directory / "corpus.json").read_text())
    assert 0 < facts["bigram_loss_on_16"] < math.log(257)


def test_phases_print_their_times(straight):
    starts = [line.split()[0] for line in straight.output.splitlines()[:5]]
    assert starts == ["mesh", "data", "init", "compile", "step"]


def test_goodput_counts_from_the_beginning_of_the_program(straight):
    starting = sum(float(line.split()[1]) for line in straight.output.splitlines()[:4])
    last = [row for row in straight.rows if "goodput" in row][-1]
    passed = last["useful_seconds"] / last["goodput"]
    assert starting > 0.5, "imports and compiling took too little time to be missed"
    assert passed > starting + last["useful_seconds"] + straight.rows[0]["first_step_seconds"]
    assert last["timed_steps"] == 9


def test_the_summary_has_the_speed_of_the_whole_run(straight):
    last = [row for row in straight.rows if "goodput" in row][-1]
    [line] = [line for line in straight.output.splitlines() if line.startswith("tokens a second")]
    assert line.split()[-1] == f"{9 * 8 * 32 / last['useful_seconds']:,.0f}"


def test_nothing_is_compiled_after_the_second_evaluation(run, tmp_path):
    """The step is compiled before it is called, the evaluation when it is first needed, and both of them once."""
    happened = []

    def compiled(name, seconds, **_):
        if name == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            happened.append("compiled")

    module = importlib.import_module("meshtrain.observe.trackers")
    original = module.Trackers.write

    def write(self, step, values):
        happened.append(f"{'eval' if 'eval_loss' in values else 'step'} {step}")
        original(self, step, values)

    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Trackers, "write", write)
            ran = run(tmp_path / "run", *FSDP, "eval_every=2", "checkpoint.every=2")
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    assert "compiled" in happened[: happened.index("step 1")]
    in_loop = happened[happened.index("step 1") : happened.index("eval 10")]
    assert "compiled" not in in_loop[: in_loop.index("step 2")]
    assert "compiled" not in in_loop[in_loop.index("step 3") :]
    assert ran.result.assembly.steps.evaluate._cache_size() == 1
    assert ran.result.assembly.steps.train._cache_size() == 0, "compiled ahead, and not again by a call"


def test_shorter_than_its_warm_up_and_its_save_interval(run, tmp_path):
    ran = run(tmp_path / "run", "num_steps=2", "learning_rate.warmup_steps=50", "checkpoint.every=40", "eval_every=0")
    with find(ran.directory) as checkpoints:
        assert checkpoints.steps() == [2]


def test_a_loss_that_is_no_number_ends_the_run_with_3(command, tmp_path, capsys):
    changes = ["learning_rate.peak=1e30", "learning_rate.warmup_steps=0", "log_every=100", "checkpoint.every=1"]
    words = command(tmp_path / "run", *FSDP, *changes, "eval_every=0")
    with pytest.raises(SystemExit) as caught:
        errors.run(lambda: main(words))
    assert caught.value.code == 3
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("meshtrain: stopped: ")
    assert "at step 7; 6 steps in a row were skipped (allowed: guard.max_skipped_in_a_row = 5)" in line
    kept = tmp_path / "run" / "checkpoints"
    assert "; first array that is not finite: gradients/" in line
    assert f"; last good checkpoint: {kept / '1'}; " in line
    with find(kept) as checkpoints:
        assert checkpoints.steps() == [1], "weights that make every step go wrong have replaced good ones"
    rows = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 7]
    assert rows[-1]["skipped_steps"] == 6


def test_sigterm_saves_and_the_same_command_goes_on(command, tmp_path):
    words = command(tmp_path / "run", "num_steps=100000", "eval_every=0", "model.num_layers=1")
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    saved = []
    for number in (signal.SIGTERM, signal.SIGINT):
        program = [sys.executable, "-m", "meshtrain.main", *words]
        process = subprocess.Popen(
            program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if sum(text.startswith("step") for text in said) == 3:
                    process.send_signal(number)
                    break
            _, error = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 75, error
        [line] = error.splitlines()
        assert line.startswith("meshtrain: interrupted: saved at step ")
        assert "the same command resumes" in line
        if saved:
            assert any(text.startswith("restore") and text.endswith(f"step {saved[-1]}\n") for text in said)
            assert f"step {int(saved[-1]) + 1:>6}/100000" in "".join(said)
        saved.append(line.split("step ")[1].split()[0])
    assert int(saved[1]) > int(saved[0])


def test_ctrl_c_during_the_start_ends_at_once_and_leaves_nothing(command, tmp_path):
    words = command(tmp_path / "runs" / "new")
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "meshtrain.main", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.startswith("data"):
                break
        while not (tmp_path / "runs" / "new" / "checkpoints").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)  # initial weights and the step are being compiled
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output) == (75, ""), error
    assert error.splitlines() == [
        "meshtrain: interrupted: before the first step, so nothing is lost; the same command starts the run again"
    ]
    assert not (tmp_path / "runs").exists()


def test_from_a_notebook(config_file, straight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(str(config_file), [])
    config.mesh.fsdp, config.num_steps = 2, 2
    config.learning_rate.name = "constant"
    result = meshtrain.train(config)
    assert result.directory == tmp_path / "runs" / "default"
    assert result.assembly.config.num_steps == 2
    assert result.values["loss"] > 0
    assert result.values["eval_loss"] > 0
    assert result.state.step == 2
    config.mesh.tensr = 2
    with pytest.raises(errors.UserError, match=r"mesh.tensr: unknown key"):
        meshtrain.train(config)


def changed(words):
    config = load(words[0].removeprefix("--config="), [])
    config.mesh.tensor = int(words[1].removeprefix("--config.mesh.tensor="))
    return config


WAYS = {
    "train": lambda words, run: main([*words, f"--workdir={run}"]),
    "notebook": lambda words, run: meshtrain.train(changed(words), run),
    "explain": lambda words, run: explain.main(words),
    "plan": lambda words, run: plan.main([*words, "--cluster=cpu:8"]),
    "weights": lambda words, run: existing_run.assemble_run(parse(words)[0], run, None),
}


@pytest.fixture
def checked(monkeypatch):
    """The meshes whose placement is checked; commands stop where they would open data or compile."""
    meshes, original = [], mesh_checks.weight_problems
    monkeypatch.setattr(mesh_checks, "weight_problems", lambda *given: meshes.append(given[1]) or original(*given))
    monkeypatch.setattr("meshtrain.plan.scheduled_hlo.ends_early", lambda *given: False)
    monkeypatch.setattr("meshtrain.run.existing_run.weights_problems", lambda *given: [])
    for place in ("run.preflight.open_data", "plan.cluster.compile.capture_stderr"):
        monkeypatch.setattr(f"meshtrain.{place}", lambda *given: sys.exit("stopped"))
    return meshes


@pytest.mark.parametrize("way", WAYS)
def test_each_way_checks_a_placement_once_before_data_are_opened(way, checked, config_file, tmp_path):
    words = [f"--config={config_file}", "--config.mesh.tensor=2"]
    with contextlib.suppress(SystemExit):
        WAYS[way](words, tmp_path / "run")
    assert [mesh["tensor"] for mesh in checked] == [2]
    checked.clear()
    with pytest.raises(errors.UserError, match=r"model\.num_heads: got 4 .* mesh\.tensor = 8"):
        WAYS[way]([words[0], "--config.mesh.tensor=-1"], tmp_path / "run")
    assert [mesh["tensor"] for mesh in checked] == [8]


ORDERS = [
    "import meshtrain; train = meshtrain.train",
    "from meshtrain import train",
    "import meshtrain.training; train = meshtrain.train",
    "from meshtrain import Result, default, resolve, train",
    "from meshtrain.training import Result; import meshtrain; train = meshtrain.train",
]


def test_train_is_the_function_in_every_order_of_imports():
    lines = [
        "import sys, types, meshtrain",
        "assert 'jax' not in sys.modules",
        "try: meshtrain.trian",
        "except AttributeError as error: assert \"'meshtrain' has no attribute 'trian'\" in str(error)",
        "else: sys.exit('anything is an attribute')",
    ]
    for order in ORDERS:
        lines += [
            "for name in [n for n in sys.modules if n.split('.')[0] == 'meshtrain']: del sys.modules[name]",
            order,
            "assert isinstance(train, types.FunctionType) and train.__module__ == 'meshtrain.training', train",
        ]
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
