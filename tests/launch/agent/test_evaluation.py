"""An element of the evaluation job: its agent over a stand-in for the job's process, and the end of its batch script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.config import Config
from hpcrl.controller.evaluation import begin_evaluation
from hpcrl.launch.agent import evaluation
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.requeue import evaluation as requeue_evaluation
from hpcrl.launch.requeue.elastic import AGAIN
from hpcrl.launch.requeue.evaluation import FAILED, describe_waiting, next_start, nothing_to_do, waiting_versions
from hpcrl.observe.conclude import write_summary
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.evaluations import note_generated
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import cancel_outcome, open_attempt, report_outcome
from jobs.evaluation import WaitingVersions
from tests.launch.agent.test_pool import GANG, POOL, end_agent, wait_for
from tests.paths import QUICKSTART
from tests.processes import is_gone

JOB = "12"
WORKS = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
run = Path(sys.argv[1])
(run / "works").write_text(str(os.getpid()))
time.sleep(60)
"""
FAILS = "import sys; print('DataError: no such prompts', file=sys.stderr); sys.exit(4)"


def make_run(tmp_path: Path, program: str = WORKS, *settings: str) -> Run:
    run, asked = Run(tmp_path / "run"), ["slurm.evaluation.when=during", "trainer.eval_interval=2", *settings]
    write_text(run.config, Config.from_toml([QUICKSTART], asked).to_toml())
    write_text(run.code / "jobs" / "evaluation.py", program)
    write_json(
        run.submission,
        {"executor": "slurm", "job_id": GANG, "pool": POOL, "scorer_pools": {}, "evaluation": JOB, "submitted": 0.0},
    )
    open_attempt(run, f"{GANG}.0", ["n1"])
    return run


