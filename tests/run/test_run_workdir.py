"""What a run keeps in its folder besides its arrays."""

import json
import time

from meshtrain.run import workdir


def begun(run, logged_seconds=0.0):
    own_seconds = time.monotonic() - 3.0  # this process began three seconds ago
    return own_seconds - workdir.begun_seconds(run, own_seconds, logged_seconds, writes=True)


def test_the_first_process_began_the_run(tmp_path):
    assert begun(tmp_path) == 0.0
    assert abs(json.loads((tmp_path / "corpus.json").read_text())["begun_seconds"] - (time.time() - 3)) < 1


def test_time_between_two_processes_counts(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps({"begun_seconds": time.time() - 103}))
    assert abs(begun(tmp_path) - 100) < 1


def test_a_clock_that_was_set_back_does_not_make_the_run_younger(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps({"begun_seconds": time.time() + 1000}))
    assert begun(tmp_path, logged_seconds=50.0) == 50.0
