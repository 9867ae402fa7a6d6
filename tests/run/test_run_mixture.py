"""A run of several sources, with validation files of its own: what it says, writes and keeps, and how it resumes."""

import jax
import numpy as np
import pytest

from meshtrain.data.packing import Parts
from meshtrain.errors import UserError
from meshtrain.evaluate import main as evaluate
from meshtrain.main import main
from meshtrain.report.__main__ import main as report
from meshtrain.run.evaluation import first_validation

FSDP = ("mesh.fsdp=2",)
SEQUENCES = {"web": 200, "code": 4, "web_val": 9, "code_val": 30}  # of 32 tokens


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The changes for three quarters of web and a quarter of code; of 80 samples code has 20, five epochs."""
    folder = tmp_path_factory.mktemp("sources")
    for number, (name, length) in enumerate(SEQUENCES.items()):
        text = "".join(f"{name} {i * i % (7 + number)} " for i in range(8 * length))
        (folder / f"{name}.txt").write_text(text[: 32 * length])  # and the end token
    web, code, web_val, code_val = (f"{folder}/{name}.txt" for name in SEQUENCES)
    return (
        f"data.path={web}:0.75, {code}:0.25",
        f"data.validation_path=web={web_val}, {code_val}",
        "checkpoint.every=4",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=1",
        "checkpoint.best_metric=eval_loss/web",
        "optimizer.name=sgd",
        *FSDP,
    )


@pytest.fixture(scope="module")
def whole(run, mixture, tmp_path_factory):
    return run(tmp_path_factory.mktemp("mixture") / "run", *mixture)


def test_rows_and_lines_say_what_was_drawn_and_scored(whole, capsys):
    drawn = [row for row in whole.rows if "epochs/web" in row]
    assert [row["step"] for row in drawn] == list(range(1, 11))
    for row in drawn:
        assert row["tokens/web"] + row["tokens/code"] == row["tokens"] == 8 * 32 * row["step"]
        assert abs(row["tokens/web"] / 32 - 6 * row["step"]) < 1
        assert row["epochs/code"] == pytest.approx(row["tokens/code"] / 32 / 4)
    evaluations = [row for row in whole.rows if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [4, 8, 10]
    for row in evaluations:  # two batches of eight of each: nine sequences of one, sixteen of the other
        mean = (9 * row["eval_loss/web"] + 16 * row["eval_loss/code_val"]) / 25
        assert row["eval_loss"] == pytest.approx(mean, rel=1e-3), "a mean over tokens, some of which end a document"
        [line] = [line for line in whole.output.splitlines() if f"eval loss {row['eval_loss']:.4f}" in line]
        assert line.endswith(f"  web {row['eval_loss/web']:.4f}  code_val {row['eval_loss/code_val']:.4f}")
    assert "epochs" not in whole.output.partition("done:")[0]
    end = whole.output.partition("done:")[2]
    assert "\nweb               1,920 tokens, 0.30 epochs\ncode              640 tokens, 5.00 epochs\n" in end
    assert f"\nvalidation loss/web {evaluations[-1]['eval_loss/web']:.4f}\n" in end
    assert report([str(whole.directory), f"--html={whole.directory}/page.html"]) == 0
    page = (whole.directory / "page.html").read_text()
    assert "<td>code</td><td>5.00</td><td>640 tokens</td>" in page
    titles = page.replace("\\u002f", "/")  # as JSON in a script has it
    assert "evaluation loss/web" in titles
    assert "epochs/code" not in titles, "a straight line is no panel"


def test_an_evaluation_scores_each_set_as_the_run_did(whole, capsys):
    assert evaluate([f"--workdir={whole.directory}", "--config.num_eval_batches=2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    last = whole.rows[-1]
    wanted = {"web": last["eval_loss/web"], "code_val": last["eval_loss/code_val"], "all": last["eval_loss"]}
    assert {name: float(loss) for name, loss, *_ in rows} == pytest.approx(wanted, abs=1e-4)
    config = whole.result.assembly.config
    file = config.data.path.partition(":")[0]
    assert evaluate([f"--workdir={whole.directory}", f"--config.data.path={file}"]) == 0
    [line] = capsys.readouterr().out.splitlines()[-1:]
    assert line.startswith(file), "the files that are named are scored alone"


def test_the_bigram_model_is_scored_on_what_the_run_is_scored_on(whole):
    numbers = first_validation(whole.result.assembly.config, Parts({"web": range(9), "code": range(30)}))
    assert sorted(numbers[:9]) == list(range(9))
    assert len(set(numbers)) == 25
    assert all(9 <= number < 39 for number in numbers[9:])
    assert "bigram model" in whole.output


def test_a_stopped_run_goes_on_bit_by_bit_and_not_with_other_weights(run, stopped, mixture, whole, command, capsys):
    directory = stopped(*mixture)
    path = mixture[0].replace("0.75", "0.7").replace("0.25", "0.3")
    with pytest.raises(
        UserError, match=r"other weights, .*nearest: another --workdir, with --config.init_from=.*/run "
    ):
        main(command(directory, path, *mixture[1:]))
    capsys.readouterr()
    resumed = run(directory, mixture[0].replace("0.75", "3").replace("0.25", "1"), *mixture[1:])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("meshtrain: WARNING: data.path: code is repeated 5.0 times in num_steps = 10; nearest: ")
    assert resumed.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, resumed.result.state, whole.result.state)


def test_the_best_checkpoint_may_be_that_of_one_set(run, mixture, tmp_path, whole):
    losses = {row["step"]: row["eval_loss/web"] for row in whole.rows if "eval_loss" in row}
    kept = {int(path.name) for path in (whole.directory / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {10, min(losses, key=losses.__getitem__)}
    wrong = [change.replace("eval_loss/web", "eval_loss/wed") for change in mixture]
    with pytest.raises(
        UserError, match=r"allowed: eval_loss, eval_loss/web, eval_loss/code_val; did you mean 'eval_loss/web'"
    ):
        run(tmp_path / "run", *wrong)
