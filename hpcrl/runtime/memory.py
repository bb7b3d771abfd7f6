"""Host memory of processes, as Linux counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GIB = 2**30
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def resident(pid: int | str = "self") -> int:
    """Return the bytes that a process has in memory (its resident set), those that it shares with others included; 0: it has ended."""
    with suppress(OSError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE
    return 0


def resident_with_children(pid: int | None = None) -> int:
    """Return the bytes of a process, of this one where it is None, and of all that it has started, and they. Shared pages count in each."""
    pid = os.getpid() if pid is None else pid
    return resident(pid) + sum(map(resident_with_children, _children(pid)))


def _children(pid: int) -> list[int]:
    found = list[int]()
    with suppress(OSError):  # it has ended, or this kernel does not tell (CONFIG_PROC_CHILDREN)
        for task in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
