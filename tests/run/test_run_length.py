"""How long a run is: as many epochs as asked for, or until evaluations stop getting better, resumed or not."""

import dataclasses
import json

import numpy as np
import pytest

from meshtrain import explain
from meshtrain.checkpoint.retention import checkpoint_steps
from meshtrain.config.schema import Config
from meshtrain.data.dataset import Dataset
from meshtrain.data.packing import Parts
from meshtrain.errors import UserError
from meshtrain.run.dataset import with_steps
from meshtrain.training import train
from tests.run.test_run_saving import GIVEN, line, points, without_validation

STOPS = {"patience": 3, "metric": "eval_height"}  # which is best at step 1


def trained(directory, data=points, early_stop=STOPS, **changes):
    return train({**GIVEN, "checkpoint": {"keep_last": 9}, "early_stop": early_stop, **changes}, directory, line, data)


def rows(directory):
    found = [json.loads(one) for one in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "eval_height" in row]


def evaluated(directory):
    return [row["step"] for row in rows(directory)]


def test_a_resumed_run_stops_where_one_that_was_never_stopped_does(tmp_path, capsys):
    """The last evaluation before a resume is later than the save of its step: it is made again."""
    whole = trained(tmp_path / "whole", num_steps=8)
    assert int(whole.state.step) == 4
    assert checkpoint_steps(tmp_path / "whole" / "checkpoints") == [4]
    said = capsys.readouterr().out
    best = f"{rows(tmp_path / 'whole')[0]['eval_height']:.6g}"
    assert f"early stop at step 4: eval_height is not better than {best} at step 1 in 3 evaluations\n" in said
    assert "\ndone: step 4\n" in said
    trained(tmp_path / "parts", num_steps=2)
    parts = trained(tmp_path / "parts", num_steps=8)
    assert int(parts.state.step) == 4
    np.testing.assert_array_equal(parts.state.params["w"], whole.state.params["w"])
    assert evaluated(tmp_path / "parts") == evaluated(tmp_path / "whole") == [1, 2, 3, 4]
    again = trained(tmp_path / "whole", num_steps=8)
    assert (int(again.state.step), again.values["eval_height"]) == (4, whole.values["eval_height"])
    assert "early stop at step 4" in capsys.readouterr().out
    on = trained(tmp_path / "whole", num_steps=6, early_stop={**STOPS, "patience": 9})
    assert int(on.state.step) == 6, "patience may grow"


def test_what_cannot_be_waited_for_is_one_line(tmp_path):
    for changes, said in (
        ({"early_stop": {**STOPS, "metric": "eval_hight"}}, "early_stop.metric: got 'eval_hight'; allowed: eval_loss"),
        ({"data": without_validation}, "early_stop.patience: got 3, but there are no validation examples"),
        ({"eval_every": 0}, "early_stop.patience: got 3 with eval_every=0; allowed: an eval_every above 0"),
    ):
        with pytest.raises(UserError) as caught:
            trained(tmp_path / "run", **changes)
        [problem] = caught.value.problems
        assert problem.startswith(said)


def test_epochs_become_steps_before_the_learning_rate_is_made(tmp_path, capsys):
    rate = {"name": "linear", "peak": 0.1, "warmup_steps": 0}
    changes = {"batch_size": 3, "eval_every": 0, "learning_rate": rate}
    given = {**GIVEN, **changes, "num_epochs": 2.0}
    for name in ("num_steps", "checkpoint"):
        del given[name]
    data = lambda config: Dataset(points(config).train, points(config).train[:3], "points")  # noqa: E731
    result = train(given, tmp_path, line, data)
    assert int(result.state.step) == 3, "8 examples, in batches of 3"
    assert "; 3 steps are 2 epochs of 4 examples\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 3
    assert result.values["learning_rate"] == pytest.approx(0.1 / 3 * 0.9 + 0.01, rel=0.05)
    again = train({**given, "num_epochs": 3.0}, tmp_path, line, data)
    assert int(again.state.step) == 4
    with pytest.raises(UserError, match=r"num_epochs: got 3 with num_steps=7; allowed: one of the two options; near"):
        train({**given, "num_epochs": 3.0, "num_steps": 7}, tmp_path, line, data)


def test_a_mixture_has_no_epochs(tmp_path):
    data = dataclasses.replace(points(None), train=Parts({"a": [0] * 6, "b": [0] * 2}, (1, 1)))
    with pytest.raises(UserError, match=r"with weights in data\.path, .*; nearest: num_epochs=0 and num_steps=8"):
        with_steps(Config(num_epochs=2.0, batch_size=2), data)


def test_explain_says_how_many_steps_the_epochs_are(config_file, capsys):
    words = [f"--config={config_file}", "--config.num_steps=300", "--config.num_epochs=2"]
    assert explain.main(words) == 0
    [said] = [one for one in capsys.readouterr().out.splitlines() if "epochs" in one]
    steps, _, examples = said.removeprefix("note         ").partition(" steps are 2 epochs of ")
    assert int(steps) == -(-2 * int(examples.removesuffix(" examples")) // 8)
    with pytest.raises(UserError, match=r"data\.path: got 'nowhere\.txt'"):
        explain.main([*words, "--config.data.path=nowhere.txt"])
