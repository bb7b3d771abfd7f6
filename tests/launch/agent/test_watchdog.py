"""Processes that stand still, and nodes that have gone, as an agent sees them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.config.sections.slurm import PatienceConfig
from hpcrl.launch.agent import watchdog
from hpcrl.launch.agent.child import Restarts
from hpcrl.launch.agent.watchdog import Neighbours, Watchdog
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import DIRECTORY, Heartbeat, SuspendAwareClock, read_heartbeats
from hpcrl.runtime.process_status import StatusWriter

BEATING = """
import sys, time
from pathlib import Path
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
heartbeat = Heartbeat(Run(Path(sys.argv[1])), 1, "rank-0")
heartbeat.beat("step")
print("beating", flush=True)
time.sleep(60)
"""


@pytest.fixture
def heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "heartbeats"
    directory.mkdir()
    monkeypatch.setenv(DIRECTORY, str(directory))
    return directory


def test_who_stands_still_depends_on_the_phase(
    heartbeats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(SuspendAwareClock, "now", lambda _: now[0])
    dog = Watchdog(heartbeats, PatienceConfig(load_seconds=0, step_seconds=10, save_seconds=100))
    heartbeat = Heartbeat(Run(tmp_path), 1, "rank-0")
    expected = ["rank-0", "controller"]
    assert dog.look(expected) == []
    now[0] = 1000.0
    assert dog.look(expected) == [], "0 is no limit, also for a process that has no heartbeat yet"
    for phase, limit in (("step", 10), ("save", 100), ("wait", 10)):
        heartbeat.beat(phase)
        assert dog.look(expected) == []
        now[0] += limit
        assert dog.look(expected) == []
        now[0] += 1
        assert [str(stall) for stall in dog.look(expected)] == [
            f"rank-0 has made no progress in phase {phase} for {limit + 1} s"
        ]
        heartbeat.beat()
        assert dog.look(expected) == []


def test_stacks_on_request(heartbeats: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BEATING, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "beating\n"
            (beat,) = read_heartbeats(heartbeats)
            assert (beat.process, beat.pid, beat.phase) == ("rank-0", process.pid, "step")
            Watchdog(heartbeats, PatienceConfig()).signal(signal.SIGUSR1, "rank-")
            stacks, deadline = Run(tmp_path).stacks(1, "rank-0"), time.monotonic() + 10
            while "in <module>" not in stacks.read_text():
                assert time.monotonic() < deadline, stacks.read_text()
                time.sleep(0.05)
            assert process.poll() is None
        finally:
            process.kill()


def test_first_node_that_does_not_answer_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_NO_ANSWER_S", 0.2)
    monkeypatch.setattr(watchdog, "_PROBE_S", 0.02)
    run = Run(tmp_path)
    neighbours = Neighbours(run, 1, 1, [0], ["n1", "n2"])

    def asked(seconds: float) -> str | None:
        deadline, lost = time.monotonic() + seconds, None
        while lost is None and time.monotonic() < deadline:
            lost = neighbours.lost()
            time.sleep(0.01)
        return lost

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        StatusWriter(run, "controller", 1).write("serving", url=url)
        assert asked(0.5) is None
    first, until = StatusWriter(run, "agent-0", 1), time.monotonic() + 0.6
    while time.monotonic() < until:
        first.write(f"watching {time.monotonic()}")
        assert neighbours.lost() is None, "it lives, and tells itself why its controller ended"
        time.sleep(0.02)
    lost = asked(5)
    assert lost is not None
    assert lost.startswith("n1, the first node, does not answer")
    StatusWriter(run, "controller", 1).write("finished", url=url)
    assert asked(0.5) is None, "a controller that has finished does not answer either"


def test_trainer_node_of_which_nothing_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_SILENT_S", 0.3)
    monkeypatch.setattr(watchdog, "_PROBE_S", 0.02)
    run = Run(tmp_path)
    first = Neighbours(run, 1, 0, [0, 1], ["n1", "n2", "n3"])
    other = StatusWriter(run, "agent-1", 1)
    began, lost = time.monotonic(), None
    while time.monotonic() < began + 0.6:
        other.write(f"watching {time.monotonic()}")
        assert first.lost() is None
        time.sleep(0.02)
    while lost is None:
        assert time.monotonic() < began + 10
        lost = first.lost()
        time.sleep(0.02)
    assert lost.startswith("nothing was heard of n2, a node that the run needs")


def test_node_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_START_S", 0.3)
    monkeypatch.setattr(watchdog, "_PROBE_S", 0.02)
    run = Run(tmp_path)
    first = Neighbours(run, 1, 0, [0], ["n1", "n2", "n3"])
    StatusWriter(run, "agent-1", 1).write("watching")
    deadline, lost = time.monotonic() + 10, None
    while lost is None:
        assert time.monotonic() < deadline
        lost = first.lost()
        time.sleep(0.02)
    assert lost.startswith("nothing was heard of n3 for")
    assert "slurm.root must lie on a filesystem that all nodes share" in lost


def test_first_node_that_is_gone_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address answers nothing: as long as its process status is renewed, that is the network's trouble."""
    monkeypatch.setattr(watchdog, "_SILENT_S", 0.3)
    monkeypatch.setattr(watchdog, "_PROBE_S", 0.02)
    run, zero = Run(tmp_path), StatusWriter(Run(tmp_path), "agent-0", 1)
    other = Neighbours(run, 1, 1, [0], ["n1", "n2"])
    began, lost = time.monotonic(), None
    while time.monotonic() < began + 0.8:
        zero.write(f"watching {time.monotonic()}")
        assert other.lost() is None
        time.sleep(0.02)
    while lost is None:
        assert time.monotonic() < began + 10
        lost = other.lost()
        time.sleep(0.02)
    assert lost.startswith("nothing was heard of n1, the first node")


def test_restarts_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    restarts = Restarts(budget=3)
    waits = []
    for _ in range(3):
        restarts.ended()
        assert restarts.due is not None
        waits.append(restarts.due - now[0])
        now[0] = restarts.due
        restarts.started()
    assert waits == [0.0, 5.0, 10.0]
    assert not restarts.given_up
    now[0] += 3600
    restarts.ended()
    assert restarts.used == 1, "it had worked for long"
    for _ in range(3):
        restarts.started()
        restarts.ended()
    assert restarts.given_up
