"""Short episodes whose workers, servers and sandboxes are killed at random: none is lost, and none ends twice.

`make soak` plays 10,000 (HPCRL_EPISODES); HPCRL_SOAK_SEED chooses what is killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import SIGKILL, SIGTERM
from typing import Any

import httpx
import pytest

from hpcrl.data.cache_files import turn_files
from hpcrl.errors import ServiceError
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import sandbox_name, worker_name
from hpcrl.runtime.scratch import remove_abandoned
from hpcrl.sandboxes import sandbox as module
from tests.paths import ROOT
from tests.processes import parent_of
from tests.sandboxes.plays import SAYS
from tests.sandboxes.test_job import JOB, PLACE, run  # noqa: F401

EPISODES = int(os.environ.get("HPCRL_EPISODES", "50"))
SEED = int(os.environ.get("HPCRL_SOAK_SEED", "5"))
SERVERS, WORKERS, AT_ONCE = 2, 2, 3
PER_KILL = 2  # episodes
STALLED_S = 600.0
_INSIDE = b"hpcrl.sandboxes.inside"


class Fleet:
    """The processes, each of which is started again when it has ended."""

    def __init__(self, run: Run, temporary: Path) -> None:  # noqa: F811
        self._packages = str(Path(httpx.__file__).parents[1])
        places = {
            "TMPDIR": str(temporary),
            "PYTHONPATH": f"{ROOT}:{self._packages}",
        }  # of the process that renders, too
        self._run, self._environment = run, os.environ | PLACE | places
        self.processes = dict[str, subprocess.Popen[bytes]]()
        self.heard = SimpleQueue[tuple[int, dict[str, Any] | None]]()

    def keep(self) -> None:
        for name in [*map(sandbox_name, range(SERVERS)), *map(worker_name, range(WORKERS))]:
            ended = self.processes[name].poll() if name in self.processes else -SIGKILL
            if ended is not None:
                # the latter where the sandbox that a server tries at its start was killed
                assert ended in (-SIGKILL, ServiceError.exit_code), f"{name} has ended by itself"
                self.processes[name] = self._start(name)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        role, number = name.split("-")
        code = [module._COMMAND[0], "-c", JOB, str(ROOT), self._packages]
        if role == "sandbox":
            job = [*code, str(ROOT / "jobs" / "sandbox.py"), str(self._run.path)]
            return subprocess.Popen(job, env=self._environment | {"HPCRL_SANDBOXES": number})
        job = [*code, str(ROOT / "tests" / "sandboxes" / "plays.py"), str(self._run.path), name, str(SERVERS)]
        process = subprocess.Popen(job, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._hear, args=(process,), daemon=True).start()
        return process

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        for line in process.stdout:
            if line.startswith(b"{") and line.endswith(b"\n"):
                self.heard.put((process.pid, json.loads(line)))
        process.wait()
        self.heard.put((process.pid, None))

    def ask(self, worker: str, **what: Any) -> None:
        stdin = self.processes[worker].stdin
        assert stdin
        with suppress(BrokenPipeError):  # its end is heard of
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.flush()

    def kill(self, chance: random.Random) -> str:
        """Kill one process; return its kind."""
        kind = chance.choice(("sandbox", "rollout", "first process"))
        servers = {process.pid for name, process in self.processes.items() if name.startswith("sandbox")}
        inside = _inside(servers)
        if kind == "first process" and inside:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(chance.choice(inside), SIGKILL)
            return kind
        kind = "rollout" if kind == "first process" else kind
        self.processes[chance.choice([name for name in self.processes if name.startswith(kind)])].kill()
        return kind

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(SIGTERM)
        for process in self.processes.values():
            process.wait()


def _inside(servers: set[int]) -> list[int]:
    """Return the processes that the servers have started their sandboxes with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if _INSIDE in path.read_bytes() and parent_of(pid := int(path.parent.name)) in servers:
                found.append(pid)
    return sorted(found)


@pytest.mark.parametrize("episodes", [4, pytest.param(EPISODES, marks=pytest.mark.faults_slow)])
def test_no_episode_is_lost_or_ends_twice(
    run: Run,  # noqa: F811
    user: Path,
    episodes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = subprocess.run([module._COMMAND[0], "-c", "import sys; print(sys.version_info[:2])"], capture_output=True)
    if shown.stdout.decode().strip() != str(tuple(sys.version_info[:2])):
        pytest.skip("the Python of ordinary users cannot import these packages")
    temporary = user / f"episodes-{episodes}"
    temporary.mkdir()
    fleet, chance, kills = Fleet(run, temporary), random.Random(SEED), Counter[str]()
    waiting, playing = deque(f"g{number:08}" for number in range(episodes)), dict[int, set[str]]()
    ends, doubled, moved = dict[str, dict[str, Any]](), 0, time.monotonic()
    try:
        while len(ends) < episodes:
            fleet.keep()
            for worker in map(worker_name, range(WORKERS)):
                mine = playing.setdefault(fleet.processes[worker].pid, set())
                while waiting and len(mine) < AT_ONCE:
                    mine.add(group := waiting.popleft())
                    turns = [str(path.relative_to(run.path)) for path in turn_files(run).get(group, ())]
                    fleet.ask(worker, group_id=group, turns=turns)
            try:
                pid, end = fleet.heard.get(timeout=0.2)
            except Empty:
                assert time.monotonic() - moved < STALLED_S, (playing, ends)
                continue
            if end is None:  # its episodes go to others
                waiting.extendleft(sorted(playing.pop(pid, set()), reverse=True))
                continue
            moved, doubled = time.monotonic(), doubled + (end["group"] in ends)
            assert (end["failures"], end["reward"]) == ([], 1.0), "a turn is lost, or was done twice"
            ends[end["group"]] = end
            playing[pid].discard(end["group"])
            if episodes > len(ends) >= PER_KILL * (kills.total() + 1):
                kills[fleet.kill(chance)] += 1
    finally:
        fleet.end()
    asked, wanted = len((run.path / "asked").read_text().split()), episodes * len(SAYS)
    (run.path / "asked").unlink()
    again, found = asked - wanted, sum(end["found"] > 0 for end in ends.values())
    print(
        f"{episodes} episodes, killed {dict(kills)}: {doubled} doubled, {found} went on, {again / wanted:.1%} of turns generated again"
    )
    assert doubled == 0
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    remove_abandoned()  # as an agent does at its end
    assert not list(temporary.iterdir()), "something was left on the node"
