"""Submitting to a slurmctld that is away, or did not say that it took the job; programs stand in for Slurm's."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitit.core.utils import FailedJobError

from hpcrl.launch import patient
from hpcrl.launch.executors import ArrayExecutor
from hpcrl.launch.patient import submitted


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which `answer` says how often sbatch fails, and how."""
    programs = tmp_path / "bin"
    programs.mkdir()
    taken = tmp_path / "taken"
    scripts = {
        "sbatch": f"echo x >> {tmp_path}/tries\n[ $(wc -l < {tmp_path}/tries) -gt 1 ] && echo Submitted batch job 8 && exit\n"
        f". {tmp_path}/answer",
        "squeue": f"cat {taken} 2> /dev/null; true",
        "scancel": f'echo "$1" >> {tmp_path}/cancelled; rm {taken}',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(patient, "_RETRY_S", 0.0)
    return tmp_path


def submit(directory: Path) -> str:
    folder = directory / "slurm"
    executor = ArrayExecutor(folder=folder / "%j")
    executor.update_parameters(time=10)
    return submitted(lambda: executor.map_array(len, ["a"]), folder)[0].job_id


def test_slurmctld_that_is_away(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    (cluster / "answer").write_text(f"echo '{away}' >&2; exit 1")
    assert submit(cluster) == "8_0"
    assert f"hpcrl: {away}; trying again" in capsys.readouterr().err
    assert not (cluster / "cancelled").exists()


def test_job_that_was_taken_without_an_answer_is_not_there_twice(cluster: Path) -> None:
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    (cluster / "answer").write_text(
        f'for script; do :; done\necho "5_0|PENDING|N/A|None|/elsewhere/.slurm/x/.submission_file_1.sh" > {cluster}/taken\n'
        f'echo "7_[0]|PENDING|N/A|None|$script" >> {cluster}/taken\necho "{said}" >&2; exit 1'
    )
    assert submit(cluster) == "8_0"
    assert (cluster / "cancelled").read_text() == "7\n"


def test_refusal_is_final(cluster: Path) -> None:
    (cluster / "answer").write_text("echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(FailedJobError, match="invalid partition"):
        submit(cluster)
    assert (cluster / "tries").read_text() == "x\n"
