"""The processes of a run, found through /proc: those of the cluster are the machine's, too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpcrl.rundir.layout import Run


def processes_of(run: Run) -> list[int]:
    """Return all living processes of a run: its directory or its code are named in their command line or environment."""
    needles = [os.fsencode(f"{run.path}/"), os.fsencode(f"{run.path}\0"), os.fsencode(f"{run.slurm.resolve()}/")]
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            text = (directory / "cmdline").read_bytes() + b"\0" + (directory / "environ").read_bytes()
            state = (directory / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if state not in b"ZX" and int(directory.name) != os.getpid() and any(needle in text for needle in needles):
            found.append(int(directory.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def child_of(pid: int) -> int | None:
    """Return a child of a process, or None where it has none or is gone."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def ancestors_of(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = parent_of(pid)
        found.append(pid)
    return found


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, be it waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def is_srun(pid: int) -> bool:
    return command_of(pid).partition(" ")[0].endswith("srun")


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, or is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return True


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def variable(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was started with."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)
    return pairs.get(name)


def replica_of(pid: int) -> str | None:
    return variable(pid, "HPCRL_REPLICA")


def send(pids: Sequence[int], *numbers: signal.Signals) -> None:
    """Send signals, one kind after the other, to processes that may have ended meanwhile."""
    for number in numbers:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def errors_without_reader(command: Sequence[str], asked: bytes) -> bytes:
    """Return what a process prints to its standard error where who asks has gone: its answer has no reader any more."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.write(asked)
        process.stdin.close()
        return process.stderr.read()
