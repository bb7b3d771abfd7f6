"""Run directories and what Slurm would say of them: a stand-in for squeue prints what the real one would."""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hpcrl.launch.manage import registry
from hpcrl.launch.manage.registry import states_of
from hpcrl.launch.manage.state import RunState
from hpcrl.rundir.commit import committed_directory, write_json, write_text
from hpcrl.rundir.layout import Run

CONFIG = """\
[trainer]
resume_mode = "latest"
[slurm]
crash_budget = 2
[generator.inference_engine]
num_engines = 2
"""
PAST, FUTURE = "2020-01-01T10:00:00", (datetime.now() + timedelta(days=2)).isoformat(timespec="seconds")
FAR = "2099-01-01T10:00:00"


def submitted(
    run: Run,
    job: str = "7",
    executor: str = "slurm",
    at: float = 1.0,
    host: str | None = None,
    requests: dict[str, str] | None = None,
) -> None:
    record = {
        "executor": executor,
        "job_id": job,
        "overrides": [],
        "submitted": at,
        "host": host or socket.gethostname(),
        **({"requests": requests} if requests else {}),
    }
    write_json(run.submission, record)


def squeue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: str, complaint: str = "") -> None:
    """Put a squeue on PATH that prints these lines, or fails, and counts its calls in `asked`."""
    printed = tmp_path / "printed"
    printed.write_text("".join(f"{line}\n" for line in lines))
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir(exist_ok=True)
    end = f"echo '{complaint}' >&2; exit 1" if complaint else f"cat {printed}"
    program.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(registry, "PATIENCE_S", 0.0)


def scancel(tmp_path: Path) -> Path:
    """Put a scancel beside the squeue, which forgets the job; return where it writes what it was told."""
    program = tmp_path / "bin" / "scancel"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n: > {tmp_path}/printed\n')
    program.chmod(0o755)
    return tmp_path / "cancelled"


def script_of(folder: Path, runs: list[Run]) -> Path:
    """Write what submitit and hpcrl leave of a submission whose client died right after sbatch."""
    elements = folder / "elements.json"
    write_json(elements, [str(run.path) for run in runs])
    script = folder / ".submission_file_0.sh"
    script.write_text(
        f"#!/bin/bash\nsrun something\nstatus=$?\n  '/bin/python3' -m hpcrl.launch.requeue.epilogue '{elements}' $status\nexit $decided"
    )
    for run in runs:
        run.slurm.symlink_to(os.path.relpath(folder, run.path))
    return script


def committed_step(run: Run, step: int) -> None:
    with committed_directory(run.checkpoint(step), 1) as directory:
        (directory / "state").write_text("x")


def trained(run: Run, steps: int, seconds: float) -> None:
    """Write the metrics of as many steps, each of which took so long."""
    lines = [
        {"attempt": 1, "step": step, "time": step * seconds, "metrics": {"timing/step": seconds}}
        for step in range(1, steps + 1)
    ]
    write_text(run.metrics_of("trainer"), "".join(json.dumps(line) + "\n" for line in lines))


def state(run: Run) -> RunState:
    return states_of([run])[0]
