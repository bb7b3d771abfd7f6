"""`hpcrl attach` to processes of a job of a real Slurm; they only stand where a run's would."""

from __future__ import annotations

import os
import pty
import sys
import time
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from tests.jobs.small_run import HPCRL, wait_for
from tests.paths import QUICKSTART, ROOT
from tests.slurm.conftest import DevCluster

SITE = ROOT / "slurm" / "sites" / "devcluster.toml"


def start(cluster: DevCluster, root: Path) -> Run:
    """Start a job of two nodes, each with one process of its role."""
    run, python = Run(root / "quickstart" / "mine"), root / "fat" / "python"
    write_text(python, f'#!/bin/sh\necho "$2" >> {root}/calls\nexec {sys.executable} "$@"\n', mode=0o755)
    write_text(run.config, Config.from_toml([QUICKSTART, SITE], [f"slurm.python={python}"]).to_toml())
    script = root / "role.sh"
    script.write_text(
        f"export HPCRL_ATTEMPT=1 HPCRL_ROLE_IS=$1 HPCRL_HEARTBEAT={root}/beats-$1 PYTHONPATH=/its/code\nexec {sys.executable} {root}/$1.py {run.path}\n"
    )
    for role, process in (("train", "rank-0"), ("rollout", "rollout-0")):
        beat = root / f"beats-{role}" / process
        beat.parent.mkdir()
        (root / f"{role}.py").write_text(
            f"import os\nopen('{beat}', 'w').write(f'{{os.getpid()}} serve 1')\ndef works():\n    while True: sum(range(999))\nworks()\n"
        )
    step = f"srun bash -c 'case $SLURM_NODEID in 0) bash {script} train;; *) bash {script} rollout;; esac'"
    job = cluster.ask(["sbatch", "--parsable", "--array=0", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", step])
    record = {"executor": "slurm", "job_id": f"{job}_0", "overrides": [], "submitted": time.time(), "host": "ctl"}
    write_json(run.submission, record)
    wait_for(lambda: cluster.ask(["squeue", "-h", "-t", "R"]), lambda: cluster.ask(["squeue"]), 30)
    hosts = cluster.ask(["sh", "-c", "scontrol show hostnames $(squeue -h -o %N)"]).split()
    open_attempt(run, f"{job}_0.0", hosts)
    return run


@pytest.mark.faults_slow
def test_attach_runs_a_command_with_the_environment_of_the_role(cluster: DevCluster, tmp_path: Path) -> None:
    run = start(cluster, tmp_path)
    try:
        show = ["--", "sh", "-c", "echo $(hostname) $HPCRL_ROLE_IS $PYTHONPATH $(pwd) $(command -v python)"]
        python = Path(sys.executable).parent / "python"

        def ask(*arguments: str) -> str:
            done = cluster.run([HPCRL, "attach", str(run.path), *arguments])
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        wait_for(lambda: "train" in ask(*show), lambda: ask(*show), 20)
        first, second = cluster.ask(["sh", "-c", "scontrol show hostnames $(squeue -h -t R -o %N)"]).split()
        assert ask(*show) == f"{first} train /its/code {run.path} {python}"
        wait_for(lambda: "rollout" in ask("--role", "rollout", *show), lambda: ask("--role", "rollout", *show), 20)
        for arguments in (["--role", "rollout"], ["--node", "1"], ["--node", second]):
            assert ask(*arguments, *show) == f"{second} rollout /its/code {run.path} {python}"
        assert cluster.run([HPCRL, "attach", str(run.path), "--", "sh", "-c", "exit 7"]).returncode == 7
        command = [HPCRL, "profile", str(run.path), "--role", "rollout", "--seconds", "1", "--format", "top"]
        sampled = cluster.run([*command, "-o", str(tmp_path / "top")])
        assert sampled.returncode == 0, sampled.stderr
        assert "rollout-0 of mine" in (text := (tmp_path / "top").read_text())
        assert "works (rollout.py" in text

        asked = set((tmp_path / "calls").read_text().split())
        assert asked == {"hpcrl.launch.attach.remote", "hpcrl.launch.attach.profile_remote"}

        refused = cluster.run([HPCRL, "attach", str(run.path), "--node", "n77"])
        assert refused.returncode == 5
        assert f"no node n77; it has 0 {first} (trainer), 1 {second} (rollout)" in refused.stderr
        assert shell_of(cluster, run).count("trainer node 0 of mine, attempt 1") == 1
    finally:
        cluster.ask(["scancel", "-u", "root"])
        wait_for(lambda: not cluster.ask(["squeue", "-h"]), lambda: cluster.ask(["squeue"]), 30)
    over = cluster.run([HPCRL, "attach", str(run.path)])
    assert over.returncode == 5
    assert "is cancelled: it has no processes now" in over.stderr


def shell_of(cluster: DevCluster, run: Run) -> str:
    """Open a shell on a terminal, type into it, and return what the terminal showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["SHELL"] = "/bin/sh"
        argv = cluster.argv("run", HPCRL, "attach", str(run.path))
        os.execv(argv[0], argv)
    shown, deadline = b"", time.monotonic() + 30
    while b"Leaving this shell" not in shown and time.monotonic() < deadline:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"echo is $HPCRL_ROLE_IS; exit\n")
    while b"is train\r" not in shown and time.monotonic() < deadline:
        shown += os.read(terminal, 1000)
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode()
