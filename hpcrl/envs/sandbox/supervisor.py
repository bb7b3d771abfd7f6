"""Runs a program and cleans up all its processes: python supervisor.py COMMAND…

It is the subreaper of what the program starts (man 2 prctl): a process whose parent has ended becomes its child, also one with a session
of its own. When the program ends, or on SIGTERM, or when its own parent ends, it kills all of them. It exits as the program did. A program
that kills its supervisor escapes that; what stays in its process group is the caller's to end.

It imports nothing but the standard library, little of it, and is started without site: a program is started for each sample.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_NOT_FOUND = 127


def main(command: list[str], parent: int) -> int:
    """Return the exit code of a command; 128 and the number of the signal that ended it.

    Args:
        parent: process whose end ends this.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _leave)
    libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        if os.getppid() != parent:
            return 128 + signal.SIGTERM
        try:
            program = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGTERM, signal.SIGPIPE])
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            return _NOT_FOUND
        while (ended := os.wait())[0] != program:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()


def _leave(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def end_children() -> None:
    """Kill all children, and those that become children because of it, until there are none."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)  # it is there until it is waited for
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):  # it has ended
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], int(sys.argv[1])))
