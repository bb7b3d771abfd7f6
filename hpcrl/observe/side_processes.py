"""Processes beside another one, which look at what a run reports; none of them can end or hold up the run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.runtime.signals import die_with_parent

_LAST_WORDS_S = 15.0
_EVERY_S = 2.0


class SideProcesses:
    """Processes that go on for as long as the `with` block lasts; what they say is in logs/<attempt>/<name>.log.

    Args:
        modules: by name, a module that is run and its arguments.
    """

    def __init__(self, run: Run, attempt: int, modules: Mapping[str, Sequence[str]]) -> None:
        self._run, self._attempt, self._modules = run, attempt, modules
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SideProcesses:
        for name, module in self._modules.items():
            log = self._run.log(self._attempt, name)
            make_directory(log.parent)
            with log.open("ab") as said:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *module],
                        stdin=subprocess.PIPE,
                        stdout=said,
                        stderr=said,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                )
        return self

    def __exit__(self, *_: object) -> None:
        """Let them do the rest; one that takes too long is killed, with what it started."""
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


def more() -> bool:
    """Wait for a while, in such a process; return whether standard input is still open, and more may come."""
    ready, _, _ = select.select([sys.stdin], [], [], _EVERY_S)
    return not ready
