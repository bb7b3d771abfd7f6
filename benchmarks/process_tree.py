"""What the processes of a command take: memory and processor time, as /proc tells them, and the time of the whole command."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.2
_TOGETHER_S = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        command: its command line, words separated by spaces.
        peak_mib: the kernel's high-water mark of its resident memory, pages that it shares included.
        cpu_s: processor seconds so far.
    """

    command: str
    peak_mib: float
    cpu_s: float


@dataclass(frozen=True)
class Usage:
    """What a command took, with all processes below it.

    Attributes:
        cpu_s: sum of the processor seconds of its processes.
        peak_mib: sum of their peaks, whenever each had it; pages that processes share count for each of them.
        together_mib: most that they had at the same time, with each page counted once.
    """

    returncode: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    together_mib: float


def descendants(roots: set[int]) -> dict[int, Process]:
    """Return `roots` and the processes below them, by process id."""
    stats: dict[int, list[str]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                stats[int(directory.name)] = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
    found = {}
    for pid, fields in stats.items():
        ancestor = pid
        while ancestor not in roots and ancestor in stats:
            ancestor = int(stats[ancestor][1])
        if ancestor not in roots:
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), None)
        if peak:  # one that has ended has none
            found[pid] = Process(command, peak / 1024, sum(map(int, fields[11:13])) / _TICKS)
    return found


def together_mib(pids: Iterable[int]) -> float:
    """Return the memory that processes have now: of a page that several share, each has its part (PSS)."""
    kib = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        kib += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return kib / 1024


def measured(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command to its end and return what it took; what it prints goes to `log`.

    Processes are looked at five times a second, at the memory that they have together once a second, because the kernel looks at each page
    for it: what each does after the last look is not counted.
    """
    began, seen, together, looked = time.monotonic(), dict[int, Process](), 0.0, 0.0
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        while process.poll() is None:
            living = descendants({process.pid})
            seen |= living  # the last of a process counts: what it was before exec is not its own
            if time.monotonic() > looked + _TOGETHER_S:
                together, looked = max(together, together_mib(living)), time.monotonic()
            time.sleep(_POLL_S)
    return Usage(
        process.returncode,
        time.monotonic() - began,
        sum(one.cpu_s for one in seen.values()),
        sum(one.peak_mib for one in seen.values()),
        together,
    )
