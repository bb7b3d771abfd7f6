"""TensorBoard shows each step once, whatever happened to the run. Read back with TensorBoard's own accumulator."""

import json
import math
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.tensorboard.event_file import EventFile, rebuild
from hpcrl.observe.tensorboard.follower import Follower
from hpcrl.rundir.layout import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "project" / "run")


def accumulator(run: Run) -> EventAccumulator:
    found = EventAccumulator(str(run.events), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def curve(run: Run, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator(run).Scalars(tag)]


def write(run: Run, process: str, attempt: int, resume: int, steps: range) -> None:
    """Write the value 1000 * attempt + step."""
    with MetricsWriter(run, process, attempt, resume) as writer:
        for step in steps:
            writer.write(step, {"x": 1000 * attempt + step})


def event_files(run: Run) -> list[Path]:
    """Return the event files; the newest has all content, its predecessors are left empty."""
    files = sorted(run.events.iterdir())
    assert all(path.stat().st_size == 0 for path in files[:-1])
    return [path for path in files if path.stat().st_size]


def test_rebuild_gives_every_point_once(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 8))
    write(run, "trainer", 2, 4, range(5, 7))
    write(run, "rollout-0", 2, 4, range(5, 6))
    rebuild(run)
    rebuild(run)
    assert len(event_files(run)) == 1
    assert curve(run, "x") == [(step, 1000 + step) for step in range(1, 5)] + [(5, 2005), (6, 2006)]
    assert curve(run, "x/rollout-0") == [(5, 2005)]


def test_an_open_file_grows_with_the_metrics(run: Run) -> None:
    events = EventFile(run)
    writer = MetricsWriter(run, "trainer", 1, 0)
    for step in range(1, 4):
        writer.write(step, {"x": step, "nan": math.nan})
        events.update()
        assert curve(run, "x") == [(earlier, earlier) for earlier in range(1, step + 1)]
    events.close()
    writer.close()
    assert len(curve(run, "nan")) == 3


def test_a_resume_that_is_noticed_late_removes_what_became_void(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 8))
    events = EventFile(run)
    assert len(curve(run, "x")) == 7
    write(run, "trainer", 2, 4, range(5, 6))
    events.update()
    events.close()
    assert curve(run, "x") == [(1, 1001), (2, 1002), (3, 1003), (4, 1004), (5, 2005)]
    assert len(event_files(run)) == 1


def test_a_value_that_is_reported_again_replaces_the_first(run: Run) -> None:
    events = EventFile(run)
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        writer.write(1, {"x": 1.0, "y": 5.0})
        events.update()
        writer.write(1, {"x": 2.0})
        events.update()
        writer.write(2, {"x": 3.0})
        writer.write(2, {"x": 4.0})
        events.update()
    events.close()
    assert curve(run, "x") == [(1, 2.0), (2, 4.0)]
    assert curve(run, "y") == [(1, 5.0)]


@pytest.mark.parametrize("follower", ["of each attempt", "of the first"])
def test_interrupted_again_before_anything_was_trained(run: Run, follower: str) -> None:
    """What each attempt tells of its interruption is told at one step: the last counts, in an open TensorBoard too."""
    events, shown = None, None
    for attempt in (1, 2, 3):
        if events is None or follower == "of each attempt":
            events = EventFile(run)
        with MetricsWriter(run, "trainer", attempt, 0 if attempt == 1 else 4) as writer:
            if attempt == 1:
                writer.write(4, {"loss": 0.5})
            writer.write(4, {"seconds": attempt})
        events.update()
        shown = shown or accumulator(run)
        shown.Reload()
        assert [(event.step, event.value) for event in shown.Scalars("seconds")] == [(4, attempt)]
        assert curve(run, "seconds") == [(4, attempt)]
        assert curve(run, "loss") == [(4, 0.5)]
    rebuild(run)
    assert curve(run, "seconds") == [(4, 3)]


def test_files_of_a_clock_that_was_ahead_are_replaced_by_a_later_name(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 3))
    rebuild(run)
    (old,) = run.events.iterdir()
    ahead = old.rename(old.with_name(f"events.out.tfevents.{int(time.time()) + 86400}.other"))
    rebuild(run)
    (new,) = event_files(run)
    assert new.name > ahead.name
    assert curve(run, "x") == [(1, 1001), (2, 1002)]


def written_at(run: Run, attempt: int, resume: int, steps: range, clock: float, process: str = "trainer") -> None:
    """Append what an attempt writes, one step in ten seconds of a clock that shows `clock` at first."""
    path = run.metrics_of(process)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"attempt": attempt, "resume": resume}) + "\n")
        for number, step in enumerate(steps):
            value = {
                "attempt": attempt,
                "step": step,
                "time": clock + 10 * number,
                "metrics": {"x": 1000 * attempt + step},
            }
            file.write(json.dumps(value) + "\n")


@pytest.mark.parametrize("live", [False, True])
def test_a_resume_on_a_node_whose_clock_is_behind(run: Run, live: bool) -> None:
    """Ten minutes behind, twice: each step once, in the order of steps also by the clock."""
    written_at(run, 1, 0, range(1, 6), clock=10_000.0)
    written_at(run, 1, 0, range(1, 6), clock=10_001.0, process="rollout-0")
    events = EventFile(run)
    (first,) = event_files(run)
    ahead = first.rename(first.with_name(f"events.out.tfevents.{int(time.time()) + 600}.other"))
    if live:
        events.close()
        events = EventFile(run)  # of the second attempt, before it writes
    written_at(run, 2, 3, range(4, 7), clock=9_430.0)
    written_at(run, 2, 3, range(4, 6), clock=9_431.0, process="rollout-0")
    events.update()
    written_at(run, 3, 5, range(6, 9), clock=8_800.0)
    events.update()
    events.close()
    (last,) = event_files(run)
    assert last.name > ahead.name
    shown = accumulator(run).Scalars("x")
    expected = [1001, 1002, 1003, 2004, 2005, 3006, 3007, 3008]
    assert [(event.step, event.value) for event in shown] == [(value % 1000, value) for value in expected]
    times = [event.wall_time for event in shown]
    assert times == sorted(times)
    assert times[-1] - times[-3] == 20, "within an attempt time passes as it did"
    replica = accumulator(run).Scalars("x/rollout-0")
    assert [event.step for event in replica] == [1, 2, 3, 4, 5]
    assert [event.wall_time for event in replica] == sorted(event.wall_time for event in replica)


