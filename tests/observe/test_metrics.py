"""Metrics files: half lines, attempts, several processes, growing files."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl import faults as fault
from hpcrl.errors import CommitError
from hpcrl.observe.metrics import MetricsReader, MetricsWriter, merged, read_metrics, values_of
from hpcrl.rundir.layout import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "project" / "run")


def write(run: Run, process: str, attempt: int, resume: int, steps: range, value: float | None = None) -> None:
    with MetricsWriter(run, process, attempt, resume) as writer:
        for step in steps:
            writer.write(step, {f"{process}/x": step if value is None else value})


def curve(run: Run, name: str) -> dict[int, float]:
    return {step: values[name] for step, values in merged(run).items() if name in values}


def test_records_come_back(run: Run) -> None:
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        before = time.time()
        writer.write(1, {"policy/lr": 1e-6, "n": 3})
        writer.write(2, {"nan": math.nan, "inf": math.inf})
    one, two = read_metrics(run)
    assert (one.process, one.attempt, one.step, one.metrics) == ("trainer", 1, 1, {"policy/lr": 1e-6, "n": 3.0})
    assert before <= one.time <= time.time()
    assert math.isnan(two.metrics["nan"])
    assert two.metrics["inf"] == math.inf


def test_a_run_without_metrics_has_none(run: Run) -> None:
    assert read_metrics(run) == []
    assert merged(run) == {}


def test_a_later_attempt_makes_steps_after_its_start_void(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 8), 1.0)
    write(run, "trainer", 2, 4, range(5, 7), 2.0)
    assert curve(run, "trainer/x") == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
    write(run, "trainer", 3, 2, range(3, 4), 3.0)
    assert curve(run, "trainer/x") == {1: 1, 2: 1, 3: 3}
    write(run, "trainer", 4, 3, range(4, 5), 4.0)
    assert curve(run, "trainer/x") == {1: 1, 2: 1, 3: 3, 4: 4}


def test_a_fresh_start_makes_everything_void(run: Run) -> None:
    write(run, "trainer", 1, 0, range(4), 1.0)
    write(run, "trainer", 2, 0, range(1, 2), 2.0)
    assert curve(run, "trainer/x") == {0: 1, 1: 2}


def test_the_start_of_one_process_counts_for_the_files_of_all(run: Run) -> None:
    write(run, "trainer", 1, 0, range(1, 8))
    write(run, "rollout-1", 1, 0, range(1, 8))
    write(run, "trainer", 2, 4, range(5, 6))
    assert set(curve(run, "rollout-1/x/rollout-1")) == {1, 2, 3, 4}


def test_a_dead_writer_that_still_writes_brings_nothing_back(run: Run) -> None:
    zombie = MetricsWriter(run, "trainer", 1, 0)
    zombie.write(4, {"x": 1.0})
    write(run, "trainer", 2, 4, range(5, 6), 2.0)
    zombie.write(5, {"trainer/x": 1.0})
    zombie.close()
    assert curve(run, "trainer/x") == {5: 2.0}


def test_of_what_two_attempts_report_at_one_step_the_last_counts(run: Run) -> None:
    """One is interrupted after step 4; two that go on there are interrupted before they train anything; the older was slow to die."""
    for attempt in (1, 3, 2):
        with MetricsWriter(run, "trainer", attempt, 0 if attempt == 1 else 4) as writer:
            writer.write(4, {"loss": 0.5} if attempt == 1 else {})
            writer.write(4, {"seconds": attempt})
    reports = [(record.attempt, name) for record in read_metrics(run) for name in record.metrics]
    assert reports == [(1, "loss"), (3, "seconds")]
    assert merged(run) == {4: {"loss": 0.5, "seconds": 3.0}}
    assert values_of(run, "seconds") == {4: 3.0}


def test_replicas_do_not_overwrite_each_other(run: Run) -> None:
    for replica in (0, 1):
        with MetricsWriter(run, f"rollout-{replica}", 1, 0) as writer:
            writer.write(3, {"timing/pause": replica})
    assert merged(run)[3] == {"timing/pause/rollout-0": 0.0, "timing/pause/rollout-1": 1.0}


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_half_a_line_swallows_nothing(run: Run, cut: int) -> None:
    write(run, "trainer", 1, 0, range(1, 4))
    path = run.metrics_of("trainer")
    os.truncate(path, path.stat().st_size - cut)
    whole = 2 if cut > 1 else 3  # without its newline the third line is still whole
    write(run, "trainer", 2, 3, range(4, 6))
    assert list(curve(run, "trainer/x")) == [*range(1, whole + 1), 4, 5]


def test_reading_while_a_line_is_being_written(run: Run) -> None:
    reader = MetricsReader(run)
    assert reader.poll() == ([], False)
    write(run, "trainer", 1, 0, range(1, 3))
    assert [record.step for record in reader.poll()[0]] == [1, 2]
    line = json.dumps({"attempt": 1, "step": 3, "time": 0.0, "metrics": {"é": 1.0}}, ensure_ascii=False).encode()
    with run.metrics_of("trainer").open("ab", buffering=0) as file:
        middle = line.index("é".encode()) + 1
        file.write(line[:middle])
        assert reader.poll() == ([], False)
        file.write(line[middle:])
        assert reader.poll() == ([], False)
        file.write(b"\n")
        assert [record.metrics for record in reader.poll()[0]] == [{"é": 1.0}]


def test_the_reader_tells_that_earlier_answers_became_void(run: Run) -> None:
    reader = MetricsReader(run)
    write(run, "trainer", 1, 0, range(1, 6))
    assert reader.poll()[1] is False
    write(run, "trainer", 2, 5, range(6, 7))
    assert reader.poll()[1] is False
    write(run, "trainer", 3, 4, range(5, 6))
    records, outdated = reader.poll()
    assert outdated
    assert [(record.attempt, record.step) for record in records] == [(3, 5)]


def test_a_writer_killed_in_the_middle_loses_only_its_last_line(run: Run) -> None:
    code = (
        "import sys; from pathlib import Path; from hpcrl.observe.metrics import MetricsWriter; from hpcrl.rundir.layout import Run\n"
        "writer = MetricsWriter(Run(Path(sys.argv[1])), 'trainer', 1, 0)\n"
        "for step in range(1, 10**9): writer.write(step, {f'm/{i}': step for i in range(200)})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)])
    deadline = time.monotonic() + 30
    while len(read_metrics(run)) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = [record.step for record in read_metrics(run)]
    assert len(steps) >= 20
    assert steps == list(range(1, len(steps) + 1))
    write(run, "trainer", 2, 10, range(11, 14), 2.0)
    assert curve(run, "trainer/x") == {11: 2.0, 12: 2.0, 13: 2.0}
    assert curve(run, "m/7") == {step: step for step in range(1, 11)}


def test_metrics_need_no_torch() -> None:
    code = "import sys, hpcrl.observe.metrics, hpcrl.observe.summary; assert not {'torch', 'rich', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_full_disk_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        writer.write(1, {"a": 1.0})
        monkeypatch.setattr(fault, "_passed", fault.Counter())
        monkeypatch.setenv("HPCRL_FAULT", "metrics:raise=ENOSPC")
        with pytest.raises(
            CommitError, match=r"trainer\.jsonl could not be written: No space left.* free\).*make room"
        ):
            writer.write(2, {"a": 2.0})
    assert [record.step for record in read_metrics(run)] == [1]
