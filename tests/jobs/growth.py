"""What grows with the steps of a run: memory, descriptors and threads of its processes, files and bytes of its directory.

python -m tests.jobs.growth RUN [SECONDS]    a line of JSON every so often, until the run has ended
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import read_process_status
from tests.processes import command_of, processes_of, variable

_STARTED_BY = (
    ("/jobs/controller.py", "controller"), ("/jobs/rollout.py", "rollout-{HPCRL_REPLICA}"),
    ("/jobs/train.py", "rank-{RANK}"), ("submitit.core._submit", "agent-{SUBMITIT_LOCAL_GLOBALID}"), ("submitit.local", "local job"), ("follow", "follow"),
)  # fmt: skip
_VARIABLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Process:
    """What a process holds.

    Attributes:
        memory: bytes of its own, without those of files that it maps (RssAnon).
        step: what it had done then.
    """

    memory: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Measurement:
    """A run at one moment.

    Attributes:
        folders: files and bytes by folder of the run directory, files of the run directory itself by name.
    """

    step: int
    attempt: int
    time: float
    processes: dict[str, Process] = field(default_factory=dict)
    folders: dict[str, tuple[int, int]] = field(default_factory=dict)


def measure(run: Run) -> Measurement:
    """Return what a run holds now."""
    attempt = max((attempt.number for attempt in read_attempts(run)), default=0)
    status = read_process_status(run, "trainer", attempt)
    step = status.facts.get("step", 0) if status else 0
    found = {}
    for pid in processes_of(run):
        name = name_of(pid)
        if name and (process := _process(pid)):
            found[name] = process
    return Measurement(step, attempt, time.time(), found, folders_of(run.path))


def name_of(pid: int) -> str | None:
    """Return the role of a process of a run, or None for one that only passes, such as a shell."""
    command = command_of(pid)
    for word, name in _STARTED_BY:
        if word in command:
            return _VARIABLE.sub(lambda match: variable(pid, match[1]) or "0", name)
    return None


def _process(pid: int) -> Process | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended
        return None
    facts = dict(line.split(":", 1) for line in status.splitlines())
    return (
        Process(int(facts["RssAnon"].split()[0]) * 1024, descriptors, int(facts["Threads"]))
        if "RssAnon" in facts
        else None
    )


def folders_of(path: Path) -> dict[str, tuple[int, int]]:
    """Return files and bytes by folder at the first level."""
    found = {}
    for entry in os.scandir(path):
        files = [entry.path]
        if entry.is_dir(follow_symlinks=False):
            files = [os.path.join(folder, name) for folder, _, names in os.walk(entry.path) for name in names]
        sizes = []
        for name in files:
            try:
                sizes.append(os.lstat(name).st_size)
            except FileNotFoundError:  # deleted meanwhile
                continue
        found[entry.name] = (len(sizes), sum(sizes))
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope of y over x."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def main(path: str, seconds: float = 30.0) -> None:
    run = Run.open(path)
    while True:
        measured = measure(run)
        print(json.dumps(asdict(measured)), flush=True)
        if not measured.processes:
            return
        time.sleep(seconds)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3]))
