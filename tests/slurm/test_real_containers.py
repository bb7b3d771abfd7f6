"""A run in containers of a real Pyxis over a real Enroot, and of a real Apptainer, on the nodes of a real Slurm: what programs stand in for elsewhere."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_attempts
from tests.containers import PYTHON, make_image, missing
from tests.jobs.small_run import HPCRL, SMALL, logs_of, wait_for
from tests.paths import QUICKSTART, ROOT
from tests.slurm.conftest import DevCluster, lent
from tests.slurm.test_runs import SITE

pytestmark = pytest.mark.containers
PLUGINS = ("local/lib/slurm", "lib/slurm", "lib64/slurm", "lib/*/slurm", "lib/*/slurm-wlm")  # below /usr
# All nodes of the cluster have the disk of this machine, and Pyxis names the container of a step alike on each.
ENROOT = """#!/bin/sh
export ENROOT_DATA_PATH={place}/$(hostname)/data ENROOT_RUNTIME_PATH={place}/$(hostname)/run ENROOT_CACHE_PATH={place}/$(hostname)/cache
exec {real} "$@"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where Enroot keeps the containers of each node."""
    return tmp_path_factory.mktemp("enroot")


@pytest.fixture(scope="module")
def pyxis(needs_slurm: None, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:  # noqa: ARG001
    if reason := missing("enroot", "mksquashfs", "unsquashfs"):
        pytest.skip(reason)
    plugins = [found for place in PLUGINS for found in Path("/usr").glob(f"{place}/spank_pyxis.so")]
    if not plugins:
        pytest.skip("spank_pyxis.so of Pyxis not installed (docs/containers.md)")
    program = place / "bin" / "enroot"
    program.parent.mkdir()
    program.write_text(ENROOT.format(place=place, real=shutil.which("enroot")))
    program.chmod(0o755)
    (place / "plugstack.conf").write_text(f"required {plugins[0]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        with lent(tmp_path_factory.mktemp("slurm"), 2, "--conf", f"PlugStackConfig={place}/plugstack.conf") as cluster:
            yield cluster


@pytest.fixture(scope="module")
def apptainer(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:  # noqa: ARG001
    if reason := missing("apptainer", "mksquashfs"):
        pytest.skip(reason)
    with lent(tmp_path_factory.mktemp("slurm"), 2) as cluster:
        yield cluster


@pytest.fixture(params=["pyxis", "apptainer"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cluster(request: pytest.FixtureRequest, kind: str) -> DevCluster:
    return request.getfixturevalue(kind)


def site(kind: str, tmp_path: Path) -> list[str]:
    """Return the settings of a site; scontrol and its libraries are below /usr."""
    mounts = [*PYTHON, str(ROOT), "/etc/slurm"]
    image = make_image(tmp_path / "image.sqsh")
    container = {"kind": kind, "image": str(image), "python": str(Path(HPCRL).with_name("python")), "mounts": mounts}
    return [SITE, *(f"slurm.container.{name}={json.dumps(value)}" for name, value in container.items())]


def hpcrl(cluster: DevCluster, cwd: Path, *words: str) -> str:
    done = cluster.run(["bash", "-c", f"export HF_HOME=/nowhere; {shlex.join([HPCRL, *words])}"], cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_doctor_looks_into_a_container(cluster: DevCluster, kind: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    found = json.loads(hpcrl(cluster, tmp_path, "doctor", *site(kind, tmp_path), "--root", str(root), "--json"))
    assert [one for one in found if one["level"] == "error"] == []
    assert "scontrol" not in {one["subject"] for one in found}, "it is inside"


def test_a_run_is_preempted_and_goes_on_to_its_end(cluster: DevCluster, kind: str, place: Path, tmp_path: Path) -> None:
    """The signal arrives inside, the run saves and requeues its job from inside, and its second attempt ends it.

    With Pyxis that starts although a node has kept the container of the first one, as after a loss of power.
    """
    steps = [*SMALL, "trainer.max_steps=30", "trainer.eval_interval=0", "trainer.ckpt_interval=100"]
    hpcrl(cluster, tmp_path, "submit", str(QUICKSTART), *site(kind, tmp_path), "trainer.run_name=inside", *steps)
    run = Run.open(tmp_path / "runs" / "quickstart" / "inside")

    def said() -> str:
        scripts = [path.read_text(errors="replace") for path in run.slurm.resolve().glob("**/*.out")]
        return "\n".join([*scripts, logs_of(run), cluster.ask(["squeue", "-r"])])

    wait_for(lambda: run.batch(2).exists() or outcome_of(run, 1), said, 300)
    cluster.ask(["sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"])
    wait_for(lambda: outcome_of(run, 1), said, 120)
    first = outcome_of(run, 1)
    assert first is not None
    assert (first.kind, first.step < 30) == ("interrupted", True), said()
    assert first.step >= 2, "what was trained was saved"
    job = read_attempts(run)[0].job_id.partition("_")[0]
    if kind == "pyxis":
        (place / "n2" / "data" / f"pyxis_{job}.0").mkdir(exist_ok=True)
    wait_for(lambda: outcome_of(run, 2), said, 600)
    last = outcome_of(run, 2)
    assert last is not None
    assert (last.kind, last.step) == ("done", 30), said()
    wait_for(lambda: not cluster.ask(["squeue", "-h"]), said, 60)
