"""What Slurm answers about nodes that a job would get at once, and about jobs that wait for them."""

from __future__ import annotations

import os
import tempfile
from datetime import datetime
from pathlib import Path

import pytest

from hpcrl.errors import SubmitError
from hpcrl.launch.requeue.room import (
    expected_at_once,
    keep_nodes,
    nodes_of_job,
    others_wait,
    seconds_left,
    starts_at_once,
)
from hpcrl.launch.scheduler import run_slurm

# printed by sbatch of Slurm 22.05
ANSWER = "sbatch: Job 2 to start at {start} using 8 processors on nodes n4 in partition main\n"
PREEMPTS = "sbatch:   Preempts: 1\n"
START = "2026-11-27T23:19:09"
NOW = datetime.fromisoformat(START).timestamp()


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lines: str) -> None:
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_only_a_start_now_that_takes_no_node_from_others_counts() -> None:
    assert expected_at_once(ANSWER.format(start=START), NOW) == "main"
    assert expected_at_once(ANSWER.format(start=START), NOW + 30) == "main", "slurmctld looked a moment ago"
    assert expected_at_once(ANSWER.format(start=START), NOW - 600) is None, "in ten minutes"
    assert expected_at_once(ANSWER.format(start=START) + PREEMPTS, NOW) is None
    assert expected_at_once("sbatch: error: Requested node configuration is not available", NOW) is None
    assert expected_at_once(ANSWER.format(start="Unknown"), NOW) is None


def test_sbatch_is_asked_as_from_a_login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options in the variables of this job would be those of the other one."""
    answer = ANSWER.format(start="$(date +%FT%T)").strip()
    stand_in(
        tmp_path, monkeypatch, "sbatch", f'env > {tmp_path}/env; echo "$@" > {tmp_path}/asked; echo "{answer}" >&2'
    )
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    assert starts_at_once("/runs/script.sh", 2) == "main"
    assert (tmp_path / "asked").read_text() == "--test-only --nodes=2 /runs/script.sh\n"
    environment = (tmp_path / "env").read_text()
    assert "SLURM_CONF=" in environment
    assert "SBATCH_PARTITION" not in environment
    stand_in(tmp_path, monkeypatch, "sbatch", "exit 1")
    assert starts_at_once("/runs/script.sh", 2) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="sbatch was not found"):
        starts_at_once("/runs/script.sh", 2)


def test_jobs_that_wait_for_nodes_of_the_same_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "sinfo", f'echo "$@" > {tmp_path}/asked; printf "main\\nhigh\\nmain\\n"')

    def waiting(*jobs: str) -> bool:
        (tmp_path / "jobs").write_text("".join(f"{job}\n" for job in jobs))
        stand_in(tmp_path, monkeypatch, "squeue", f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/jobs')
        return others_wait(["n1", "n2"], ["7_0", "8_0"])

    assert not waiting()
    own, other = os.getuid(), os.getuid() + 1
    assert not waiting(f"9|{own}|Dependency", f"10_0|{own}|BeginTime", f"11|{own}|JobHeldUser", f"8_0|{own}|Priority")
    assert not waiting(f"12|{other}|QOSMaxJobsPerUserLimit", f"13_1|{own}|JobArrayTaskLimit")
    assert not waiting(f"14|{own}|PartitionNodeLimit", f"15|{own}|QOSMaxNodePerJobLimit"), "they do not start at all"
    assert waiting(f"9|{own}|Dependency", f"10|{other}|Resources")
    assert waiting(f"10_3|{other}|Priority")
    assert waiting(f"12|{own}|QOSMaxJobsPerUserLimit")
    assert waiting(f"7_1|{own}|JobArrayTaskLimit"), "two elements of a sweep would swap places"
    asked = (tmp_path / "asked").read_text()
    assert "-n n1,n2" in asked
    assert "-p high,main" in asked


def test_time_and_nodes_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "squeue", "case $* in *%D*) echo 2;; *) date -d '+1 hour' +%FT%T;; esac")
    assert nodes_of_job("7_0") == 2
    assert 3590 < seconds_left("7_0") < 3605
    stand_in(tmp_path, monkeypatch, "squeue", "true")
    with pytest.raises(SubmitError, match="expected the number of its nodes"):
        nodes_of_job("7_0")
    with pytest.raises(SubmitError, match="expected the end of the job"):
        seconds_left("7_0")


def test_nodes_that_cannot_be_given_back_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, "scontrol", "echo 'job shrink is disabled' >&2; exit 1")
    stand_in(tmp_path, monkeypatch, "squeue", "echo 2")
    assert not keep_nodes("7_0", ["n1"])
    assert "stay in the job: scontrol: job shrink is disabled" in capsys.readouterr().out
    assert keep_nodes("7_0", ["n1", "n2"]), "an error after Slurm took the others"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    assert not keep_nodes("7_0", ["n1"]), "an attempt without room for temporary files still begins"


def test_answers_need_not_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and comments of other people's jobs are bytes."""
    stand_in(tmp_path, monkeypatch, "squeue", r"printf 'jos\351|x\n'")
    assert run_slurm(["squeue"], 0) == "jos\ufffd|x\n"
