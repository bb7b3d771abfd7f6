"""One process that an agent starts and supervises: its log, its end, its first error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcrl.run.parent import die_with_parent

_TAIL = 64 << 10
# How torchrun ends its report of the first rank that failed.
_ROOT_CAUSE = re.compile(r"^Root Cause .*?^\s+rank +: (\d+).*?^\s+traceback : (.+?)^={20,}$", re.DOTALL | re.MULTILINE)
_OUR_ERROR = re.compile(r"(?:hpcrl\.errors\.)?(?:Hpcrl|Config|Submit|Data|Run|Commit|Engine|UserCode)Error: ")
_ERROR_LINE = re.compile(r"^(?:\S+: )?(?:[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*)$")


def _prepare(deaf: bool) -> None:
    die_with_parent()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # torchrun dies of it; the stop file says the same
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what the local executor starts
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Child:
    """A running process in a process group of its own.

    Args:
        stop_signal: what asks it to end; it is killed if that does not help.
        deaf: whether it ignores SIGTERM, which Slurm may send to every process, from its first moment on.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stop_signal: signal.Signals = signal.SIGTERM,
        deaf: bool = False,
    ) -> None:
        self.name, self._log, self._stop_signal = name, log, stop_signal
        self._asked = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._start = file.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=partial(_prepare, deaf),
            )

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        """Return the end of what this process wrote to its log."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, size - _TAIL))
            return file.read().decode(errors="replace")

    def first_error(self) -> str:
        """Return why the process failed, in one line, with the log that has the rest."""
        return f"{self.name}: {self._reason()} (log: {self._log})"

    def _reason(self) -> str:
        if cause := _ROOT_CAUSE.search(self.said()):
            return f"rank {cause[1]}: {cause[2].strip().splitlines()[-1].strip()}"
        lines = [line.strip() for line in self.said().splitlines() if _ERROR_LINE.match(line.strip())]
        if ours := [line for line in lines if _OUR_ERROR.match(line)]:
            return ours[-1]
        status = self._process.returncode
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return lines[-1] if lines else ended

    def kill_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def ask(self) -> None:
        """Ask the process to end, once."""
        if self.poll() is None and not self._asked:
            self._process.send_signal(self._stop_signal)
            self._asked = True

    def end(self, patience_s: float) -> None:
        """Ask the process to end, wait, then kill what is left of its group."""
        if self.poll() is None:
            self.ask()
            deadline = time.monotonic() + patience_s
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        self.kill_group(signal.SIGKILL)
        self._process.wait()
