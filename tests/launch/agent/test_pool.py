"""An element of an elastic pool: its agent over a stand-in for the rollout job, and the end of its batch script."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import RunError
from hpcrl.launch.agent import pool
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.requeue.elastic import AGAIN, current_attempt, unwanted
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import cancel_outcome, open_attempt, outcome_of, read_outcomes, report_outcome
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses
from tests.launch.submit.test_submit import called as hpcrl
from tests.launch.submit.test_submit import nothing_made
from tests.paths import QUICKSTART
from tests.processes import is_gone

GANG, POOL, REPLICA = "7_0", "9", 2
SERVES = """
import os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
(run / f"serves-{os.environ['HPCRL_ATTEMPT']}-{os.environ['HPCRL_REPLICA']}").write_text(str(os.getpid()))
time.sleep(60)
"""


def make_run(tmp_path: Path, rollout: str = SERVES, *settings: str) -> Run:
    run = Run(tmp_path / "run")
    elastic = ["slurm.elastic.replicas=2", *settings]
    write_text(run.config, Config.from_toml([Path(QUICKSTART)], elastic).to_toml())
    write_text(run.token, "secret\n", mode=0o600)
    write_text(run.code / "jobs" / "rollout.py", rollout)
    record(run)
    return run


def record(run: Run, gang: str = GANG, pool: str | None = POOL, **scorer_pools: str) -> None:
    arrays = {"pool": pool, "scorer_pools": scorer_pools}
    write_json(run.submission, {"executor": "slurm", "job_id": gang, **arrays, "submitted": time.time()})


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def end_agent(process: subprocess.Popen[bytes]) -> None:
    """End an agent if it runs; one that is killed leaves its directory."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def element(run: Run, worker: str = f"rollout-{REPLICA}", trouble_s: float = 60.0) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "1",
        "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_LOCALID": "0",
        "SUBMITIT_LOCAL_GLOBALRANK": "0",
        "SUBMITIT_LOCAL_WITH_SHELL": "0",
        "SLURM_ARRAY_JOB_ID": POOL,
    }
    program = (
        "import sys; from hpcrl.launch.agent import agent, patience, pool; "
        f"pool._POLL_S = agent._POLL_S = agent._CONTROL_S = 0.1; patience._TROUBLE_S = {trouble_s}; pool.main(sys.argv[1], sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(run.path), worker]
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        finally:
            end_agent(process)


def serving(run: Run, attempt: int) -> int:
    """Wait for the stand-in of an attempt; return its process."""
    path = run.path / f"serves-{attempt}-{REPLICA}"
    wait_for(lambda: path.exists() and path.read_text(), f"attempt {attempt} is not served")
    return int(path.read_text())


def test_an_element_serves_attempt_after_attempt_until_the_run_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with element(run) as process:
        time.sleep(1)
        open_attempt(run, f"{GANG}.0", ["n1"])
        first = serving(run, 1)
        report_outcome(run, 1, "interrupted", "saved", "agent-0")
        wait_for(lambda: is_gone(first), "the worker of attempt 1 goes on")
        assert process.poll() is None
        open_attempt(run, f"{GANG}.1", ["n1"])
        second = serving(run, 2)
        report_outcome(run, 2, "done", "finished", "agent-0")
        assert process.wait(30) == 0
    assert is_gone(second)
    assert not list(run.endpoints.glob("rendezvous-*")), "it took itself for the first node of the run"


def test_a_file_server_that_is_away_for_a_moment_costs_no_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.submission.unlink()
    run.submission.mkdir()  # which nobody can read, root neither

    def comes_back(_: float) -> None:
        run.submission.rmdir()
        record(run, pool="10")

    monkeypatch.setattr(pool.time, "sleep", comes_back)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", POOL)
    assert pool._serve(run, NodeContext(0, ["n1"], "9_0.0", 0, True), "rollout-2", [], None) == 0
    printed = capsys.readouterr().out
    assert "waiting for the filesystem: " in printed
    assert "nothing to do: the run has another pool" in printed


def test_no_worker_outlives_an_element_whose_file_server_stays_away(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    open_attempt(run, f"{GANG}.0", ["n1"])
    with element(run, trouble_s=0.5) as process:
        worker = serving(run, 1)
        run.outcome(1).mkdir(parents=True)
        assert process.wait(60) == RunError.exit_code
    assert is_gone(worker)


def test_an_element_that_slurm_takes_away_asks_to_be_queued_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    open_attempt(run, f"{GANG}.0", ["n1"])
    with element(run) as process:
        worker = serving(run, 1)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(30) == AGAIN
    assert is_gone(worker)
    assert not run.stop.exists(), "the others go on"
    assert outcome_of(run, 1) is None


def test_an_element_that_waits_for_the_run_leaves_at_once_too(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with element(run) as process:
        wait_for(lambda: read_allocations(run), "it has no record of its node")
        assert read_allocations(run)[0].pool
        process.send_signal(signal.SIGUSR2)
        assert process.wait(10) == AGAIN


@pytest.mark.faults_slow
def test_an_element_whose_run_has_lost_its_first_node_waits_for_the_next_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    open_attempt(run, f"{GANG}.0", ["n1"])
    with socket.create_server(("127.0.0.1", 0)) as controller:
        url = f"http://127.0.0.1:{controller.getsockname()[1]}"
        StatusWriter(run, "controller", 1).write("serving", url=url)
        with element(run) as process:
            worker = serving(run, 1)
            time.sleep(3)
            controller.close()
            wait_for(lambda: is_gone(worker), "its worker goes on")
            time.sleep(2)
            assert process.poll() is None
            assert outcome_of(run, 1) is None
            open_attempt(run, f"{GANG}.1", ["n1"])
            serving(run, 2)


def test_a_replica_that_fails_again_and_again_is_given_up_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, "import sys; sys.exit('EngineError: out of memory')", "slurm.replica_restarts=1")
    open_attempt(run, f"{GANG}.0", ["n1"])
    with element(run) as process:
        assert process.wait(60) == 1
    (process_status,) = [
        process_status
        for process_status in read_process_statuses(run, 1)
        if process_status.process == f"rollout-{REPLICA}"
    ]
    assert process_status.state.startswith("given up: ")
    assert "out of memory" in process_status.state
    assert outcome_of(run, 1) is None


def test_the_connection_on_which_a_replica_was_reported_is_closed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "import sys; sys.exit('EngineError: out of memory')", "slurm.replica_restarts=9")
    open_attempt(run, f"{GANG}.0", ["n1"])
    with socket.create_server(("127.0.0.1", 0)) as controller:
        url = f"http://127.0.0.1:{controller.getsockname()[1]}"
        StatusWriter(run, "controller", 1).write("serving", url=url)
        with element(run) as process:
            controller.settimeout(60)
            request = b""
            while not request:  # it is given 2 s, which pass before it is sent where others have the cores
                connection, _ = controller.accept()
                connection.settimeout(5)
                request = connection.recv(1 << 16)
            with connection:
                assert request.startswith(b"POST /leave")
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                while connection.recv(1 << 16):
                    pass
            assert process.poll() is None, "it goes on without the connection"


def test_an_error_that_concerns_the_run_ends_its_attempt(tmp_path: Path) -> None:
    rollout = "import sys; print('UserCodeError: reward raised ZeroDivisionError', file=sys.stderr); sys.exit(8)"
    run = make_run(tmp_path, rollout)
    open_attempt(run, f"{GANG}.0", ["n1"])
    with element(run):
        wait_for(lambda: outcome_of(run, 1), "no outcome")
    outcome = outcome_of(run, 1)
    assert outcome
    assert (outcome.kind, outcome.host) == ("failed", ""), "no node is to blame"
    assert "UserCodeError: reward raised ZeroDivisionError" in outcome.message


def test_what_ends_a_pool(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert unwanted(run, POOL) is None, "the run has not begun"
    assert unwanted(run, "8") == "the run has another pool, or none any more"
    open_attempt(run, f"{GANG}.0", ["n1"])
    assert unwanted(run, POOL) is None
    report_outcome(run, 1, "failed", "trainer-0: SIGKILL", "agent-0")
    assert unwanted(run, POOL) is None, "the run is requeued"
    cancel_outcome(run, 1)
    assert "cancelled by the user" in (unwanted(run, POOL) or "")
    record(run, "8_0", "10")
    assert unwanted(run, "10") is None, "it was resumed since"
    assert current_attempt(run) is None
    write_json(run.submission, {"executor": "slurm", "job_id": "8_0", "submitted": time.time()})
    assert unwanted(run, "10") is None, "hpcrl submit was killed, and the job found in the queue"
    record(run, "11_0", None)
    assert unwanted(run, "10") == "the run has another pool, or none any more"
    run.config.unlink()
    assert unwanted(run, "10") == "the run is gone"


def test_a_held_run_needs_no_pool(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt in (1, 2, 3):
        open_attempt(run, f"{GANG}.{attempt}", ["n1"])
        report_outcome(run, attempt, "failed", "trainer-0: SIGKILL", "agent-0")
    assert len(read_outcomes(run)) == 3
    assert "crash 3 of 3" in (unwanted(run, POOL) or "")


def test_a_run_that_is_cancelled_in_the_queue_needs_no_pool(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cancel_outcome(run, 0)
    assert "cancelled by the user" in (unwanted(run, POOL) or "")


@contextmanager
def batch_end(tmp_path: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """The end of a batch script, with stand-ins for Slurm's commands that note how they were called."""
    for name in ("scontrol", "scancel"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $@" >> {tmp_path}/called\n')
        program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": POOL,
        "SLURM_ARRAY_TASK_ID": "1",
    }
    with subprocess.Popen([sys.executable, "-m", *command], env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


def called(tmp_path: Path) -> list[str]:
    return (tmp_path / "called").read_text().splitlines() if (tmp_path / "called").exists() else []


@pytest.mark.parametrize("runs", [True, False])
def test_an_element_is_queued_again(tmp_path: Path, runs: bool) -> None:
    run = make_run(tmp_path)
    open_attempt(run, f"{GANG}.0", ["n1"])
    if not runs:
        report_outcome(run, 1, "interrupted", "saved", "agent-0")
    with batch_end(tmp_path, "hpcrl.launch.requeue.elastic", str(run.path), str(AGAIN)):
        wait_for(lambda: len(called(tmp_path)) > 1, f"only {called(tmp_path)}")
    when = "now+2" if runs else "now+5minutes"
    assert called(tmp_path)[:2] == ["scontrol requeue 9_1", f"scontrol update JobId=9_1 StartTime={when}"]


def test_an_element_whose_agent_was_killed_is_queued_again(tmp_path: Path) -> None:
    """Later, by Slurm's own delay: it may be killed each time."""
    run = make_run(tmp_path)
    open_attempt(run, f"{GANG}.0", ["n1"])
    with batch_end(tmp_path, "hpcrl.launch.requeue.elastic", str(run.path), "137") as process:
        wait_for(lambda: called(tmp_path), "nothing was called")
        time.sleep(0.5)
        assert called(tmp_path) == ["scontrol requeue 9_1"]
        assert process.poll() is None, "it waits to be ended"


@pytest.mark.parametrize(("status", "over", "code"), [(0, False, 0), (1, False, 1), (137, True, 0), (AGAIN, True, 0)])
def test_an_element_is_not_queued_again(tmp_path: Path, status: int, over: bool, code: int) -> None:
    run = make_run(tmp_path)
    if over:
        open_attempt(run, f"{GANG}.0", ["n1"])
        report_outcome(run, 1, "done", "finished", "agent-0")
    with batch_end(tmp_path, "hpcrl.launch.requeue.elastic", str(run.path), str(status)) as process:
        assert process.wait(30) == code
    assert called(tmp_path) == []


def test_the_end_of_the_run_takes_its_pool_away(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record(run, f"{POOL}_1", "12")
    open_attempt(run, f"{POOL}_1.0", ["n1"])
    report_outcome(run, 1, "done", "finished", "agent-0")
    write_json(tmp_path / "elements.json", [None, str(run.path)])
    with batch_end(tmp_path, "hpcrl.launch.requeue.epilogue", str(tmp_path / "elements.json"), "0") as process:
        assert process.wait(30) == 0
    assert called(tmp_path) == ["scancel 12"]


def test_a_dry_run_shows_the_pool(tmp_path: Path) -> None:
    settings = [
        "slurm.partition=main",
        "slurm.gpus_per_node=8",
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.tensor_parallel_size=2",
        "slurm.elastic.replicas=5",
        "slurm.elastic.at_once=3",
        "slurm.elastic.partition=spare",
        "slurm.elastic.mem_gb=9",
    ]
    done = hpcrl("submit", QUICKSTART, "--dry-run", "--script", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gang, _, pool = done.stdout.partition("# batch script of the elastic pool")
    assert "--partition=main" in gang
    assert "--gpus-per-node=8" in gang
    for option in (
        "array=0-4%3",
        "partition=spare",
        "gpus-per-node=2",
        "mem=9GB",
        "nodes=1",
        "requeue",
        "dependency=after:",
    ):
        assert f"#SBATCH --{option}" in pool
    assert "elastic: rollout-1, rollout-2, rollout-3, rollout-4, rollout-5, partition spare" in done.stdout


def test_this_machine_has_no_pool(tmp_path: Path) -> None:
    done = hpcrl("submit", QUICKSTART, "--local", "slurm.elastic.replicas=2", cwd=tmp_path)
    assert done.returncode == 3
    assert "slurm.elastic.replicas: this machine has no partitions" in done.stderr
    assert nothing_made(tmp_path)


def numbering_slurm(place: Path) -> str:
    """Write programs of Slurm's that number jobs from 1 and note what is cancelled, as `called` returns it; return a PATH with them."""
    count, noted = place / "count", place / "called"
    programs = {
        "sbatch": f'echo x >> {count}; echo "Submitted batch job $(wc -l < {count})"',
        "scancel": f'echo "scancel $@" >> {noted}',
        "squeue": "true",
        "sacct": "true",
    }
    for name, program in programs.items():
        write_text(place / "bin" / name, f"#!/bin/sh\n{program}\n", mode=0o755)
    return f"{place}/bin:{os.environ['PATH']}"


def test_a_resumed_run_has_a_new_pool_and_not_the_old_one_too(tmp_path: Path) -> None:
    path = numbering_slurm(tmp_path)
    settings = ["trainer.run_name=mine", "slurm.elastic.replicas=2"]
    assert hpcrl("submit", QUICKSTART, *settings, cwd=tmp_path, PATH=path).returncode == 0
    run = Run(tmp_path / "runs" / "quickstart" / "mine")
    first = json.loads(run.submission.read_text())
    assert (first["job_id"], first["pool"]) == ("1_0", "2")
    done = hpcrl("resume", "mine", cwd=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    second = json.loads(run.submission.read_text())
    assert (second["job_id"], second["pool"]) == ("3_0", "4")
    assert called(tmp_path) == ["scancel 2"]
