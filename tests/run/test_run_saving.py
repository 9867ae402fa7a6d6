"""The best checkpoints are those of the metric that the configuration names, in the direction that the task states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.checkpoint.retention import checkpoint_steps, read_ratings
from meshtrain.data.dataset import Dataset
from meshtrain.errors import UserError
from meshtrain.models.task import Entry, Task
from meshtrain.options import option
from meshtrain.training import train

GIVEN = {
    "batch_size": 2,
    "num_steps": 4,
    "eval_every": 1,
    "log_every": 1,
    "learning_rate": {"name": "constant", "peak": 0.1, "warmup_steps": 0},
    "optimizer": {"name": "sgd"},
    "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 1},
    "observe": {"progress": False},
}


def line(config, placement):
    """y = w x, whose loss falls with each step; `height` is the loss by another name, of which more is better."""

    def loss(params, batch, rng, train):
        total = jnp.sum((params["w"] * batch["x"] - config.model.height) ** 2)
        return total, jnp.float32(len(batch["x"])), {"height": total, "depth": -total}

    batch = {"x": Entry((config.batch_size,), jnp.float32, ("batch",))}
    return Task(lambda rng: {"w": jnp.zeros(1)}, loss, batch, unit="lines", higher_is_better=("height",))


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the line."""

    height: float = option(1.0, "where the line is at x = 1")


line.options = Options


def points(config):
    return Dataset([{"x": np.float32(1)}] * 4, [{"x": np.float32(1)}] * 4, "points")


def trained(directory, task=line, data=points, **checkpoint):
    given = {**GIVEN, "checkpoint": GIVEN["checkpoint"] | checkpoint}
    return train(given, directory, task, data)


@pytest.mark.parametrize("metric, best", [("eval_loss", 4), ("eval_height", 1), ("eval_depth", 1)])
def test_the_task_states_which_metrics_are_better_higher(metric, best, tmp_path):
    trained(tmp_path, best_metric=metric)
    assert set(checkpoint_steps(tmp_path / CHECKPOINTS)) == {best, 4}
    found = read_ratings(tmp_path / CHECKPOINTS)
    assert [found[step]["eval_height"] for step in (1, 2, 3, 4)] == sorted(
        (values["eval_loss"] for values in found.values()), reverse=True
    )


def test_a_resumed_run_may_compare_another_metric(tmp_path):
    """All metrics of an evaluation are kept, so that checkpoints of before the change count as well."""
    train({**GIVEN, "num_steps": 2, "checkpoint": {"every": 1, "keep_last": 2, "keep_best": 1}}, tmp_path, line, points)
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [1, 2]
    trained(tmp_path, best_metric="eval_height")
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [1, 4]


def without_validation(config):
    return dataclasses.replace(points(config), validation=())


@pytest.mark.parametrize(
    "metric, data, said",
    [
        (
            "height",
            points,
            "checkpoint.best_metric: got 'height'; allowed: eval_loss, eval_depth, eval_height; did you mean "
            "'eval_height'?",
        ),
        ("", points, "checkpoint.best_metric: got ''; allowed: eval_loss, eval_depth, eval_height; nearest: eval_loss"),
        (
            "eval_loss",
            without_validation,
            "checkpoint.keep_best: got 1, but there are no validation examples to compare checkpoints; allowed: 0, "
            "or data with a validation split; nearest: checkpoint.keep_best=0",
        ),
    ],
)
def test_a_metric_that_evaluations_do_not_have_is_one_line(metric, data, said, tmp_path):
    compiled = []

    def note(name, seconds, **what):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(what)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with pytest.raises(UserError) as caught:
            trained(tmp_path / "run", data=data, best_metric=metric)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert caught.value.problems == (said,)
    assert not compiled
    assert not (tmp_path / "run").exists()
