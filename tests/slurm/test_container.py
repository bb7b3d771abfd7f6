"""A run in a container on a real Slurm: its agents, those of its pool, and the ends of their batch scripts.

A program stands in for apptainer. It notes what it was called with, and runs the command where it sees, of this machine, only what its binds name
and what is in its image: the directories of the operating system and of Python.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of
from tests.jobs.small_run import HPCRL, SMALL, logs_of, wait_for
from tests.paths import QUICKSTART, ROOT
from tests.processes import processes_of
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE, ask

APPTAINER = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

import pytest

arguments = sys.argv[1:]
assert arguments.pop(0) == "exec", sys.argv
binds = []
while arguments[0].startswith("--"):
    option, _, value = arguments.pop(0).partition("=")
    assert option in ("--bind", "--nv"), sys.argv
    binds += [Path(value)] if value else []
image, *command = arguments
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
root = "/mnt"  # of a mount namespace of its own
lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs none {{root}}"]
for path in [Path(one) for one in json.load(open(image))] + binds:
    if path.is_symlink():
        lines += [f"mkdir -p {{root}}{{path.parent}}", f"ln -sfn {{os.readlink(path)}} {{root}}{{path}}"]
    elif path.is_dir():
        lines += [f"mkdir -p {{root}}{{path}}", f"mount --rbind {{path}} {{root}}{{path}}"]
    elif path.exists():
        lines += [f"mkdir -p {{root}}{{path.parent}}", f"touch {{root}}{{path}}", f"mount --bind {{path}} {{root}}{{path}}"]
lines.append(f'mkdir -p {{root}}/tmp; exec chroot {{root}} "$@"')
os.execvp("unshare", ["unshare", "--mount", "bash", "-c", "\\n".join(lines), "apptainer", *command])
"""
OF_QUICKSTART = ["data/train.parquet", "data/validation.parquet", "model"]
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys", "/var", "/run"]


def prepare(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return the log of the stand-in, and the environment in which it is found."""
    log, image = tmp_path / "calls.jsonl", tmp_path / "image.sif"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    image.write_text(json.dumps([*SYSTEM, *{sys.base_prefix, sys.prefix, *packages, str(ROOT / "hpcrl")}]))
    program = tmp_path / "bin" / "apptainer"
    write_text(program, APPTAINER.format(python=sys.executable, log=str(log)), mode=0o755)
    (tmp_path / "local").mkdir()
    return log, {"PATH": f"{program.parent}:", "TMPDIR": str(tmp_path / "local")}


def container(tmp_path: Path) -> list[str]:
    return [
        "slurm.container.kind=apptainer",
        f"slurm.container.image={tmp_path}/image.sif",
        f"slurm.container.python={sys.executable}",
    ]


def hpcrl(cluster: DevCluster, cwd: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run hpcrl on the login node; what it submits inherits the environment."""
    values = {name: shlex.quote(value) for name, value in environment.items()}
    exports = f"export HF_HOME=/nowhere TMPDIR={values['TMPDIR']} PATH={values['PATH']}$PATH"
    return cluster.run(["bash", "-c", f"{exports}; {shlex.join([HPCRL, *words])}"], cwd=cwd)


def test_doctor_looks_into_the_container(cluster: DevCluster, tmp_path: Path) -> None:
    log, environment = prepare(tmp_path)
    root = tmp_path / "runs"
    root.mkdir()
    done = hpcrl(cluster, tmp_path, environment, "doctor", SITE, "--root", str(root), "--json", *container(tmp_path))
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert [one for one in found.values() if one["level"] == "error"] == []
    assert (done.returncode, done.stderr) == (0, "")
    assert "seen on n" in found["shared filesystem"]["found"]
    assert "of the jobs on n" in found["environment"]["found"]
    assert "scontrol" not in found, "it is in the image"
    (call,) = [json.loads(line) for line in log.read_text().splitlines()]
    binds = [f"--bind={root}", f"--bind={environment['TMPDIR']}"]
    assert call[:6] == ["exec", "--nv", *binds, f"{tmp_path}/image.sif", sys.executable], "its partition has GPUs"


@pytest.mark.faults_slow
def test_a_run_and_its_pool_live_requeue_and_end_in_a_container(cluster: DevCluster, tmp_path: Path) -> None:
    log, environment = prepare(tmp_path)
    of_container = [
        *container(tmp_path),
        "slurm.exclusive=true",
        "slurm.elastic.extra={exclusive=true}",
        "generator.inference_engine.num_engines=0",
        "slurm.elastic.replicas=1",
    ]
    steps = [*SMALL, "trainer.max_steps=2000", "trainer.eval_interval=0", "trainer.ckpt_interval=1000"]
    words = ["submit", str(QUICKSTART), SITE, "trainer.run_name=contained", *steps, *of_container]
    done = hpcrl(cluster, tmp_path, environment, *words)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "runs" / "quickstart" / "contained")

    def said() -> str:
        scripts = [path.read_text(errors="replace") for path in run.slurm.resolve().glob("*.out")]
        return "\n".join(
            [*scripts, log.read_text() if log.exists() else "never called", logs_of(run), cluster.ask(["squeue", "-r"])]
        )

    wait_for(lambda: run.batch(2).exists() or outcome_of(run, 1), said, 300)
    assert outcome_of(run, 1) is None, said()
    ask(cluster, tmp_path, "requeue", "contained")
    wait_for(lambda: outcome_of(run, 1), said, 60)
    outcome = outcome_of(run, 1)
    assert outcome is not None
    assert outcome.kind == "interrupted", said()
    trained = outcome.step
    wait_for(lambda: run.batch(trained + 2).exists() or outcome_of(run, 2), said, 300)
    assert outcome_of(run, 2) is None, said()
    pool = json.loads(run.submission.read_text())["pool"]
    cluster.ask(["scancel", "--signal=USR2", f"{pool}_0"])  # its element is taken away, and queues again
    wait_for(lambda: "Restarts=1" in cluster.ask(["scontrol", "-o", "show", "job", f"{pool}_0"]), said, 60)
    ask(cluster, tmp_path, "cancel", "contained")
    wait_for(lambda: not cluster.ask(["squeue", "-h"]), said, 120)
    wait_for(lambda: not processes_of(run), said, 100)
    outcome = outcome_of(run, 2)
    assert outcome is not None
    assert outcome.kind == "cancelled", said()

    calls = [json.loads(line) for line in log.read_text().splitlines()]
    named = [QUICKSTART.parent / "quickstart" / name for name in OF_QUICKSTART]
    seen = [*sorted([run.path.parent.parent, *named]), tmp_path / "local"]
    begin = ["exec", *(f"--bind={path}" for path in seen), f"{tmp_path}/image.sif", sys.executable]
    assert [call[: len(begin)] for call in calls] == [begin] * len(calls)
    modules = [call[call.index("-m") + 1] for call in calls]
    assert modules.count("hpcrl.launch.requeue.epilogue") == 2, "it requeued the job, and did not the second time"
    assert modules.count("submitit.core._submit") >= 3
    assert "hpcrl.launch.requeue.elastic" in modules
    started = run.log(1, "agent-0").read_text()
    assert f"starting trainer-0: {sys.executable} -u {run.path}/code/jobs/train.py" in started
