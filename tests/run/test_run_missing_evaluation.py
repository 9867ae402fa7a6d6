"""An evaluation that a kill or a signal came before is made when the run resumes, as if nothing had happened."""

import json
import signal
import types

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.retention import RATINGS, checkpoint_steps
from meshtrain.data.dataset import Dataset
from meshtrain.errors import Interrupted
from meshtrain.models.task import Entry, Task
from meshtrain.observe.trackers import Trackers
from meshtrain.run import evaluation, session
from meshtrain.training import train

STEPS = 4


class Killed(BaseException):
    """Ends a run at one place, as a kill would: nothing after it is written but the save in flight."""


def swing(config, placement):
    """A weight that gets worse, then better: the best checkpoint is the first one."""

    def loss(params, batch, rng, train):
        return jnp.sum((params["w"] - 1) ** 2 * batch["x"]), jnp.float32(len(batch["x"])), {}

    batch = {"x": Entry((config.batch_size,), jnp.float32, ("batch",))}
    return Task(lambda rng: {"w": jnp.zeros(1)}, loss, batch, unit="lines")


def points(config):
    """Gradients push the weight away from its goal."""
    return Dataset([{"x": np.float32(-1)}] * 8, [{"x": np.float32(1)}] * 4, "points")


def trained(run, **changes):
    given = {
        "batch_size": 2,
        "num_steps": STEPS,
        "eval_every": 1,
        "log_every": 1,
        "learning_rate": {"name": "constant", "peak": 0.1, "warmup_steps": 0},
        "optimizer": {"name": "sgd"},
        "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 1},
        "observe": {"progress": False, "tensorboard": False},
    }
    return train(given | changes, run, swing, points)


def left(run):
    """What the run leaves: rows without times, ratings, the steps that it has kept."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if key in ("step", "loss", "eval_loss")} for row in rows]
    ratings = json.loads((run / CHECKPOINTS / RATINGS).read_text())
    return [row for row in kept if len(row) > 1], ratings, checkpoint_steps(run / CHECKPOINTS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trained(run := tmp_path_factory.mktemp("straight") / "run")
    assert checkpoint_steps(run / CHECKPOINTS) == [1, STEPS]
    return left(run)


def kill(patch, place, step):
    """Ends the next run at a step: before its evaluation, after the evaluation's row, or by a signal at the step."""

    def dies(*given):
        raise Killed

    if place == "evaluation":
        original = session.evaluate_with_texts
        patch.setattr(
            session, "evaluate_with_texts", lambda *given: (dies if int(given[-1].step) == step else original)(*given)
        )
    elif place == "row":
        write = Trackers.write

        def write_or_die(self, at, row):
            return dies() if at == step and "eval_loss" in row else write(self, at, row)

        patch.setattr(Trackers, "write", write_or_die)
    elif place == "rating":
        rate = Checkpoints.rate
        patch.setattr(Checkpoints, "rate", lambda self, at, row: dies() if at == step else rate(self, at, row))
    else:
        load = session.training_batches

        def signals(*given):
            for number, batch in enumerate(load(*given), 1):
                if number == step:
                    signal.raise_signal(signal.SIGTERM)
                yield batch

        patch.setattr(session, "training_batches", signals)


@pytest.mark.parametrize(
    ("place", "step"),
    [("evaluation", 1), ("row", 3), ("rating", 1), ("signal", 1), ("evaluation", STEPS), ("rating", STEPS)],
)
def test_rows_ratings_and_checkpoints_are_those_of_a_run_that_was_not_interrupted(place, step, straight, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, place, step)
        with pytest.raises((Killed, Interrupted)):
            trained(tmp_path)
    trained(tmp_path)
    assert left(tmp_path) == straight


def test_a_second_kill_in_the_same_evaluation_loses_nothing_either(straight, tmp_path):
    for place in ("evaluation", "row", "rating"):
        with pytest.MonkeyPatch.context() as patch:
            kill(patch, place, 1)
            with pytest.raises(Killed):
                trained(tmp_path)
    for _ in range(2):  # after its end nothing is written twice
        trained(tmp_path)
        assert left(tmp_path) == straight


def test_an_early_stop_counts_the_evaluation(tmp_path):
    stop = {"early_stop": {"patience": 2}}
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, "evaluation", 3)
        with pytest.raises(Killed):
            trained(tmp_path / "killed", **stop)
    for run in (tmp_path / "killed", tmp_path / "straight"):
        assert trained(run, **stop).state.step == 3
    assert left(tmp_path / "killed") == left(tmp_path / "straight")


def test_texts_of_a_step_that_is_evaluated_again_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {})
    for step, text in ((1, "a"), (2, "b"), (3, "c"), (2, "b"), (4, "d")):
        state = types.SimpleNamespace(step=step, params=[("prompt", text)])
        evaluation.evaluate_with_texts(None, None, lambda params: params, tmp_path, str, state)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["text"]) for row in rows] == [(1, "a"), (2, "b"), (4, "d")]


@pytest.mark.parametrize("changes", [{"eval_every": 0}, {"eval_every": 3}])
def test_an_evaluation_that_was_not_due_is_not_made(changes, tmp_path):
    checkpoint = {"checkpoint": {"every": 1, "keep_last": 1}}
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, "signal", 2)
        with pytest.raises(Interrupted):
            trained(tmp_path, **changes, **checkpoint)
    trained(tmp_path, **changes, **checkpoint)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_loss" in row] == ([3, 4] if changes["eval_every"] else [4])
