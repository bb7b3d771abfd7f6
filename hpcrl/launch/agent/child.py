"""Starts and supervises one process of an agent: its log, its end, its first error, and its restarts."""

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

from hpcrl import errors
from hpcrl.errors import ConfigError, DataError, UserCodeError
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.space import exhausted
from hpcrl.runtime.signals import die_with_parent

_TAIL = 64 << 10
# How torchrun ends its report of the first rank that failed.
_ROOT_CAUSE = re.compile(r"^Root Cause .*?^\s+rank +: (\d+).*?^\s+traceback : (.+?)^={20,}$", re.DOTALL | re.MULTILINE)
# Of a rank that ended while its script was read, or could write nothing.
_NO_TRACEBACK = re.compile(r"\s*To enable traceback see")
_OF_TORCHRUN = re.compile(r"(?:\S+: )?(?:torch\.distributed\.elastic\.[\w.]+\.)?ChildFailedError\b")
_OUR_NAMES = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
_OUR_ERROR = re.compile(rf"(?:hpcrl\.errors\.)?(?:{'|'.join(_OUR_NAMES)}): ")
_ERROR_LINE = re.compile(r"^(?:\S+: )?(?:[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*)$")


def _prepare(ignore_sigterm: bool) -> None:
    die_with_parent()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # torchrun dies of it; it gets the request by the stop file
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what the local executor starts
    if ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Child:
    """A running process in a process group of its own.

    Args:
        stop_signal: what asks it to end; it is killed if that does not help.
        ignore_sigterm: whether it ignores SIGTERM, which Slurm may send to every process, from its first moment on.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stop_signal: signal.Signals = signal.SIGTERM,
        ignore_sigterm: bool = False,
    ) -> None:
        self.name, self._log, self._stop_signal = name, log, stop_signal
        self._asked = False
        make_directory(log.parent)
        with log.open("ab") as file:
            self._start = file.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=partial(_prepare, ignore_sigterm),
            )

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """Return the end of what this process wrote to its log."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, size - _TAIL))
            return file.read().decode(errors="replace")

    def first_error(self) -> str:
        """Return why the process failed, in one line, with the log that has the rest."""
        full = exhausted(self._log)  # then the log may lack the last lines
        return f"{self.name}: {self._reason()}{f'; {full}' if full else ''} (log: {self._log})"

    def _reason(self) -> str:
        tail = self.log_tail()
        cause = _ROOT_CAUSE.search(tail)
        if cause and not _NO_TRACEBACK.match(cause[2]):
            return f"rank {cause[1]}: {cause[2].strip().splitlines()[-1].strip()}"
        rank = f"rank {cause[1]}: " if cause else ""
        lines = [line.strip() for line in tail.splitlines() if _ERROR_LINE.match(line.strip())]
        lines = [line for line in lines if not _OF_TORCHRUN.match(line)]
        if ours := [line for line in lines if _OUR_ERROR.match(line)]:
            return rank + ours[-1]
        status = self._process.returncode
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return rank + (lines[-1] if lines else ended)

    def kill_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def request_stop(self) -> None:
        """Ask the process to end, once."""
        if self.poll() is None and not self._asked:
            self._process.send_signal(self._stop_signal)
            self._asked = True

    def end(self, patience_s: float) -> None:
        """Ask the process to end, wait, then kill what is left of its group."""
        if self.poll() is None:
            self.request_stop()
            deadline = time.monotonic() + patience_s
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        self.kill_group(signal.SIGKILL)
        self._process.wait()


_WAIT_S, _LONGEST_WAIT_S = 5.0, 60.0
_RECOVERED_S = 1800.0

# Errors that every other replica would have too: the run itself is wrong.
_OF_THE_RUN = (ConfigError.exit_code, DataError.exit_code, UserCodeError.exit_code)


def concerns_the_run(status: int) -> bool:
    """Return whether the exit status of a replica or a service means an error that every other one would have too."""
    return status in _OF_THE_RUN


class Restarts:
    """The restarts of one replica or service in one attempt: the first at once, each further one after twice the time, up to a minute.

    Args:
        budget: restarts until it is given up; half an hour of work resets the count.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self.used = budget, 0
        self._started = time.monotonic()
        self.due: float | None = None

    @property
    def given_up(self) -> bool:
        return self.used > self._budget

    def ended(self) -> None:
        """It has failed: plan the next start, unless that was the last one."""
        if time.monotonic() - self._started > _RECOVERED_S:
            self.used = 0
        self.used += 1
        if not self.given_up:
            wait = 0.0 if self.used == 1 else min(_LONGEST_WAIT_S, _WAIT_S * 2 ** (self.used - 2))
            self.due = time.monotonic() + wait

    def give_up(self) -> None:
        self.used, self.due = max(self.used, self._budget + 1), None

    def started(self) -> None:
        self._started, self.due = time.monotonic(), None