@contextmanager
def element(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    names = {"LOCAL_JOB_ID": "1", "LOCAL_NTASKS": "1", "LOCAL_LOCALID": "0", "LOCAL_GLOBALRANK": "0"}
    environment = {f"SUBMITIT_{name}": value for name, value in names.items()}
    environment |= {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_WITH_SHELL": "0", "SLURM_ARRAY_JOB_ID": JOB}
    program = "import sys; from hpcrl.launch.agent.evaluation import main; main(sys.argv[1], 0)"
    with subprocess.Popen([sys.executable, "-c", program, str(run.path)], env=os.environ | environment) as process:
        try:
            yield process
        finally:
            end_agent(process)


def test_an_element_that_slurm_takes_away_asks_to_be_queued_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    begin_evaluation(run, 2, 1)
    with element(run) as process:
        wait_for(lambda: (run.path / "works").exists() and (run.path / "works").read_text(), "nothing works", 120)
        worker = int((run.path / "works").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == AGAIN
    assert is_gone(worker)
    assert not run.stop.exists(), "the run goes on"


def test_an_error_of_the_run_ends_an_element(tmp_path: Path) -> None:
    run = make_run(tmp_path, FAILS)
    begin_evaluation(run, 2, 1)
    with element(run) as process:
        assert process.wait(120) == 4
    assert "DataError: no such prompts" in run.log(1, "agent-evaluation-0").read_text()
    assert describe_waiting(run) == "v2: for job 12"


def test_a_file_server_that_is_away_for_a_moment_costs_no_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    recorded = run.submission.read_text()
    run.submission.unlink()
    run.submission.mkdir()  # which nobody can read, root neither

    def comes_back(_: float) -> None:
        run.submission.rmdir()
        write_text(run.submission, recorded)

    monkeypatch.setattr(evaluation.time, "sleep", comes_back)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    assert evaluation.serve(run, 0, NodeContext(0, ["n1"], "11_0.0", 0, True), []) == 0
    printed = capsys.readouterr().out
    assert "waiting for the filesystem: " in printed
    assert "nothing to do: the run has another pool" in printed


def test_checkpoints_that_cannot_be_deleted_change_nothing_about_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, WORKS, "trainer.ckpt_keep_best=eval/all/avg_score")
    report_outcome(run, 1, "done", "finished", "agent-0")
    write_text(run.starts, "damaged\n")
    evaluation._delete_the_rest(run)
    assert "checkpoints that only evaluations needed stay: " in capsys.readouterr().out


def test_a_failure_of_its_own_does_not_end_an_element(tmp_path: Path) -> None:
    run = make_run(tmp_path, FAILS.replace("4)", "7)"), "slurm.replica_restarts=0")
    begin_evaluation(run, 2, 1)
    with element(run) as process:
        assert process.wait(120) == FAILED


def test_damaged_weights_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    begin_evaluation(run, 2, 1)
    note_generated(run, 2, 1, damaged=True)
    assert waiting_versions(run, 0) == []
    assert describe_waiting(run) == "v2 (damaged, left out): for job 12"
    begin_evaluation(run, 2, 2)
    assert waiting_versions(run, 0) == [2], "another attempt may have trained it again"


def test_a_version_at_which_the_job_fails_after_the_end_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job then starts once more, brings what there is to TensorBoard, and ends."""
    run, starts = make_run(tmp_path, WORKS, "slurm.crash_budget=2"), list[str | None]()
    monkeypatch.setattr(requeue_evaluation, "outlive_the_job", lambda: None)
    monkeypatch.setattr(requeue_evaluation, "requeue_this_job", lambda **asked: starts.append(asked["start"]))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", JOB)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    for version in (2, 4):
        begin_evaluation(run, version, 1)
    for _ in range(3):  # the run goes on
        assert requeue_evaluation.main(run, 7, FAILED) == 0
    assert waiting_versions(run, 0) == [2, 4]
    report_outcome(run, 1, "done", "finished", "agent-0")
    for waiting in ([2, 4], [4], [4], []):
        assert requeue_evaluation.main(run, 7, FAILED) == 0
        assert waiting_versions(run, 0) == waiting
    assert describe_waiting(run) == "v2 (failed 2 times, left out), v4 (failed 2 times, left out): for job 12"
    assert starts == ["now+7minutes"] * 7
    assert requeue_evaluation.main(run, 7, FAILED) == 0
    assert len(starts) == 7
    assert "not queued again: finished" in capsys.readouterr().out
    write_json(run.submission, json.loads(run.submission.read_text()) | {"evaluation": "13"})
    assert waiting_versions(run, 0) == [2, 4], "`hpcrl resume` has submitted another job"


def test_the_last_element_brings_scores_to_tensorboard(tmp_path: Path) -> None:
    """The run's own processes are gone."""
    run = make_run(tmp_path)
    with MetricsWriter(run, "evaluation-0", 1, None) as writer:
        writer.write(2, {"eval/all/avg_score": 0.5})
    report_outcome(run, 1, "done", "finished", "agent-0")
    with element(run) as process:
        assert process.wait(120) == 0
    assert list(run.events.glob("events.out.tfevents.*"))


def test_a_version_that_was_trained_again_gets_another_engine(tmp_path: Path) -> None:
    """vLLM keeps the adapter that it has loaded by that number."""
    run = make_run(tmp_path)
    config = attempt_config(run, 1)
    nothing = cast(Any, None)
    waiting = WaitingVersions(run, config, 0, 1, [], nothing, None, None, nothing)
    engine = cast(Any, SimpleNamespace(version=0))
    begin_evaluation(run, 2, 1)
    assert waiting._next(engine) == (2, 1)
    begin_evaluation(run, 2, 2)
    begin_evaluation(run, 4, 2)
    assert waiting._next(engine) is None
    assert waiting_versions(run, 0) == [2, 4]


def test_what_ends_an_element(tmp_path: Path) -> None:
    run = make_run(tmp_path, WORKS, "slurm.evaluation.engines=2")
    assert nothing_to_do(run, JOB, 0) is None, "a version may come"
    report_outcome(run, 1, "interrupted", "saved", "agent-0")
    assert nothing_to_do(run, JOB, 0) is None, "the run waits in the queue"
    assert next_start(run, 1, 7) == "now+7minutes"
    begin_evaluation(run, 2, 1)
    assert (next_start(run, 0, 7), next_start(run, 1, 7)) == ("now+7minutes", "now+2")
    cancel_outcome(run, 1)
    assert "cancelled" in (nothing_to_do(run, JOB, 1) or ""), "it waits in vain"
    open_attempt(run, f"{GANG}.1", ["n1"])
    report_outcome(run, 2, "done", "finished", "agent-0")
    assert nothing_to_do(run, JOB, 0) == "finished", "the version is of the other element"
    assert nothing_to_do(run, JOB, 1) is None, "it waits, though the run is over"
    write_summary(run, 2, {})
    assert nothing_to_do(run, JOB, 1) == "finished"
    assert nothing_to_do(run, "11", 1) == "the run has another pool, or none any more"
    assert nothing_to_do(run, "13", 1) is None, "`hpcrl resume` has submitted it, and is about to record it"
    run.config.unlink()
    assert nothing_to_do(run, JOB, 1) == "the run is gone"
