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
