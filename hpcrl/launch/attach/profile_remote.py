"""Runs on the node for `hpcrl profile`: finds the process by its heartbeat, lets py-spy sample it, and prints the result.

python -m hpcrl.launch.attach.profile_remote RUN_DIRECTORY ATTEMPT PROCESS SECONDS FORMAT IDLE
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from hpcrl.errors import RunError
from hpcrl.launch.attach.remote import processes
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import DIRECTORY, read_heartbeats

PROGRAM = "py-spy"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PER_SECOND = 100
_REFUSED = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)
_NO_SAMPLES = re.compile(r"Samples: 0\b|No stack counts found", re.IGNORECASE)


def find(run: Run, attempt: int, process: str) -> int:
    """Return the process id of a process of an attempt on this machine.

    Raises:
        RunError: it does not run here.
    """
    found = processes(run, attempt)
    directories = {directory for _, environment in found.values() if (directory := environment.get(DIRECTORY))}
    for directory in sorted(directories):
        with suppress(FileNotFoundError):  # its agent is ending
            for beat in read_heartbeats(Path(directory)):
                if beat.process == process and beat.pid in found:
                    return beat.pid
    raise RunError(f"{process} of {run.name} does not run on {socket.gethostname()}; `hpcrl status` says what it does")


def record(pid: int, seconds: int, form: str, *, idle: bool) -> bytes:
    """Sample a process and its children; return py-spy's output.

    Raises:
        RunError: py-spy is missing, may not read the process, or found nothing.
    """
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}"
    program, host = shutil.which(PROGRAM, path=path), socket.gethostname()
    if program is None:
        raise RunError(f"{PROGRAM} is not installed on {host}: pip install 'hpcrl[profile]' in {sys.prefix}")
    with tempfile.TemporaryDirectory(prefix="hpcrl-profile-") as folder:
        result = Path(folder, "profile")
        command = [
            program, "record", "--nonblocking", "--subprocesses", f"--pid={pid}", f"--duration={seconds}",
            f"--rate={_PER_SECOND}", f"--format={form}", f"--output={result}", *["--idle"] * idle,
        ]  # fmt: skip
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        output = done.stdout + done.stderr
        if _NO_SAMPLES.search(output):
            raise RunError(f"the process waited for all of {seconds} s; --idle shows for what")
        if done.returncode or not result.exists():
            raise RunError(_reason(output, pid, host))
        return result.read_bytes()


def _reason(output: str, pid: int, host: str) -> str:
    """Return why py-spy failed, with the remedy where it may not read the process."""
    if not _REFUSED.search(output):
        lines = [line for line in output.splitlines() if line.startswith("Error")] or output.strip().splitlines()
        return f"{PROGRAM} on {host}: {lines[0] if lines else 'failed without a word'}"
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    reason = f"{PROGRAM} may not read process {pid} on {host}"
    if scope != "0":
        reason += (
            f": kernel.yama.ptrace_scope is {scope} there, so that a process is read by those alone that started it"
        )
    return (
        f"{reason}. Ask the administrators for ptrace_scope 0, or for `setcap cap_sys_ptrace=ep` on {PROGRAM}; a container "
        "needs the capability SYS_PTRACE. `hpcrl stacks` needs neither"
    )


def main(path: str, attempt: str, process: str, seconds: str, form: str, idle: str) -> None:
    run = Run(Path(path))
    try:
        found = record(find(run, int(attempt), process), int(seconds), form, idle=idle == "1")
    except RunError as error:
        sys.exit(f"hpcrl: {error}")
    sys.stdout.buffer.write(found)
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
