"""Processes of a vLLM server on this node, from /proc: whether all compute processes are there, and their shared memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hpcrl.runtime.scratch import SEGMENTS, SHARED_MEMORY, mapped_shared_memory

_PROC = Path("/proc")
_TITLE = "VLLM::"  # of the engine's cores and workers, which vLLM names itself


def group_of(leader: int) -> list[int]:
    """Return the processes of a process group, those that have ended and wait for their parent left out."""
    found = list[int]()
    for name in filter(str.isdigit, os.listdir(_PROC)):
        with suppress(OSError):
            # a name may be cut within a character
            state, _, group = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) == leader and state != b"Z":
                found.append(int(name))
    return found


def computes(pid: int) -> bool:
    """Return whether a process is there that is a core or a worker of an engine."""
    with suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace").startswith(_TITLE)
    return False


def shared_memory(leader: int) -> set[str]:
    """Return the names of the shared memory and semaphores, below /dev/shm, that the processes of a group have made for each other."""
    inodes = set[int]()
    for pid in group_of(leader):
        with suppress(OSError):
            # not by name: that of a semaphore is the one under which it was made
            inodes |= mapped_shared_memory(pid)
    # a worker maps others too, such as CUDA's
    entries = os.scandir(SHARED_MEMORY) if inodes else ()
    return {entry.name for entry in entries if entry.name.startswith(SEGMENTS) and entry.inode() in inodes}
