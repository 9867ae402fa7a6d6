"""Averages of a run: saved and resumed, begun or left out on resume, and taken by the commands that read weights."""

import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from meshtrain import evaluate, generate, hugging_face
from meshtrain.errors import UserError
from meshtrain.run import evaluation
from meshtrain.run.dataset import open_data
from meshtrain.run.weights import restore_params
from tests.parity.runs import by_path
from tests.run.test_run_resume import FSDP, INTERLEAVED

DECAY = 0.9
AVERAGE = (f"optimizer.average={DECAY}",)
SIX = ("num_steps=6", "learning_rate.decay_steps=10")


@pytest.fixture(scope="module")
def begun(run, stopped):
    """What a resumed run said, and the run: five steps without averages, and one with."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return said, run(stopped(*FSDP), *FSDP, *AVERAGE, *SIX)


def averages(ran):
    return by_path(ran.result.assembly.steps.to_kept(ran.result.state).opt_state.averaged_weights)


def restored(ran, directory, step=None, **chosen):
    return by_path(restore_params(directory, step, ran.result.assembly.states.kept.params, **chosen)[0])


def test_a_run_without_begins_them_at_its_weights_and_saves_them(begun):
    said, ran = begun
    line = (
        "meshtrain: WARNING: optimizer.average: got 0.9, but step 5 has no averages; they start from the weights "
        "of this step"
    )
    assert line in said.getvalue().splitlines()
    before, after, saved = (
        restored(ran, ran.directory, step, averaged=averaged) for step, averaged in ((5, False), (6, False), (6, True))
    )
    for path, average in averages(ran).items():
        np.testing.assert_array_equal(saved[path], average, err_msg=path)
        expected = DECAY * before[path] + (1 - DECAY) * after[path]
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7, err_msg=path)
        assert not np.array_equal(average, before[path]), path


def test_a_run_with_averages_leaves_them_out(begun, run, straight, capsys):
    resumed = run(begun[1].directory, *FSDP)
    line = "meshtrain: WARNING: optimizer.average: got 0.0, but step 6 has averages, which this run ignores"
    assert line in capsys.readouterr().err.splitlines()
    assert resumed.losses == pytest.approx(straight.losses, rel=1e-6)
    ours, theirs = resumed.result.state.opt_state, straight.result.state.opt_state
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


def test_commands_take_averages(begun, tmp_path, capsys):
    ran, ours = begun[1], [f"--workdir={begun[1].directory}", "--step=6", "--weights=average"]
    assembly = ran.result.assembly
    state, corpus = ran.result.state, open_data(assembly.config, assembly.task)
    averaged = dataclasses.replace(state, params=state.opt_state.averaged_weights)
    wanted, last = (evaluation.evaluate(assembly, corpus, one)["eval_loss"] for one in (averaged, state))
    assert evaluate.main([*ours, "--json", "--config.num_eval_batches=2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["weights"], told["all"]["loss"]) == ("average", pytest.approx(wanted, rel=1e-5))
    assert abs(wanted - last) > 1e-3, "the last weights would not be told from averages"
    assert hugging_face.main(["export", *ours, f"--to={tmp_path / 'folder'}"]) == 0
    exported = restored(ran, tmp_path / "folder")
    for path, average in averages(ran).items():
        if path.startswith("layers/"):  # a folder has no rows that pad the vocabulary
            np.testing.assert_array_equal(exported[path], average, err_msg=path)
    assert generate.main([*ours, "--prompt=def", "--num-tokens=4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("def")


def test_a_run_without_averages_has_none_to_take(straight, tmp_path):
    ours = [f"--workdir={straight.directory}", "--weights=average"]
    export = ["export", *ours, f"--to={tmp_path / 'folder'}"]
    for main, words in ((evaluate.main, ours), (generate.main, ours), (hugging_face.main, export)):
        with pytest.raises(UserError) as caught:
            main(words)
        assert str(caught.value) == (
            f"--weights: got average, but step 10 in {straight.directory / 'checkpoints'} has no averages; allowed: "
            "the averages of a run with optimizer.average; nearest: --weights=last"
        )
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_they_move_no_weight_and_go_on_bitwise_on_the_same_mesh_and_in_a_pipeline(run, stopped, straight, tmp_path):
    whole = run(tmp_path / "run", *FSDP, *AVERAGE)
    assert whole.losses == pytest.approx(straight.losses, rel=1e-6)
    same = run(stopped(*FSDP, *AVERAGE), *FSDP, *AVERAGE)
    jax.tree.map(np.testing.assert_array_equal, same.result.state, whole.result.state)
    expected, first = averages(whole), by_path(straight.result.assembly.steps.to_kept(straight.result.state).params)
    for path, average in averages(run(stopped(*FSDP, *AVERAGE), *INTERLEAVED, *AVERAGE)).items():
        np.testing.assert_allclose(average, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)
        assert np.abs(average - first[path]).max() > 1e-4, "the last weights would not be told from averages"


@pytest.mark.slow
def test_a_run_that_begins_with_others_weights_averages_these(run, straight, tmp_path):
    still = ("learning_rate.peak=1e-30", "learning_rate.name=constant", "num_steps=1", "eval_every=0")
    begun = run(tmp_path / "run", *FSDP, *AVERAGE, *still, f"init_from={straight.directory}")
    others = by_path(straight.result.state.params)
    for path, average in averages(begun).items():
        np.testing.assert_array_equal(average, others[path], err_msg=path)
