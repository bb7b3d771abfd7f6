"""Summary, and the rows of processes."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hpcrl.observe import live_status
from hpcrl.observe.live_status import LiveStatusReader
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.summary import PAUSE, pace_of, seconds_per_step, summarise
from hpcrl.observe.summary_table import show_summary, summary_rows
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.starts import note
from hpcrl.runtime.memory import resident_with_children
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses
from hpcrl.units import duration, readable_size


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "project" / "run")
    run.path.mkdir(parents=True)
    return run


def evaluated(run: Run, controller: MetricsWriter, version: int, score: float) -> None:
    controller.write(version, {"eval/all/avg_score": score})
    write_json(run.evals_of(version) / "summary.json", {"eval/all/avg_score": score})


def train(run: Run, attempt: int, resume: int, last: int) -> None:
    """Write the metrics of steps `resume` + 1 to `last`: 2 s and 8 samples each."""
    note(run, {"attempt": attempt, "from": f"s{resume:06d}" if resume else None})
    with (
        MetricsWriter(run, "trainer", attempt, resume) as trainer,
        MetricsWriter(run, "controller", attempt, resume) as controller,
    ):
        if resume == 0:
            evaluated(run, controller, 0, 0.25)
        for step in range(resume + 1, last + 1):
            controller.write(step, {"reward/avg_raw_reward": step / 10, "generate/samples": 8})
            trainer.write(step, {"timing/step": 2.0, "throughput/tokens_per_second": 100.0 * step})
        evaluated(run, controller, last, 0.75)
    with MetricsWriter(run, "rollout-0", attempt, resume) as replica:
        replica.write(last, {PAUSE: 0.1})
    with MetricsWriter(run, "rollout-1", attempt, resume) as replica:
        replica.write(last, {PAUSE: 0.3})


def test_the_command_for_curves_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    run, out = Run(tmp_path / "my runs; ls" / "project" / "run"), StringIO()
    run.path.mkdir(parents=True)
    show_summary(run, Console(file=out))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("curves")]
    assert shlex.split(line)[1:] == ["hpcrl", "tensorboard", str(run.path)]


def test_summary_of_a_run_that_was_resumed(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    train(run, 1, 0, 5)
    open_attempt(run, "1.1", ["a"])
    train(run, 2, 3, 6)
    report_outcome(run, 2, "done", "finished", "trainer")
    summary = summarise(run)
    assert (summary.attempts, summary.steps, summary.samples) == (2, 6, 48)
    assert (summary.eval_first, summary.eval_last) == ((0, 0.25), (6, 0.75))
    assert (summary.reward_first, summary.reward_last) == ((1, 0.1), (6, 0.6))
    assert summary.tokens_per_second == pytest.approx(350)
    assert summary.seconds_per_step == 2.0
    assert summary.pause_mean == pytest.approx(0.2)
    assert summary.pause_max == 0.3
    assert 0 < summary.seconds < 60
    rows = dict(summary_rows(summary))
    assert rows["eval score"] == "0.250 (step 0) → 0.750 (step 6)"
    assert rows["outcome"] == "done: finished"
    assert rows["samples"] == "48"
    assert rows["time"].endswith("in 2 attempts")


def test_a_step_that_taught_nothing_has_a_line_with_the_command_that_shows_why(run: Run) -> None:
    """In the table, in the line of a list, and only while the newest step is such."""
    open_attempt(run, "local-1", ["n1"])
    alike = {"reward/trained_groups_without_spread": 1.0, "loss/avg_raw_advantages_abs": 1e-9, "policy/grad_norm": 0.3}
    why = "nothing in step {}: {}; hpcrl samples run shows them"
    steps = {
        "all samples of each group have the same reward": alike,
        "the gradient is 0": {"policy/grad_norm": 0.0},
        "": alike | {"reward/trained_groups_without_spread": 0.9},
        " ": alike | {"loss/avg_raw_advantages_abs": 0.1},
        "  ": alike | {"distillation/divergence": 0.1},
    }
    with MetricsWriter(run, "trainer", 1, 0) as trainer:
        for step, (reason, metrics) in enumerate(steps.items(), 1):
            trainer.write(step, {"timing/step": 2.0} | metrics)
            summary = summarise(run)
            assert summary.learning == (why.format(step, reason) if reason.strip() else "")
            assert dict(summary_rows(summary)).get("learning", "") == summary.learning
            assert ("nothing learned in the last step" in str(summary)) == bool(reason.strip())


def test_summary_of_a_run_that_has_not_begun(run: Run) -> None:
    summary = summarise(run)
    assert (summary.attempts, summary.steps, summary.samples, summary.eval_last) == (0, 0, None, None)
    assert dict(summary_rows(summary)) == {"steps": "0", "time": "0 s"}


def test_the_outcome_of_an_earlier_attempt_is_not_that_of_a_run_that_goes_on(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    report_outcome(run, 1, "interrupted", "preempted", "trainer")
    assert summarise(run).outcome is not None
    open_attempt(run, "1.1", ["a"])
    assert summarise(run).outcome is None


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 53.4, 61, 3723)] == ["0 s", "53 s", "1:01", "1:02:03"]


def test_rows_tell_what_each_process_does(run: Run) -> None:
    reader = LiveStatusReader(run)
    assert reader.read().rows == []
    open_attempt(run, "1.0", ["a"])
    StatusWriter(run, "rollout-0", 1).write("starting engine")
    StatusWriter(run, "trainer", 1).write("loading model")
    assert [(row.process, row.state) for row in reader.read().rows] == [
        ("rollout-0", "starting engine"),
        ("trainer", "loading model"),
    ]
    train(run, 1, 0, 6)
    StatusWriter(run, "rollout-0", 1).write("generating", version=6)
    live = reader.read()
    state, version, memory, host = live.rows[0].text.split(" · ")
    assert (state, version, host) == ("generating", "version 6", socket.gethostname())
    assert memory.endswith("iB")
    assert live.curve == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert (live.is_reward, live.tokens_per_second) == (True, 600.0)


def test_a_slow_start_shows_its_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "_LASTING_S", 0.05)
    open_attempt(run, "1.0", ["a"])
    StatusWriter(run, "rollout-0", 1).write("starting engine")
    reader = LiveStatusReader(run)
    assert "for 0 s" not in reader.read().rows[0].notes
    time.sleep(0.1)
    (row,) = reader.read().rows
    assert (row.state, row.notes[0]) == ("starting engine", "for 0 s")


def test_rows_and_curves_are_those_that_count(run: Run) -> None:
    """The processes of the newest attempt, and no step that it trains again."""
    reader = LiveStatusReader(run)
    open_attempt(run, "1.0", ["a"])
    train(run, 1, 0, 6)
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    StatusWriter(run, "rollout-1", 1).write("generating")
    assert len(reader.read().rows) == 2
    open_attempt(run, "1.1", ["a"])
    train(run, 2, 3, 4)
    StatusWriter(run, "trainer", 2).write("step 5/10", step=5, total=10)
    live = reader.read()
    assert [row.state for row in live.rows] == ["step 5/10"]
    assert live.curve == [0.1, 0.2, 0.3, 0.4]


def test_a_silent_process_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "_SILENT_S", 0.5)
    open_attempt(run, "1.0", ["a"])
    process_status = StatusWriter(run, "trainer", 1)
    process_status.write("step 1/2")
    reader = LiveStatusReader(run)
    assert "silent" not in reader.read().rows[0].text
    time.sleep(0.6)
    assert "silent for" in reader.read().rows[0].text
    assert "silent for" in LiveStatusReader(run).read().rows[0].text, "at the first look too"
    process_status.write("step 2/2")
    assert "silent" not in reader.read().rows[0].text


def test_memory_of_a_process_and_of_those_below_it() -> None:
    alone = resident_with_children(os.getpid())
    command = [sys.executable, "-c", "x = bytearray(1 << 26); print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as below:
        assert below.stdout
        below.stdout.readline()
        assert resident_with_children(below.pid) > 1 << 26
        assert resident_with_children(os.getpid()) > alone + (1 << 26)
        below.communicate(b"\n")
    assert resident_with_children(below.pid) == 0


def steps(*seconds: float, attempt: int = 1, first: int = 1) -> list[tuple[int, int, float]]:
    """Return steps that took these times; when the first one began says nobody."""
    ends = [100.0 * attempt + sum(seconds[: index + 1]) for index in range(len(seconds))]
    return [(attempt, step, end) for step, end in enumerate(ends, first)]


def test_seconds_per_step() -> None:
    assert seconds_per_step([], 5) is None
    assert seconds_per_step(steps(88.7), 5) is None, "it waits for engines to start"
    assert seconds_per_step(steps(88.7, 7.0), 5) == 7.0
    # every other step is followed by an evaluation of 4 s
    assert seconds_per_step(steps(9, 2, 6, 2, 6, 2, 6, 2), 2) == 4.0
    assert seconds_per_step(steps(9, *[2] * 9, 500, *[2] * 9), 2) == 2.0, "one that took long for once"
    again = [*steps(9, 2, 2), *steps(500, 2, 2, attempt=9, first=4)]
    assert seconds_per_step(again, 5) == 2.0, "neither the queue nor the start of an attempt"


def test_the_pace_of_a_run_goes_by_its_evaluations(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    for version in (0, 2, 4):
        write_json(run.eval_summary(version), {"eval/all/avg_score": 0.5})
    assert pace_of(run) is None
    ends = [10.0, 12.0, 18.0, 20.0, 26.0]
    lines = [{"attempt": 1, "step": n, "time": end, "metrics": {"timing/step": 2.0}} for n, end in enumerate(ends, 1)]
    write_text(run.metrics_of("trainer"), "".join(json.dumps(line) + "\n" for line in lines))
    assert pace_of(run) == 4.0


def test_memory_of_an_agent_is_apart_from_that_of_its_processes(run: Run) -> None:
    open_attempt(run, "local-1", ["n1"])
    holds = "held = bytearray(1 << 26); print(flush=True); input()"
    below = subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert below.stdout
        below.stdout.readline()
        StatusWriter(run, "agent-0", 1).write("watching")
    finally:
        below.communicate(b"\n")
    (row,) = LiveStatusReader(run).read().rows
    (status,) = read_process_statuses(run)
    assert status.resident > status.own + (1 << 26)
    assert row.text.startswith(f"watching · {readable_size(status.own)} ({readable_size(status.resident)} with the")
