"""A run whose checkpoints are in a bucket: a machine without any file of it goes on, and only one run writes there."""

import json
import re
import time

import pytest

from meshtrain import evaluate, generate, hugging_face, verify
from meshtrain.checkpoint.other_runs import extra_of_newest
from meshtrain.checkpoint.owner import OWNER
from meshtrain.checkpoint.retention import checkpoint_steps
from meshtrain.errors import UserError
from meshtrain.main import main
from meshtrain.store.buckets import place
from scripts.benchmarks import buckets as program

SAVES = ("checkpoint.every=5", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def bucket(bucket_server):
    return bucket_server.prefix()


@pytest.fixture(scope="module")
def ran(run, bucket, tmp_path_factory):
    """Ten steps with a save after five, in the bucket; and the last save is taken away."""
    found = run(tmp_path_factory.mktemp("first") / "run", "mesh.fsdp=2", f"checkpoint.directory={bucket}", *SAVES)
    (place(bucket) / "10").rmtree()
    return found


def refused(words):
    with pytest.raises(UserError) as caught:
        main(words)
    return caught.value.problems


def test_it_is_the_same_run_as_on_a_disk(ran, straight, bucket):
    assert ran.losses == straight.losses
    assert not (ran.directory / "checkpoints").exists()
    assert not (place(bucket) / OWNER).exists(), "nothing holds it after the end"


def test_another_configuration_other_data_and_another_writer_are_refused(ran, command, bucket, tmp_path, corpus):
    here = f"checkpoint.directory={bucket}"
    assert refused(command(tmp_path / "new", here, "seed=5")) == (
        f"{bucket} contains another run: seed: was 0, now 5",
        f"{bucket}: allowed: the run's own configuration; nearest: another --workdir",
    )
    other = corpus.with_name("other.txt")
    other.write_text(corpus.read_text()[1:])
    [line] = refused(command(tmp_path / "new", here, f"data.path={other}"))
    assert "was trained on data with hash" in line
    [line, _] = refused(command(ran.directory, "checkpoint.directory=gs://runs/elsewhere"))
    assert "checkpoint.directory: was" in line
    (place(bucket) / OWNER).write_text(
        json.dumps({"run": "another", "host": "process 7 on far", "seconds": time.time() - 42})
    )
    [line] = refused(command(tmp_path / "new", here))
    assert re.fullmatch(
        rf"checkpoint.directory: got {bucket}, used by process 7 on far 4\d s ago; allowed: one run in each "
        r"directory; nearest: another directory, or the same directory in 5\d\d s",
        line,
    )
    assert not (tmp_path / "new").exists()
    assert json.loads((place(bucket) / OWNER).read_text())["run"] == "another"


def test_a_machine_without_any_file_goes_on_from_the_bucket_on_another_mesh(ran, run, bucket, tmp_path, capsys):
    silent = {"run": "another", "host": "process 7 on far", "seconds": time.time() - 601}
    (place(bucket) / OWNER).write_text(json.dumps(silent))
    again = run(tmp_path / "run", "mesh.data=2", "mesh.tensor=2", f"checkpoint.directory={bucket}", *SAVES)
    assert f"{bucket}: taken over from process 7 on far, silent for 10 minutes" in capsys.readouterr().err
    assert again.losses == {step: pytest.approx(ran.losses[step], rel=1e-5) for step in range(6, 11)}
    assert checkpoint_steps(place(bucket)) == [5, 10]
    assert extra_of_newest(bucket)["config"]["mesh"]["tensor"] == 2


def test_a_bucket_without_rights_is_refused_before_anything_is_written(bucket_server, command, tmp_path):
    [line] = refused(command(tmp_path / "run", "checkpoint.directory=gs://readonly/run"))
    assert line.startswith("gs://readonly/run: got no permission (Forbidden: ")
    assert line.endswith("; nearest: grant the role storage.objectAdmin on the bucket")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_from_text_in_a_bucket_and_notices_that_an_object_has_changed(
    stopped, straight, run, command, bucket, corpus
):
    directory, changes = stopped("mesh.fsdp=2"), ("mesh.fsdp=2", f"data.path={bucket}-text/*.txt")
    text = place(f"{bucket}-text") / "words.txt"
    text.write_text(corpus.read_text()[1:])
    [line] = refused(command(directory, *changes))
    assert "was trained on data with hash" in line
    text.write_text(corpus.read_text())
    for _ in range(2):  # the second start finds a run that is done
        again = run(directory, *changes)
        assert again.losses.items() <= straight.losses.items()
    text.write_text(corpus.read_text()[1:])
    [line] = refused(command(directory, *changes))
    assert "was trained on data with hash" in line


@pytest.mark.slow
def test_other_commands_read_the_bucket_or_the_workdir_that_names_it(ran, run, bucket, tmp_path, capsys):
    for where in (bucket, str(ran.directory)):
        assert verify.main([where]) == 0
        assert f"{bucket}/5: undamaged" in capsys.readouterr().out
    assert evaluate.main([f"--workdir={bucket}", "--json", "--step=5"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
    assert generate.main([f"--workdir={ran.directory}", "--num-tokens=4", "--temperature=0"]) == 0
    assert hugging_face.main(["export", f"--workdir={bucket}", f"--to={tmp_path / 'export'}"]) == 0
    assert (tmp_path / "export" / "model.safetensors").stat().st_size > 10_000
    tuned = run(tmp_path / "tuned", "num_steps=1", "eval_every=0", f"init_from={bucket}")
    assert f"from {bucket}" in tuned.output
    assert tuned.losses[1] < ran.losses[1]


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_without_a_common_folder_are_killed_and_go_on(bucket_server, tmp_path):
    assert "1 kills of two processes" in program.kills(1, 2.0, tmp_path, bucket_server)
