"""A real Slurm cluster for the session; skipped where one cannot be had."""

import getpass
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT

DEVCLUSTER = ROOT / "slurm/devcluster"


@dataclass(frozen=True)
class DevCluster:
    """One cluster's directory and the verbs of slurm/devcluster on it."""

    directory: Path

    def argv(self, verb: str, *arguments: str) -> list[str]:
        # not by its first line: what stands behind that name may be a shim, which takes longer than a question to Slurm
        return [sys.executable, "-B", "-S", str(DEVCLUSTER), verb, "--dir", str(self.directory), *arguments]

    def run(
        self, cmd: Sequence[str], timeout: float = 300, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node and collect its output; on a timeout its whole process group is killed."""
        return call(self.argv("run", *cmd), timeout, cwd, env)

    def ask(self, cmd: Sequence[str], timeout: float = 300) -> str:
        """Standard output of a command that must succeed."""
        done = self.run(cmd, timeout)
        assert done.returncode == 0, f"{cmd}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def up(
        self, nodes: int = 4, env: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        return call(self.argv("up", "--nodes", str(nodes), *options), 90, None, env)

    def stop(self, name: str) -> None:
        """End a daemon, or switch a node off."""
        self._tell("stop", name)

    def start(self, name: str) -> None:
        self._tell("start", name)

    def _tell(self, verb: str, name: str) -> None:
        done = call(self.argv(verb, name), 90, None, None)
        assert done.returncode == 0, done.stderr

    def down(self) -> subprocess.CompletedProcess[str]:
        return call(self.argv("down"), 60, None, None)


def call(
    argv: Sequence[str], timeout: float, cwd: Path | None, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def why_not(programs: Sequence[str], packages: str) -> str | None:
    if os.geteuid() != 0:
        return "a devcluster needs root"
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    return f"{', '.join(missing)} not installed (apt-get install {packages})" if missing else None


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    if reason := why_not(("slurmctld", "slurmd", "srun"), "slurm-wlm"):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:  # noqa: ARG001
    """Four idle nodes, shared by the tests of a session: leave no job behind."""
    with lent(tmp_path_factory.mktemp("slurm"), 4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def accounting(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:  # noqa: ARG001
    """Two nodes with accounting, whose slurmctld forgets a job soon after its end."""
    if reason := why_not(("slurmdbd", "mariadbd", "mariadb-install-db"), "slurmdbd mariadb-server"):
        pytest.skip(reason)
    with lent(tmp_path_factory.mktemp("accounting"), 2, "--accounting", "--conf", "MinJobAge=2") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Jobs of a test that fails would keep nodes from the tests behind it."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for name in {"cluster", "accounting"}.intersection(request.fixturenames):
            request.getfixturevalue(name).ask(["scancel", "--full", "--user", getpass.getuser()])


@contextmanager
def lent(directory: Path, nodes: int, *options: str) -> Iterator[DevCluster]:
    """Start a cluster, and take it down at the end of the block or of this process, killed or not: its end closes the pipe."""
    cluster = DevCluster(directory)
    down = ["sh", "-c", 'cat; exec "$@"', "sh", *cluster.argv("down")]
    with subprocess.Popen(down, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True):
        started = cluster.up(nodes, options=options)
        assert started.returncode == 0, started.stderr
        yield cluster
