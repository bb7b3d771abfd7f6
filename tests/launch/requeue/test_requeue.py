"""Which hosts a requeued job is told to avoid; stand-ins for scontrol and sinfo print what the real ones would."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.launch.requeue import requeue


@pytest.mark.parametrize(
    ("shown", "hostnames", "avoided"),
    [
        ("echo '||(null)'", "exit 1", "n1"),
        ("echo '(null)|(null)|(null)'", "exit 1", "n1"),
        ("echo '|n[2-3]|(null)'", "echo n2; echo n3", "n1,n2,n3"),
        ("echo '|n[2-3]|(null)'", "exit 1", ""),
        ("echo '|n[2-5]|(null)'", "echo n2; echo n3; echo n4; echo n5", ""),
        ("echo '||h100|a100'", "exit 1", ""),
        ("echo 'n1||(null)'", "exit 1", ""),
        ("true", "exit 1", ""),
        ("echo 'Socket timed out' >&2; exit 1", "exit 1", ""),
    ],
)
def test_what_a_job_avoids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, hostnames: str, avoided: str
) -> None:
    """Of five nodes it needs one. The hosts that its user excludes stay excluded, so nothing is where they are not known."""
    for name, body in {
        "squeue": shown,
        "scontrol": hostnames,
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
    ("printed", "requeues"),
    [
        ("9                   JobLaunchFailure     ", True),
        ("0:9                 RaisedSignal:9(Killed)", True),
        ("0                   None", False),
        ("15                  None", False),
        ("9                   None", False),
        ("9                   TimeLimit", False),
        ("256                 NonZeroExitCode", False),
        ("", False),
    ],
)
def test_a_job_is_requeued_by_its_agent_where_its_script_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, requeues: bool
) -> None:
    """Not where it was preempted, cancelled with and without patience, met its limit, or where the script ended by itself."""
    # a comment of the job could have any field of `scontrol show job`
    for name, body in {
        "squeue": f"echo '{printed}'",
        "scontrol": f'case $1 in show) echo "Reason=JobLaunchFailure ExitCode=0:9";; *) echo "$@" >> {tmp_path}/called;; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    requeue.requeue_if_its_script_was_killed()
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 7_0\n" if requeues else "")