def test_what_a_zombie_of_an_older_attempt_writes_is_not_shown(run: Run) -> None:
    zombie = MetricsWriter(run, "trainer", 1, 0)
    for step in range(1, 6):
        zombie.write(step, {"x": 1000 + step})
    events = EventFile(run)
    write(run, "trainer", 2, 3, range(4, 6))
    zombie.write(6, {"x": 1006})
    events.update()
    zombie.write(7, {"x": 1007})
    zombie.close()
    events.update()
    events.close()
    assert curve(run, "x") == [(1, 1001), (2, 1002), (3, 1003), (4, 2004), (5, 2005)]
    rebuild(run)
    assert curve(run, "x") == [(1, 1001), (2, 1002), (3, 1003), (4, 2004), (5, 2005)]


def test_few_empty_files_are_left(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 3))
    for _ in range(30):
        rebuild(run)
    assert len(list(run.events.iterdir())) == 21
    assert curve(run, "x") == [(1, 1001), (2, 1002)]


def test_a_directory_that_was_removed_comes_back(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 3))
    events = EventFile(run)
    for path in run.events.iterdir():
        path.unlink()
    run.events.rmdir()
    events.update()
    events.close()
    assert curve(run, "x") == [(1, 1001), (2, 1002)]


def test_an_accumulator_that_is_open_forgets_what_became_void(run: Run) -> None:
    writer = MetricsWriter(run, "trainer", 1, 0)
    for step in range(4):
        writer.write(step, {"x": 1000 + step})
    first = EventFile(run)
    shown = accumulator(run)
    assert len(shown.Scalars("x")) == 4
    write(run, "trainer", 2, 1, range(2, 3))
    second = EventFile(run)
    writer.write(4, {"x": 1004.0})  # the first attempt is not quite dead
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("x")] == [(0, 1000), (1, 1001), (2, 2002)]
    for _ in range(2):  # two that take the file from each other still agree on its content
        first.update()
        second.update()
        assert curve(run, "x") == [(0, 1000), (1, 1001), (2, 2002)]
    first.close()
    second.close()
    writer.close()


WRITER = """
import sys, time
from pathlib import Path
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.layout import Run
path, attempt, resume = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
writer = MetricsWriter(Run(Path(path)), "trainer", attempt, resume)
for step in range(resume + 1, 10**9):
    writer.write(step, {"x": 1000 * attempt + step, **{f"m/{i}": i for i in range(50)}})
    time.sleep(0.005)
"""
FOLLOWER = """
import sys
from pathlib import Path
from hpcrl.observe.tensorboard.follower import Follower
from hpcrl.rundir.layout import Run
assert not {"torch", "tensorboard"} & set(sys.modules)
with Follower(Run(Path(sys.argv[1])), 0.01):
    sys.stdin.read()
"""


def attempt(run: Run, number: int, resume: int) -> None:
    """Let an attempt write about 30 steps, then kill its writer and its follower with SIGKILL."""
    processes = [
        subprocess.Popen([sys.executable, "-c", FOLLOWER, str(run.path)], stdin=subprocess.PIPE),
        subprocess.Popen([sys.executable, "-c", WRITER, str(run.path), str(number), str(resume)]),
    ]
    try:
        deadline = time.monotonic() + 60
        wanted = 1000 * number + resume + 30
        while not any(value >= wanted for _, value in safe_curve(run)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def safe_curve(run: Run) -> list[tuple[int, float]]:
    """Return what TensorBoard would show now, also while the file is not there yet or being replaced."""
    try:
        return curve(run, "x") if run.events.is_dir() else []
    except (KeyError, FileNotFoundError):
        return []


def test_kill_and_resume_leave_one_complete_curve(run: Run) -> None:
    attempt(run, 1, 0)
    attempt(run, 2, 20)
    rebuild(run)
    points = curve(run, "x")
    steps = [step for step, _ in points]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 50
    assert all(value == (1000 if step <= 20 else 2000) + step for step, value in points)
    assert len(event_files(run)) == 1


def test_a_follower_ends_with_everything_written(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 3))
    with Follower(run, 60.0):
        write(run, "trainer", 1, 0, range(3, 5))
    assert [step for step, _ in curve(run, "x")] == [1, 2, 3, 4]


def test_steps_that_are_written_are_not_kept(run: Run) -> None:
    """The controller held 12 kB for each step, for as long as the run went on."""
    write(run, "trainer", 1, 0, range(0))
    events, names = EventFile(run), [f"policy/loss_metrics/{number}" for number in range(80)]

    def train(steps: range) -> int:
        for step in steps:
            record = {"attempt": 1, "step": step, "time": float(step), "metrics": dict.fromkeys(names, 0.5)}
            with run.metrics_of("trainer").open("a") as file:
                file.write(json.dumps(record) + "\n")
            events.update()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = train(range(1, 11))
        assert (train(range(11, 61)) - before) / 50 < 1000
    finally:
        tracemalloc.stop()
    events.close()
    assert len(curve(run, names[-1])) == 60
