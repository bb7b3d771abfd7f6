"""Which hosts a requeued job is told to avoid; stand-ins for scontrol and sinfo print what the real ones would."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.launch.requeue import requeue

FREE = "JobId=7 JobName=hpcrl-mine Comment=a=b c ReqNodeList=(null) ExcNodeList=(null) Features=(null) Requeue=1"


@pytest.mark.parametrize(
    ("shown", "hostnames", "avoided"),
    [
        (f"echo '{FREE}'", "exit 1", "n1"),
        (f"echo '{FREE}' | sed 's/ExcNodeList=(null)/ExcNodeList=n[2-3]/'", "echo n2; echo n3", "n1,n2,n3"),
        (f"echo '{FREE}' | sed 's/ExcNodeList=(null)/ExcNodeList=n[2-3]/'", "exit 1", ""),
        (f"echo '{FREE}' | sed 's/ExcNodeList=(null)/ExcNodeList=n[2-5]/'", "echo n2; echo n3; echo n4; echo n5", ""),
        (f"echo '{FREE}' | sed 's/Features=(null)/Features=h100/'", "exit 1", ""),
        (f"echo '{FREE}' | sed 's/ReqNodeList=(null)/ReqNodeList=n1/'", "exit 1", ""),
        ("echo 'Socket timed out' >&2; exit 1", "exit 1", ""),
    ],
)
def test_what_a_job_avoids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, hostnames: str, avoided: str
) -> None:
    """Of five nodes it needs one. The hosts that its user excludes stay excluded, so nothing is where they are not known."""
    for name, body in {
        "scontrol": f"case $2 in job) {shown};; hostnames) {hostnames};; esac",
        "sinfo": "for i in 1 2 3 4 5; do echo n$i; done",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert requeue._avoided("7", ["n1"]) == avoided


def test_a_container_without_slurms_programs_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not requeue._scontrol("requeue", "7_0")
    assert "scontrol: not on PATH here; mount Slurm's programs into the container" in capsys.readouterr().out
    assert requeue._avoided("7", ["n1"]) == ""


@pytest.mark.parametrize(
    ("facts", "requeues"),
    [
        ("JobState=COMPLETING Reason=JobLaunchFailure Requeue=1 ExitCode=0:9", True),
        ("JobState=COMPLETING Reason=RaisedSignal:9(Killed) ExitCode=0:9", True),
        ("JobState=RUNNING Reason=None ExitCode=0:0", False),
        ("JobState=COMPLETING Reason=None ExitCode=0:15", False),
        ("JobState=COMPLETING Reason=None ExitCode=0:9", False),
        ("JobState=COMPLETING Reason=TimeLimit ExitCode=0:9", False),
        ("JobState=COMPLETING Reason=NonZeroExitCode ExitCode=1:0", False),
    ],
)
def test_a_job_is_requeued_by_its_agent_where_its_script_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str, requeues: bool
) -> None:
    """Not where it was preempted, cancelled with and without patience, met its limit, or where the script ended by itself."""
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\ncase $1 in show) echo "JobId=8 {facts} Dependency=(null)";; *) echo "$@" >> {tmp_path}/called;; esac\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    requeue.requeue_if_its_script_was_killed()
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 7_0\n" if requeues else "")
