"""`hpcrl doctor` on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.jobs.small_run import HPCRL
from tests.paths import ROOT
from tests.slurm.conftest import DevCluster

SITE = str(ROOT / "slurm" / "sites" / "devcluster.toml")


def doctor(cluster: DevCluster, root: Path, *arguments: str) -> tuple[int, dict[str, dict[str, str]], str]:
    done = cluster.run([HPCRL, "doctor", SITE, "--root", str(root), "--json", *arguments])
    return done.returncode, {one["subject"]: one for one in json.loads(done.stdout)}, done.stderr


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory that is not in memory, as a test's own may be, of which the command warns."""
    with TemporaryDirectory() as directory:
        yield Path(directory)


def test_doctor_of_a_healthy_cluster(cluster: DevCluster, disk: Path) -> None:
    roots = [f"slurm.{name}={disk}/{name}" for name in ("checkpoint_root", "export_root")]
    code, found, said = doctor(cluster, disk, *roots)
    assert code == 0, (found, said)
    assert found["slurm.export_root"]["level"] == "ok"
    assert "GraceTime=20 s" in found["preemption"]["found"]
    assert "accounting storage is disabled" in found["sacct"]["found"]
    assert "seen on n" in found["shared filesystem"]["found"]
    assert found["environment"]["level"] == found["clock"]["level"] == "ok"
    assert list(disk.iterdir()) == []
    assert cluster.ask(["squeue", "-h"]) == ""
    text = cluster.run([HPCRL, "doctor", "--root", str(disk), "--partition", "nograce"]).stdout
    assert "5 s to save" in text
    assert text.startswith("ok       slurm.root")


def test_doctor_says_when_no_node_is_free_or_the_job_fails(cluster: DevCluster, tmp_path: Path) -> None:
    job = cluster.ask(
        ["sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60"]
    )
    code, found, _ = doctor(cluster, tmp_path, "--wait", "1")
    assert (code, found["compute node"]["level"]) == (0, "warning")
    assert "none was free in main within 1 s" in found["compute node"]["found"]
    cluster.ask(["scancel", job])
    cluster.ask(["srun", "-N4", "--exclusive", "true"])
    code, found, _ = doctor(cluster, tmp_path, 'slurm.setup=["echo no modules here >&2; exit 7"]')
    assert (code, found["compute node"]["level"]) == (1, "error")
    assert "no modules here" in found["compute node"]["found"]
    code, found, _ = doctor(cluster, tmp_path, "--partition", "nope")
    assert (code, found["partition"]["found"]) == (1, "there is no nope")
    assert list(tmp_path.iterdir()) == []


def test_doctor_knows_that_accounting_answers(accounting: DevCluster, tmp_path: Path) -> None:
    _, found, _ = doctor(accounting, tmp_path)
    assert found["sacct"]["level"] == "ok"


def test_doctor_without_slurm(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("chmod", "rm"):  # with which directories are removed
        (programs / name).symlink_to(shutil.which(name) or name)
    environment = {**os.environ, "PATH": str(programs)}
    done = subprocess.run(
        [HPCRL, "doctor", "--root", str(tmp_path), "slurm.sandboxes.nodes=1"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert "not on this machine (no scontrol on PATH)" in done.stdout
    assert "open files" in done.stdout
    assert re.search(r"(error|ok) +sandboxes +.*Linux \d", done.stdout), done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("error") and "network" in line]
