"""A run that was stopped and goes on is the run that was never stopped: on its own mesh bitwise, on others to 1e-5."""

import json

import jax
import numpy as np
import pytest

from meshtrain.checkpoint.other_runs import find, restore_params
from meshtrain.data.loader import batches
from meshtrain.errors import UserError
from meshtrain.main import main
from meshtrain.run import preflight, workdir
from meshtrain.run.dataset import open_data

FSDP = ("mesh.fsdp=2",)
CONTEXT = ("mesh.context=4",)
INTERLEAVED = ("mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.num_chunks=2")
EXPERTS = (
    *(f"model.{name}" for name in ("num_layers=1", "moe.num_experts=8", "moe.expert_dim=16", "moe.router=sigmoid")),
    "learning_rate.name=constant",  # its rates do not depend on the number of steps
    "eval_every=0",
)
STEPS = list(range(1, 11))


def test_it_stops_in_the_middle_and_has_saved(stopped):
    directory = stopped(*FSDP)
    with find(directory) as checkpoints:
        assert checkpoints.steps() == [5]
        text = (checkpoints.directory / "5" / "extra" / "metadata").read_text()
    extra = json.loads(text)
    assert extra["next_sample"] == 5 * 8
    assert extra["config"]["mesh"]["fsdp"] == 2
    assert set(extra["versions"]) >= {"jax"}


def test_on_the_same_mesh_every_number_is_the_same(run, stopped, straight):
    resumed = run(stopped(*FSDP), *FSDP)
    assert "step 5" in resumed.output
    assert resumed.losses == straight.losses
    assert list(resumed.losses) == STEPS
    jax.tree.map(np.testing.assert_array_equal, resumed.result.state, straight.result.state)


@pytest.mark.slow
def test_a_loss_scale_goes_on_where_it_was(run, stopped, tmp_path):
    """The scale is too large, comes down, and grows again: five steps without these memories would go another way.

    That every array of the state comes back is what tests/checkpoint shows faster.
    """
    changes = ("precision.policy=float16", "loss_scale.initial=16777216", "loss_scale.growth_steps=3", *FSDP)
    whole, resumed = run(tmp_path / "run", *changes), run(stopped(*changes), *changes)
    scales = [[row["loss_scale"] for row in ran.rows if "loss" in row] for ran in (whole, resumed)]
    assert scales[0] == scales[1]
    assert len(set(scales[0][5:])) > 1, "a scale that stands still would not be missed"
    skipped = [[row["skipped_steps"] for row in ran.rows if "loss" in row][-1] for ran in (whole, resumed)]
    assert skipped[0] == skipped[1] > 1
    jax.tree.map(np.testing.assert_array_equal, resumed.result.state, whole.result.state)


def test_what_changes_no_number_may_change(run, stopped, straight, corpus, tmp_path):
    """Cut into other parts, read from elsewhere, by a kernel that is named: the same losses, with dropout."""
    moved = tmp_path / "moved.txt"
    moved.write_text(corpus.read_text())
    resumed = run(stopped(*FSDP), *FSDP, "accumulation_steps=2", f"data.path={moved}", "model.attention=xla")
    assert list(resumed.losses) == STEPS
    np.testing.assert_allclose(list(resumed.losses.values()), list(straight.losses.values()), rtol=1e-6)
    assert resumed.losses != straight.losses, "it ran in two parts: the sums are rounded otherwise"


def test_a_pipeline_goes_on_with_what_fsdp_saved(run, stopped, straight):
    resumed = run(stopped(*FSDP), *INTERLEAVED)
    assert list(resumed.losses) == STEPS
    np.testing.assert_allclose(list(resumed.losses.values()), list(straight.losses.values()), rtol=1e-5)
    assert resumed.result.state.params["layers"]["mlp"]["down"].shape[:2] == (2, 2)


def test_fsdp_goes_on_with_what_a_pipeline_saved(run, stopped, straight):
    resumed = run(stopped(*INTERLEAVED), *FSDP)
    np.testing.assert_allclose(list(resumed.losses.values()), list(straight.losses.values()), rtol=1e-5)


def test_one_device_goes_on_with_what_shards_of_sequences_saved(run, stopped, straight):
    resumed = run(stopped(*CONTEXT))
    assert list(resumed.losses) == STEPS
    np.testing.assert_allclose(list(resumed.losses.values()), list(straight.losses.values()), rtol=1e-5)


@pytest.mark.slow
def test_shards_of_sequences_go_on_with_what_one_device_saved(run, stopped, straight):
    resumed = run(stopped(), *CONTEXT)
    assert list(resumed.losses) == STEPS
    np.testing.assert_allclose(list(resumed.losses.values()), list(straight.losses.values()), rtol=1e-5)


