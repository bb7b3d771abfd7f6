"""Starts ranks as torchrun does, but by forking a process that has imported all they need, which takes each of them seconds.

    run_ranks(2, "variants", options)        ranks of tests/trainer/scenarios.py, waited for
    start_ranks(folder, 2, script="...")     the same in the background

torchrun itself starts the ranks of whole runs (tests/jobs, tests/slurm, tests/faults) and of jobs/train.py in tests/trainer.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.rundir.commit import read_json, write_json
from hpcrl.runtime.signals import die_with_parent
from tests.paths import ROOT

_POLL_S, _LIMIT_S = 0.02, 300
_PORT = 8  # characters

# ---- the side of the tests


@dataclass(frozen=True)
class Started:
    """Ranks that were started, and what they write."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def err(self) -> Path:
        return self.folder / "err"

    def poll(self) -> int | None:
        """Return 0 when all ranks have ended well, 1 when one has failed and the others were ended, None before that."""
        path = self.folder / "code.json"
        return read_json(path)["code"] if path.exists() else None


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HPCRL_ATTEMPT": "1"}


def start_ranks(
    folder: Path,
    ranks: int,
    *arguments: object,
    script: str,
    limit_s: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Started:
    """Start ranks that run a script of tests/ and write into `folder`; after `limit_s` seconds they are killed.

    Args:
        variables: over those of `environment`.
    """
    started = Started(folder)
    for path in (started.out, started.err):
        path.touch()
    request = {
        "ranks": ranks,
        "argv": [str(ROOT / "tests" / script), *map(str, arguments)],
        "environment": environment() | dict(variables or {}),
        "directory": os.getcwd(),
        "folder": str(folder),
        "limit_s": limit_s,
    }
    stdin = _launcher().stdin
    assert stdin is not None
    stdin.write(json.dumps(request) + "\n")
    stdin.flush()
    return started


def run_ranks(
    ranks: int, *arguments: object, script: str = "trainer/scenarios.py", limit_s: int = _LIMIT_S
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        started = start_ranks(Path(folder), ranks, *arguments, script=script, limit_s=limit_s)
        deadline = time.monotonic() + limit_s + 60
        while (code := started.poll()) is None:
            assert time.monotonic() < deadline, started.err.read_text()
            time.sleep(_POLL_S)
        return subprocess.CompletedProcess([script], code, started.out.read_text(), started.err.read_text())


@functools.cache
def _launcher() -> subprocess.Popen[str]:
    command = [sys.executable, "-u", __file__]
    launcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment(), text=True, preexec_fn=die_with_parent
    )
    atexit.register(launcher.communicate)  # the end of its input is its end
    return launcher


# ---- the side of the launcher


def main() -> None:
    _import_all()
    gc.freeze()  # what is collected in a rank is its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for who supervises ranks
    for line in sys.stdin:
        if os.fork() == 0:
            _supervise(json.loads(line))


def _import_all() -> None:
    for name in ("qwen2", "qwen3", "qwen3_moe"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    importlib.import_module("tests.trainer.scenarios")
    if importlib.util.find_spec("megatron"):
        importlib.import_module("tests.trainer.backends.megatron.parity")


def _supervise(request: Mapping[str, Any]) -> NoReturn:
    from torch.distributed import TCPStore

    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.alarm(request["limit_s"] or 0)
    ranks = set()
    told, tell = os.pipe()
    for rank in range(request["ranks"]):
        if (pid := os.fork()) == 0:
            _rank(rank, int(os.read(told, _PORT)), request)
        ranks.add(pid)
    # after the ranks: its threads may hold a lock, which would stay locked in a process that is forked at that moment
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, b"%*d" % (_PORT, store.port) * len(ranks))
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status != 0 and code == 0:
            code = 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    write_json(Path(request["folder"]) / "code.json", {"code": code})
    os._exit(0)


def _rank(rank: int, port: int, request: Mapping[str, Any]) -> NoReturn:
    die_with_parent()
    for descriptor, name in enumerate((os.devnull, "out", "err")):
        path = Path(request["folder"], name)
        os.dup2(os.open(path, (os.O_WRONLY | os.O_APPEND) if descriptor else os.O_RDONLY), descriptor)
    faulthandler.enable()  # a rank that ends by a fault of native code leaves its stack
    if request["limit_s"]:
        faulthandler.dump_traceback_later(request["limit_s"] - 10)  # what hangs, before it is killed
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ |= request["environment"] | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(request["ranks"]),
        "LOCAL_WORLD_SIZE": str(request["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the supervisor's
    }
    sys.argv = request["argv"]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


if __name__ == "__main__":
    main()
