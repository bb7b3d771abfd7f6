"""Runs a program of the user's until it ends or is to end, with all that it starts."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from hpcrl.envs.sandbox import supervisor

CHARACTERS = 400
"""What is kept of a program's output: its end."""

_LOOK_S = 0.1
_KILL_S = 10.0


@dataclass(frozen=True)
class Finished:
    """What became of a program.

    Attributes:
        code: its exit code; None where it was ended.
        output: the end of what it printed, errors too.
    """

    code: int | None
    output: str


def run_supervised(
    command: Sequence[str], environment: Mapping[str, str], directory: Path, ended: threading.Event
) -> Finished:
    """Run a command in a directory until it ends, or `ended` is set; nothing that it started is left then."""
    process = subprocess.Popen(
        supervised(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env=environment,
        start_new_session=True,
    )
    output = cast(IO[bytes], process.stdout)
    try:
        text = _read(output, ended)
        return Finished(None if ended.is_set() else process.wait(), text)
    finally:
        end_supervised(process)
        output.close()


def supervised(command: Sequence[str]) -> list[str]:
    """Return the command that runs a command below a supervisor, as a child of this process."""
    return [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), *command]


def end_supervised(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor that was started in a session of its own, and with it all that its command has started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    if process.returncode is None or process.returncode < 0:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(output: IO[bytes], ended: threading.Event) -> str:
    """Return the end of what is printed, when the supervisor has closed its output or `ended` is set."""
    content = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not ended.is_set():
            if selector.select(_LOOK_S):
                piece = os.read(output.fileno(), 65536)
                if not piece:
                    break
                content = (content + piece)[-4 * CHARACTERS :]
    return content.decode(errors="replace")[-CHARACTERS:].strip()