@pytest.mark.slow
def test_experts_go_on_on_one_device_and_back_with_their_biases_bit_by_bit(run, tmp_path):
    """Two steps on expert 4, two on one device, two on expert 4 again, against six without a stop."""
    whole = run(tmp_path / "whole", *EXPERTS, "num_steps=6")
    wanted = whole.result.state.params["layers"]["experts"]["router_bias"]
    assert len(np.unique(np.abs(wanted))) > 2, "biases that all moved one way would hide a part that is lost"
    for num_steps, mesh in ((2, "mesh.expert=4"), (4, "mesh.expert=1"), (6, "mesh.expert=4")):
        parts = run(tmp_path / "parts", *EXPERTS, mesh, f"num_steps={num_steps}")
    assert list(parts.losses) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(parts.losses.values()), list(whole.losses.values()), rtol=1e-5)
    np.testing.assert_array_equal(parts.result.state.params["layers"]["experts"]["router_bias"], wanted)


def test_layers_are_kept_in_layer_order(stopped, straight):
    wanted = straight.result.assembly.states.kept.params
    (ours, _), (other, _) = (restore_params(stopped(*mesh), None, wanted) for mesh in (FSDP, INTERLEAVED))
    assert ours["layers"]["mlp"]["down"].shape[0] == 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, other)
    down = np.asarray(ours["layers"]["mlp"]["down"])
    assert np.abs(down[1] - down[2]).max() > 1e-2, "interchanged layers would not be noticed"


def test_the_data_go_on_where_they_stopped(straight):
    assembly = straight.result.assembly
    corpus, seed = open_data(assembly.config, assembly.task), assembly.config.seed
    whole, rest = (batches(corpus.train, batch=assembly.batch, seed=seed, start_step=step) for step in (0, 3))
    seen = [np.asarray(next(whole)["tokens"]) for _ in range(5)]
    np.testing.assert_array_equal(seen[3], next(rest)["tokens"])
    np.testing.assert_array_equal(seen[4], next(rest)["tokens"])
    assert (seen[2] != seen[3]).any()


def test_a_finished_run_says_its_loss_again(run, straight):
    rows = straight.rows
    again = run(straight.directory, *FSDP)
    assert again.rows == rows
    [said] = [line for line in straight.output.splitlines() if line.startswith("validation loss")]
    assert said in again.output


def test_a_run_cannot_go_back(stopped, command):
    with pytest.raises(UserError) as caught:
        main(command(stopped(*FSDP), *FSDP, "num_steps=4"))
    assert str(caught.value) == (
        "num_steps: got 4, but the run in the workdir is at step 5; allowed: at least 5; nearest: 5"
    )


def test_init_from_takes_the_weights_and_nothing_else(run, stopped, straight, tmp_path):
    other = stopped(*INTERLEAVED)
    changes = (f"init_from={other}", "seed=3", "num_steps=1", "learning_rate.warmup_steps=0", "optimizer.name=sgd")
    begun = run(tmp_path / "run", *FSDP, *changes, "learning_rate.peak=1e-9", "learning_rate.name=constant")
    assert f"from {other}" in begun.output
    weights, _ = restore_params(other, None, begun.result.assembly.states.kept.params)
    # The rate is too small to move them: what it has at its end is what it began with.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), begun.result.state.params, weights)
    assert int(begun.result.state.step) == 1
    assert list(begun.losses) == [1]
    # Gone or not, the other run is history once this one has weights of its own.
    other.rename(other.with_name("moved"))
    config = begun.result.assembly.config
    assert preflight.check(config, begun.directory, workdir.newest_step(begun.directory)) == []
    [line] = preflight.check(config, tmp_path / "another", 0)
    assert line.startswith(f"init_from: {other}: got nothing there; allowed: a workdir")


def test_a_run_that_ends_sooner_says_what_its_learning_rate_does(run, stopped, capsys):
    run(stopped(*FSDP), *FSDP, "num_steps=6")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("meshtrain: WARNING: learning rate: 0.0026 at step 5, 0.000695 at step 6: ")


def test_the_data_of_a_run_must_stay_the_same(stopped, command, corpus, written):
    directory = stopped(*FSDP)
    text = corpus.read_text()
    try:
        corpus.write_text(text + "more\n")
        before = written(directory)
        with pytest.raises(UserError, match=r"its run was trained on data with hash .*nearest: another --workdir"):
            main(command(directory, *FSDP, "num_steps=12"))
        assert written(directory) == before
    finally:
        corpus.write_text(text)
