"""Memory and processor time of a command's processes, and the time of the whole command."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_POLL_S = 0.2
_TOGETHER_S = 1.0


@dataclass(frozen=True)
class Usage:
    """Resources of a command, with all processes below it.

    Attributes:
        cpu_s: sum of the processor seconds of its processes.
        peak_mib: sum of the peaks of their resident memory; pages that processes share count for each of them.
        together_mib: most memory that they had at the same time, with each page counted once.
    """

    returncode: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    together_mib: float


def measured(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command to its end and return its resources; its output goes to `log`.

    Processes are read five times a second, their memory together once a second, because the kernel walks all pages for it. The time after
    the last reading of a process is not counted.
    """
    began, seen, together, looked = time.monotonic(), dict[int, tuple[float, float]](), 0.0, 0.0
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        root = psutil.Process(process.pid)
        while process.poll() is None:
            living = [root, *root.children(recursive=True)]
            # the last reading counts: before exec it was another program
            seen |= {one.pid: taken for one in living if (taken := _cpu_and_peak(one))}
            if time.monotonic() > looked + _TOGETHER_S:
                together, looked = max(together, sum(map(_own_mib, living))), time.monotonic()
            time.sleep(_POLL_S)
    cpu_s, peak_mib = (sum(column) for column in zip(*seen.values(), strict=True)) if seen else (0.0, 0.0)
    return Usage(process.returncode, time.monotonic() - began, cpu_s, peak_mib, together)


def _cpu_and_peak(process: psutil.Process) -> tuple[float, float] | None:
    """Return processor seconds and the peak of resident memory in MiB; None: the process has ended."""
    try:
        times = process.cpu_times()
        status = Path(f"/proc/{process.pid}/status").read_text()  # psutil has no peak on Linux
    except (OSError, psutil.Error):
        return None
    peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), None)
    return None if peak is None else (times.user + times.system, peak / 1024)


def _own_mib(process: psutil.Process) -> float:
    """Return the memory of a process; of a page that several share, each has its part (PSS)."""
    try:
        return process.memory_full_info().pss / 2**20
    except psutil.Error:  # it has ended
        return 0.0
