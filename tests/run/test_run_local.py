"""Runs of groups that train apart, or with late gradients: stopped they go on bitwise, and the anchor is evaluated."""

import json

import jax
import numpy as np
import pytest

from meshtrain import evaluate
from meshtrain.checkpoint.other_runs import restore_params
from meshtrain.errors import UserError
from meshtrain.main import main
from scripts.benchmarks import local_steps

APART = ("local_steps.period=2", "local_steps.groups=2", "mesh.data=2")
STEPS = list(range(1, 11))


@pytest.fixture(scope="module")
def apart(run, tmp_path_factory):
    """Ten steps of two groups without a stop."""
    return run(tmp_path_factory.mktemp("apart") / "run", *APART)


def test_stopped_between_two_outer_steps_it_goes_on_bitwise(apart, run, stopped):
    resumed = run(stopped(*APART), *APART)
    assert "step 5" in resumed.output
    assert resumed.losses == apart.losses
    assert list(resumed.losses) == STEPS
    jax.tree.map(np.testing.assert_array_equal, resumed.result.state, apart.result.state)


def test_the_anchor_is_what_is_evaluated_and_saved_as_the_weights(apart, stopped, command, capsys):
    """The step after the evaluation has moved the groups, and not the anchor."""
    directory = stopped(*APART)
    [logged] = [row["eval_loss"] for row in apart.rows if row["step"] == 4 and "eval_loss" in row]
    assert evaluate.main([f"--workdir={directory}", "--json", "--config.num_eval_batches=2"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["loss"] == pytest.approx(logged, rel=1e-6)
    with pytest.raises(UserError, match=r"local_steps.groups: was 2, now 4"):
        main(command(directory, *APART, "local_steps.groups=4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.fsdp=2", "mesh.tensor=2"),
        ("mesh.data=2", "mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.num_chunks=2"),
    ],
    ids=" ".join,
)
def test_on_another_mesh_it_goes_on_with_the_same_losses(apart, run, stopped, mesh):
    resumed = run(stopped(*APART), *APART[:2], *mesh)
    assert list(resumed.losses) == STEPS
    np.testing.assert_allclose(list(resumed.losses.values()), list(apart.losses.values()), rtol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_waits_is_saved(run, stopped, tmp_path):
    late = ("reduction.name=one_step_late", "mesh.data=2")
    whole, resumed = run(tmp_path / "run", *late), run(stopped(*late), *late)
    assert resumed.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, resumed.result.state, whole.result.state)
    elsewhere = run(stopped(*late), late[0], "mesh.fsdp=2")
    np.testing.assert_allclose(list(elsewhere.losses.values()), list(whole.losses.values()), rtol=1e-5)


@pytest.mark.slow
def test_three_steps_of_the_table_of_kinds(tmp_path, capsys):
    words = ["--steps=3", "--kinds=synchronous,diloco-10", f"--out={tmp_path / 'chart.png'}"]
    small = {"num_layers": 1, "embed_dim": 16, "mlp_dim": 16, "num_heads": 2, "num_kv_heads": 2}
    assert local_steps.main([*words, *(f"--config.model.{name}={size}" for name, size in small.items())]) == 0
    synchronous, diloco = capsys.readouterr().out.splitlines()[2:]
    assert synchronous.startswith("| 0 | synchronous | 3 | 6.0")
    assert diloco.startswith("| 0 | diloco-10 | 0 | 0.0")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


@pytest.mark.slow
def test_all_groups_start_from_the_weights_of_another_run(apart, run, tmp_path):
    changes = (f"init_from={apart.directory}", "num_steps=2", "learning_rate.peak=1e-9", "learning_rate.name=constant")
    begun = run(tmp_path / "run", *APART, *changes, "learning_rate.warmup_steps=0")
    weights, _ = restore_params(apart.directory, None, begun.result.assembly.states.kept.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), begun.result.state.params, weights)
