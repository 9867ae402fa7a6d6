"""The watchdog by a clock of ours: what it waits for, and whom it blames."""

import pathlib
import subprocess
import sys
import time

import pytest

from meshtrain.errors import Interrupted, TrainingStopped, UserError
from meshtrain.launch import peers
from meshtrain.launch.watchdog import Watchdog

ROOT = pathlib.Path(__file__).parents[2]


class Clock:
    seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def watchdog(clock, limit_seconds=0.0, num_processes=1):
    return Watchdog(limit_seconds, now=clock, lost_seconds=20.0, num_processes=num_processes)


def after(dog, clock, seconds, each=5.0):
    """What it says once so many seconds have passed, looked at every few."""
    end = clock.seconds + seconds
    while clock.seconds < end:
        clock.seconds = min(end, clock.seconds + each)
        if found := dog.look():
            return found
    return ""


def test_before_the_first_step_nobody_knows_how_long_a_compiler_takes(clock):
    assert after(watchdog(clock), clock, 100_000) == ""


def test_the_limit_is_ten_medians_and_a_minute_at_least(clock):
    dog = watchdog(clock)
    for step, seconds in enumerate([0.1, 0.2, 30.0], 1):
        dog.completed(step, seconds)
    assert dog.limit_seconds() == 60
    for step in range(4, 9):
        dog.completed(step, 9.0)
    assert dog.limit_seconds() == 90
    assert after(dog, clock, 90) == ""
    assert after(dog, clock, 5).startswith("no step for 95 s after step 8 (allowed: 90)")


def test_a_limit_of_ones_own(clock):
    dog = watchdog(clock, 5.0)
    dog.completed(1, None)
    assert dog.limit_seconds() == 5
    assert "no step for 6 s after step 1" in after(dog, clock, 6, each=1)


def test_evaluations_and_saves_have_half_an_hour(clock):
    dog = watchdog(clock, 5.0)
    dog.completed(1, 1.0)
    with dog.longer_limit():
        assert after(dog, clock, 1700) == ""
    assert after(dog, clock, 5) == ""
    with dog.longer_limit():
        assert "(allowed: 1800)" in after(dog, clock, 1900)


def test_a_process_without_a_sign_of_life_is_lost_and_one_that_has_finished_is_not(clock):
    dog = watchdog(clock, num_processes=3)
    for second in range(30):
        clock.seconds += 1
        dog.note({0: f"4 {second}", 1: "3 0", 2: peers.FINISHED})
        if found := dog.look():
            break
    assert found == "process 1 has sent no heartbeat for 21 s"


def test_the_one_that_keeps_the_signs_is_lost_where_it_does_not_answer(clock):
    dog = watchdog(clock, num_processes=2)
    dog.note({0: "1 1", 1: "1 1"})
    assert after(dog, clock, 30).startswith("process 0 has sent no heartbeat for")


def test_the_processes_that_are_behind_are_named(clock):
    dog = watchdog(clock, 5.0, num_processes=3)
    dog.completed(7, 1.0)
    clock.seconds += 6
    dog.note({0: "7 1", 1: "6 1", 2: "6 1"})
    assert dog.look().endswith("; furthest behind, at step 6: process 1, 2")


def test_who_was_stopped_and_let_go_on_does_not_blame_itself_or_others(clock):
    dog = watchdog(clock, 5.0, num_processes=2)
    dog.completed(7, 1.0)
    dog.note({0: "7 1", 1: "7 1"})
    clock.seconds += 1000
    assert dog.look() == ""


def test_a_hang_ends_the_process_with_4_and_all_stacks():
    code = (
        "import time\nfrom meshtrain.launch.watchdog import Watchdog\n"
        "def stuck():\n    time.sleep(600)\n"
        "with Watchdog(1.5) as dog:\n    dog.completed(3, 0.1)\n    stuck()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 4, done.stderr
    assert "in stuck" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("meshtrain: hang: no step for ")
    assert "after step 3 (allowed: 2)" in last


def test_a_process_that_never_gives_a_sign_is_lost(clock, monkeypatch):
    monkeypatch.setattr(peers, "beat", lambda step: None)
    monkeypatch.setattr(peers, "signs_of_life", lambda: {0: "0 0"})
    monkeypatch.setattr(peers, "say_finished", lambda: None)
    with watchdog(clock, num_processes=2) as dog:
        for second in range(19):
            clock.seconds += 1
            dog.note({0: f"0 {second}"})
        assert dog.lost() == {}
        clock.seconds += 2
        dog.note({0: "0 20"})
        assert list(dog.lost()) == [1]
        assert dog._behind() == "; furthest behind, at step 0: process 0, 1"
        clock.seconds -= 21  # before the thread looks


@pytest.mark.parametrize(("error", "said"), [(Interrupted, 1), (TrainingStopped, 1), (UserError, 0), (OSError, 0)])
def test_only_an_end_that_all_processes_share_is_said(clock, monkeypatch, error, said):
    found = []
    monkeypatch.setattr(peers, "say_finished", lambda: found.append("finished"))
    with pytest.raises(error), watchdog(clock, num_processes=2):
        raise error("it ends")
    assert len(found) == said


def test_its_block_ends_after_the_last_heartbeat(clock, monkeypatch):
    said = []

    def finish():
        time.sleep(0.5)
        said.append("finished")

    monkeypatch.setattr(peers, "say_finished", finish)
    with watchdog(clock, num_processes=2):
        pass
    assert said == ["finished"]


@pytest.mark.parametrize("text", ["abc", "0", "-1", "nan", "inf"])
def test_a_wrong_time_in_the_environment_is_one_line(text, monkeypatch):
    monkeypatch.setenv("MESHTRAIN_LOST_SECONDS", text)
    with pytest.raises(UserError, match=f"MESHTRAIN_LOST_SECONDS: got '{text}'; allowed: .* above 0; nearest: 60"):
        Watchdog(0.0, num_processes=1)
