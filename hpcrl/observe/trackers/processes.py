"""The processes that send a run's metrics to its trackers; none of them can end or hold up the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.runtime.signals import die_with_parent

_WRITTEN_ANYWAY = "tensorboard"
_LAST_WORDS_S = 15.0


def trackers_of(logger: str | list[str]) -> list[str]:
    """Return the trackers that trainer.logger names, without TensorBoard, whose files every run has."""
    names = [logger] if isinstance(logger, str) else logger
    return [name for name in dict.fromkeys(names) if name != _WRITTEN_ANYWAY]


class Trackers:
    """One process per tracker, for as long as the `with` block lasts; what they say is in logs/<attempt>/tracker-<name>.log."""

    def __init__(self, run: Run, attempt: int, names: Iterable[str]) -> None:
        self._run, self._attempt, self._names = run, attempt, names
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Trackers:
        for name in self._names:
            log = self._run.log(self._attempt, f"tracker-{name.replace(':', '.')}")
            make_directory(log.parent)
            with log.open("ab") as said:
                command = [sys.executable, "-m", "hpcrl.observe.trackers.send", str(self._run.path), name]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=said,
                        stderr=said,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                )
        return self

    def __exit__(self, *_: object) -> None:
        """Let them send the rest; one that takes too long is killed, with what it started."""
        deadline = time.monotonic() + _LAST_WORDS_S
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
