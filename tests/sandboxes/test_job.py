"""The process that serves a node's sandboxes in a run, and the rollout worker's way to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hpcrl.config import Config
from hpcrl.envs.tools.sandboxes import SandboxLost
from hpcrl.errors import DeviceError, SandboxError, ServiceError
from hpcrl.rollout.own_services import sandboxes_of
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import sandbox_name, worker_name
from hpcrl.runtime.process_status import GIVEN_UP, RENEW_S, SERVING, StatusWriter, read_process_status
from hpcrl.sandboxes.images import ImageStore
from tests.paths import QUICKSTART, ROOT
from tests.sandboxes.material import PATIENCE_S, python_of_users

PLACE = {"HPCRL_ATTEMPT": "1", "HPCRL_SANDBOXES": "0", "HPCRL_ADDRESS": "127.0.0.1"}
SETTINGS = ("slurm.sandboxes.nodes=1", "slurm.sandboxes.per_node=2", 'slurm.sandboxes.network=["other"]')
JOB = "import runpy, sys; sys.path[:0] = sys.argv[1:3]; sys.argv[:] = sys.argv[3:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def make_run(folder: Path) -> Run:
    run = Run(folder / "root" / "project" / "run")
    write_text(run.config, Config.from_toml([Path(QUICKSTART)], SETTINGS).to_toml())
    write_text(run.token, "secret\n", mode=0o600)
    return run


@pytest.fixture
def run(user: Path, image: Path) -> Run:
    run = make_run(Path(tempfile.mkdtemp(dir=user)))
    ImageStore(run.root).add("tiny", image, temporary=user)
    return run


@contextmanager
def serving(run: Run, temporary: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run jobs/sandbox.py as the ordinary user of the tests."""
    python = python_of_users()
    temporary.mkdir(exist_ok=True)
    environment = {**PLACE, "TMPDIR": str(temporary), **more}
    job, packages = ROOT / "jobs" / "sandbox.py", Path(httpx.__file__).parents[1]
    command = [python, "-c", JOB, str(ROOT), str(packages), str(job), str(run.path)]
    with subprocess.Popen(command, env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def serves(run: Run, process: subprocess.Popen[bytes]) -> bool:
    status = read_process_status(run, sandbox_name(0), 1)
    return status is not None and (status.state, status.pid) == (SERVING, process.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests are not root's")
def test_root_serves_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    command = [sys.executable, str(ROOT / "jobs" / "sandbox.py"), str(run.path)]
    ended = subprocess.run(command, env=os.environ | PLACE, capture_output=True, text=True, check=False)
    assert (ended.returncode, "for ordinary users" in ended.stderr) == (SandboxError.exit_code, True), ended.stderr


def test_a_start_ends_at_once_where_no_node_will_ever_have_sandboxes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    StatusWriter(run, sandbox_name(0), 1).write(f"{GIVEN_UP}: SandboxError: this kernel is too old")
    with pytest.raises(ServiceError, match="no sandbox of image 'tiny' within 0 s"):  # the other one may come back
        sandboxes_of(run, 1, 2, worker_name(0)).start("tiny", wait_s=0.0)
    StatusWriter(run, sandbox_name(1), 1).write(f"{GIVEN_UP}: SandboxError: this kernel is too old")
    with pytest.raises(DeviceError, match=r"sandbox-[01] is given up: SandboxError: this kernel is too old"):
        sandboxes_of(run, 1, 2, worker_name(0)).start("tiny")
    with pytest.raises(ServiceError, match="a server is away"):
        sandboxes_of(run, 2, 2, worker_name(0)).start("tiny", wait_s=0.0)


def test_a_server_that_is_killed_is_found_again_at_its_next_address(run: Run, user: Path) -> None:
    sandboxes = sandboxes_of(run, 1, 1, worker_name(0))
    with serving(run, user / "one") as process:
        until(lambda: serves(run, process), process)
        one = sandboxes.start("tiny")
        one.write("/file", b"content")
        digest = one.snapshot()
        assert (run.snapshots / f"{digest}.blocks").is_file()
        with pytest.raises(SandboxError, match="those that may: other"):
            sandboxes.start("tiny", network=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(SandboxLost):
            one.read("/file")
    with serving(run, user / "one") as process:
        until(lambda: serves(run, process), process)
        one = sandboxes.start("tiny", snapshot=digest, wait_s=PATIENCE_S)
        assert one.read("/file") == b"content"
        stranger = sandboxes_of(run, 2, 1, worker_name(0))  # of another attempt
        with pytest.raises(ServiceError, match="a server is away"):
            stranger.start("tiny", wait_s=0.0)
        url = json.loads(run.status_file(sandbox_name(0)).read_text())["facts"]["url"]
        body = {"image": "tiny", "network": False, "snapshot": ""}
        assert httpx.post(f"{url}/start", json=body).status_code == 409, "a request without a signature"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        with pytest.raises(SandboxLost):
            one.read("/file")
    assert not list((user / "one").iterdir()), "it has left something"


def test_sandboxes_go_on_while_the_filesystem_of_the_run_stands_still(run: Run, user: Path) -> None:
    """Minutes of that were the end of all leases, and of the programs' connections."""
    with serving(run, user / "still", HPCRL_FAULT="process_status@2:sleep=600") as process:
        until(lambda: serves(run, process), process)
        one = sandboxes_of(run, 1, 1, worker_name(0)).start("tiny")
        time.sleep(RENEW_S + 1.0)
        assert one.run(["sh", "-c", "echo on"], PATIENCE_S).stdout == b"on\n"
        one.end()


def test_a_server_that_cannot_renew_its_process_status_ends(run: Run, user: Path) -> None:
    """It served on without heartbeats, and was killed with its sandboxes when it counted as hung."""
    with serving(run, user / "failed", HPCRL_FAULT="process_status:none") as process:
        assert process.wait(PATIENCE_S) == 1
    assert not list((user / "failed").iterdir()), "it has left something"
