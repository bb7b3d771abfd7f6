"""Processes under Nsight Systems: the command line, the signals and exit statuses that pass through it, and a node without it.

The stand-in takes nsys's place on PATH: it keeps its arguments, runs the program as its child, and leaves a report.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import DeviceError
from hpcrl.launch.agent.nsight import records_engines, records_ranks
from hpcrl.launch.agent.preflight import check_node
from hpcrl.launch.agent.processes import NodeProcesses
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.agent.watchdog import Watchdog
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import read_heartbeats
from tests.paths import QUICKSTART

NSYS = """#!/usr/bin/env python3
import json, os, re, subprocess, sys
words = sys.argv[2:]
own = [word for word in words[: next(at for at, word in enumerate(words) if not word.startswith("--"))]]
report = next(word.removeprefix("--output=") for word in own if word.startswith("--output="))
report = re.sub(r"%q\\{(\\w+)\\}", lambda name: os.environ[name[1]], report)
with open(report + ".nsys-rep", "w") as file:
    json.dump(sys.argv[1:], file)
code = subprocess.call(words[len(own) :])
sys.exit(code if code >= 0 else 128 - code)
"""
TRAIN = """
import os, signal, sys, time
from pathlib import Path
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))
Heartbeat(Run(Path(sys.argv[1])), 1, "rank-" + os.environ["RANK"])
while not asked:
    time.sleep(0.02)
Path(sys.argv[1], "saved-" + os.environ["RANK"]).touch()
sys.exit(3)
"""
GPUS = ["slurm.gpus_per_node=2", "trainer.profiler.enable_nsys=true"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path / "run")
    write_text(run.code / "jobs" / "train.py", TRAIN)
    write_text(run.code / "jobs" / "rollout.py", "print('rolled out')")
    write_text(tmp_path / "bin" / "nsys", NSYS, mode=0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return run


@pytest.fixture
def start(run: Run) -> Iterator[Callable[..., NodeProcesses]]:
    started = list[NodeProcesses]()

    def make(*settings: str, index: int = 0) -> NodeProcesses:
        config = Config.from_toml([QUICKSTART], [*GPUS, *settings])
        context = NodeContext(index, ["here"] * 2, "local-1", 0, True)
        started.append(NodeProcesses(run, config, context, 1, make_plan(config)[index], 5.0))
        return started[-1]

    yield make
    for processes in started:
        processes.end(0.0)


def await_true(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_get_their_signals_and_their_exit_status_is_seen(
    run: Run, start: Callable[..., NodeProcesses], ranks: int
) -> None:
    processes = start(f"trainer.placement.policy_num_gpus_per_node={ranks}")
    processes.publish_rendezvous()
    processes.follow_rendezvous()
    trainer = processes.children["trainer-0"]
    await_true(lambda: len(read_heartbeats(processes.heartbeats)) == ranks or trainer.poll() is not None)
    trainer.kill_group(signal.SIGTERM)  # as Slurm does to all processes of a job: it ends none of them
    Watchdog(processes.heartbeats, Config.from_toml([QUICKSTART]).slurm.patience).signal(signal.SIGUSR2, "rank-")
    await_true(lambda: trainer.poll() is not None)
    assert trainer.poll() == (3 if ranks == 1 else 1), trainer.log_tail()
    if ranks > 1:
        assert "exitcode  : 3" in trainer.log_tail()
    for rank in range(ranks):
        assert (run.path / f"saved-{rank}").exists()
        command = run.nsys_report(1, f"rank-{rank}").read_text()
        for option in ("profile", "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none"):
            assert f'"{option}"' in command
        assert "rank-%q{RANK}" in command


def test_engines_where_they_are_asked_for(run: Run, start: Callable[..., NodeProcesses]) -> None:
    processes = start("trainer.profiler.nsys_engine_iterations=20", "generator.inference_engine.backend=vllm", index=1)
    processes.start_worker("rollout-0")
    await_true(lambda: processes.ended("rollout-0"))
    assert "rolled out" in processes.children["rollout-0"].log_tail()
    assert "--cuda-graph-trace=node" in run.nsys_report(1, "rollout-0").read_text()


def test_nodes_without_a_recorded_rank_run_as_ever() -> None:
    config = Config.from_toml([QUICKSTART], GPUS)
    trainer, rollout = Node(1, "trainer", 4, (), 4, 0, first_rank=4), Node(2, "rollout", 0, (0,), 1, 8)
    profiler = replace(config.trainer.profiler, ranks=[3])
    assert not records_ranks(profiler, trainer)
    assert records_ranks(profiler, replace(trainer, index=0, first_rank=0))
    assert not records_ranks(replace(profiler, enable_nsys=False), replace(trainer, index=0, first_rank=0))
    assert not records_engines(profiler, rollout)
    recorded = replace(profiler, nsys_engine_iterations=5)
    assert records_engines(recorded, rollout)
    assert not records_engines(recorded, trainer)


def test_a_node_without_nsys_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config, node = Config.from_toml([QUICKSTART], GPUS), Node(0, "trainer", 1, (), 0, 0)
    context = NodeContext(0, ["here"], "local-1", 0, True)
    run.path.mkdir(exist_ok=True)
    check_node(run, config, node, context, None)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(DeviceError, match=r"not on the PATH of .*/usr/bin:/bin\): .* slurm\.setup"):
        check_node(run, config, node, context, None)
