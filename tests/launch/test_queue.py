"""What squeue prints of jobs whose scripts have line breaks in their paths; the lines are those of Slurm 22.05."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.launch.scheduler import JobState, jobs_of_runs, queue

OTHER = 1  # daemon, which every machine has


def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, foreign: str) -> None:
    """Put a squeue on PATH; it prints `foreign` of another user, with the paths of the scripts if these are asked for."""
    for name, text in (("own", own), ("foreign", foreign)):
        (tmp_path / name).write_text(text)
    program = tmp_path / "squeue"
    program.write_text(
        f"#!/bin/sh\ncase $* in *'-u {os.getuid()} '*) cat {tmp_path}/own;; *%o*) cat {tmp_path}/own {tmp_path}/foreign;; "
        f"*) sed -n 's/^\\(9|.*|\\).*/\\1/p' {tmp_path}/foreign;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_a_path_with_line_breaks_is_no_job_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, foreign = "7|RUNNING|N/A|None|/a\n|b\n8|x\n", "9|PENDING|N/A|Priority|/b\n7|COMPLETED|N/A|None|\n"
    squeue(tmp_path, monkeypatch, own, foreign)
    states = {"7": JobState("RUNNING", script="/a"), "9": JobState("PENDING", "Priority")}
    assert queue(0.0, [OTHER]) == states
    assert queue(0.0) == {"7": states["7"]}


def test_lines_of_paths_are_no_jobs_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, monkeypatch, "", "me|RUNNING|/a/.slurm/x.sh\nyou|PENDING|/b\n/.slurm/c\n")
    assert jobs_of_runs([OTHER]) == [("me", "RUNNING")]
