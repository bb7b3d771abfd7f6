"""Summary, live rows and what is printed where there is no terminal."""

import io
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from hpcrl.observe import watch as watch_module
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.summary import PAUSE, summarise
from hpcrl.observe.view import follow, summary_rows
from hpcrl.observe.watch import Watch
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.starts import note
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.units import duration


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


def test_rows_tell_what_each_process_does(run: Run) -> None:
    watch = Watch(run)
    assert [row.text for row in watch.look()] == ["waiting to start"]
    open_attempt(run, "1.0", ["a"])
    assert [row.text for row in watch.look()] == ["starting"]
    StatusWriter(run, "rollout-0", 1).write("starting engine")
    StatusWriter(run, "trainer", 1).write("loading model")
    assert [(row.process, row.text) for row in watch.look()] == [
        ("rollout-0", "starting engine"),
        ("trainer", "loading model"),
    ]
    train(run, 1, 0, 6)
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    StatusWriter(run, "controller", 1).write("serving")
    StatusWriter(run, "rollout-0", 1).write("generating", version=6)
    controller, rollout, trainer = watch.look()
    assert trainer.text == "step 7/10 · reward 0.60 · 2.0 s/step · ETA 8 s"
    assert trainer.share == pytest.approx(0.6)
    assert controller.text == "serving · eval 0.25 (step 0) → 0.75 (step 6)"
    assert rollout.text == "generating · version 6"


def test_the_first_step_of_an_attempt_is_not_its_pace(run: Run) -> None:
    """It waits for engines to start: with it, the time that is left would come out many times too long."""
    open_attempt(run, "1.0", ["a"])
    StatusWriter(run, "trainer", 1).write("waiting for batch", step=1, total=9)
    with MetricsWriter(run, "trainer", 1, 0) as trainer:
        watch = Watch(run)
        trainer.write(1, {"timing/step": 88.7})
        assert [row.text for row in watch.look()] == ["waiting for batch · step 1/9"]
        trainer.write(2, {"timing/step": 7.0})
        assert [row.text for row in watch.look()] == ["waiting for batch · step 1/9 · 7.0 s/step · ETA 49 s"]


def test_a_slow_start_shows_its_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_LASTING_S", 0.05)
    open_attempt(run, "1.0", ["a"])
    StatusWriter(run, "rollout-0", 1).write("starting engine")
    watch = Watch(run)
    assert watch.look()[0].text == "starting engine"
    time.sleep(0.1)
    (row,) = watch.look()
    assert (row.state, row.text) == ("starting engine", "starting engine · for 0 s")


def test_rows_follow_the_newest_attempt(run: Run) -> None:
    watch = Watch(run)
    open_attempt(run, "1.0", ["a"])
    train(run, 1, 0, 6)
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    StatusWriter(run, "rollout-1", 1).write("generating")
    assert len(watch.look()) == 2
    open_attempt(run, "1.1", ["a"])
    train(run, 2, 3, 4)
    StatusWriter(run, "trainer", 2).write("step 5/10", step=5, total=10)
    (trainer,) = watch.look()
    assert trainer.text == "step 5/10 · reward 0.40 · 2.0 s/step · ETA 12 s"


def test_a_silent_process_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_SILENT_S", 0.05)
    open_attempt(run, "1.0", ["a"])
    process_status = StatusWriter(run, "trainer", 1)
    process_status.write("step 1/2")
    watch = Watch(run)
    assert "silent" not in watch.look()[0].text
    time.sleep(0.1)
    assert "silent for 0 s" in watch.look()[0].text
    process_status.write("step 2/2")
    assert "silent" not in watch.look()[0].text


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 53.4, 61, 3723)] == ["0 s", "53 s", "1:01", "1:02:03"]


def test_plain_lines_where_there_is_no_terminal(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    StatusWriter(run, "rollout-0", 1).write("starting [engine]")
    output, over = io.StringIO(), threading.Event()
    console = Console(file=output, width=80)
    thread = threading.Thread(target=follow, args=(run, over.is_set, console))
    thread.start()
    wait_for(lambda: "starting [engine]" in output.getvalue())
    train(run, 1, 0, 6)
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    wait_for(lambda: "step 7/10" in output.getvalue())
    over.set()
    thread.join()
    lines = output.getvalue().splitlines()
    assert sum("starting [engine]" in line for line in lines) == 1
    assert sum("reward 0.60 · 2.0 s/step · ETA 8 s" in line for line in lines) == 1
    assert any("0.250 (step 0) → 0.750 (step 6)" in line for line in lines)
    assert lines[-2] == f"run directory  {run.path}"
    assert lines[-1] == f"curves         tensorboard --logdir {run.tensorboard}"
    assert "\x1b" not in output.getvalue()


def wait_for(condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_live_view_on_a_terminal(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    train(run, 1, 0, 6)
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    code = (
        "import sys, time; from pathlib import Path; from hpcrl.observe.view import follow; from hpcrl.rundir.layout import Run\n"
        "end = time.monotonic() + 1\nfollow(Run(Path(sys.argv[1])), lambda: time.monotonic() > end)\n"
        "assert 'torch' not in sys.modules\n"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while chunk := read(master):
            shown += chunk
    os.close(master)
    assert process.returncode == 0
    text = shown.decode()
    assert text.count("ETA 8 s") >= 2
    assert "eval score" in text


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side has closed
        return b""
