"""Starts processes that follow a run's reports, such as to send them to trackers; none of them can end or block the run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.runtime.signals import die_with_parent

_LOOK_S = 0.1
_LAST_WORDS_S = 15.0


class Followers:
    """Starts them, and lets them know by the end of their standard input that nothing more is to come.

    Args:
        commands: by name, module and arguments for `python -m`; what a process says is in logs/<attempt>/<name>.log.
        niceness: how far they stand back for others where processors are scarce.
    """

    def __init__(self, run: Run, attempt: int, commands: Mapping[str, Sequence[str]], niceness: int = 0) -> None:
        self._run, self._attempt, self._commands, self._niceness = run, attempt, commands, niceness
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Followers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(_LAST_WORDS_S)

    def start(self) -> None:
        for name, command in self._commands.items():
            log = self._run.log(self._attempt, name)
            make_directory(log.parent)
            with log.open("ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *command],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                        preexec_fn=self._prepare,
                    )
                )

    def _prepare(self) -> None:
        die_with_parent()
        os.nice(self._niceness)

    def end(self, patience_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Let the followers send the rest; late ones are killed with their children, and all of them once `hurry` returns True."""
        deadline = time.monotonic() + patience_s
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() >= deadline or hurry():
                break
            time.sleep(_LOOK_S)
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def more(seconds: float = 2.0) -> bool:
    """Wait for a while, in such a process; return whether standard input is still open, and more may come."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return not ready
