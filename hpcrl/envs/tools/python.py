"""Runs the policy's Python programs, each in a process with limits."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, cast

from hpcrl.config.sections.environment import PythonToolConfig
from hpcrl.envs.sandbox import program
from hpcrl.errors import ConfigError

SECONDS = 10.0
"""Wall time of a program, the interpreter's start included."""

CHARACTERS = 8000
"""What a program may print; it is ended when it prints more."""

_ROOT = str(Path(program.__file__).parents[3])
_START = f"import sys; sys.path.insert(0, {_ROOT!r}); from {program.__name__} import main; del sys.path[0]; main()"
_COMMAND = [sys.executable, "-I", "-B", "-X", "utf8", "-c", _START]
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ran:
    """What became of a program.

    Attributes:
        output: what it printed, errors too, cut to `CHARACTERS`.
        ended: why it was ended; empty where it ended by itself.
        failed: whether it was ended, or its exit status was not 0.
    """

    output: str
    ended: str
    failed: bool


def run_python(code: str, seconds: float = SECONDS) -> Ran:
    """Run a program in a directory of its own, which is gone afterwards; see hpcrl/envs/sandbox/program.py for its limits.

    Raises:
        OSError: no process or no directory can be made.
    """
    directory = tempfile.mkdtemp(prefix="hpcrl-python-")
    try:
        with tempfile.TemporaryFile() as source:
            source.write(code.encode(errors="replace"))
            source.seek(0)
            return _run(source, directory, seconds)
    finally:
        discard_tree(directory)


def discard_tree(*paths: Path | str) -> None:
    """Remove what a program of the policy may have made: directories that nobody may enter, and deeper ones than shutil.rmtree goes."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", *paths], stderr=subprocess.DEVNULL, check=False)


def _run(source: IO[bytes], directory: str, seconds: float) -> Ran:
    process = subprocess.Popen(
        _COMMAND,
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env={**_ENVIRONMENT, "HOME": directory, "TMPDIR": directory},
        start_new_session=True,
    )
    try:
        output, ended = _read(cast(IO[bytes], process.stdout), time.monotonic() + seconds)
        if ended == "":
            with suppress(subprocess.TimeoutExpired):  # it has closed its output, but may go on
                process.wait(2.0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        cast(IO[bytes], process.stdout).close()
    if ended is None:
        ended = f"it took more than {seconds:g} s"
    elif process.returncode == -signal.SIGXCPU:
        ended = f"it took more than {program.SECONDS} s of processor time"
    elif not ended and process.returncode < 0:
        ended = f"signal {signal.Signals(-process.returncode).name}"
    return Ran(output, ended, bool(ended) or process.returncode != 0)


def _read(pipe: IO[bytes], deadline: float) -> tuple[str, str | None]:
    """Return what comes out of the pipe, and why it is not all: None for too late, empty where it is."""
    content, most_bytes = bytearray(), 4 * CHARACTERS
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            piece = os.read(pipe.fileno(), 65536)
            content += piece
            text = content.decode(errors="replace") if not piece or len(content) > CHARACTERS else ""
            if len(text) > CHARACTERS or len(content) > most_bytes:
                return text[:CHARACTERS], f"it printed more than {CHARACTERS} characters"
            if not piece:
                return text, ""
    return content.decode(errors="replace")[:CHARACTERS], None


@cache
def lacking() -> list[str]:
    """Return what this node cannot keep programs from; empty where it can do all that the sandbox knows."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-python-") as directory:
        command = [*_COMMAND, "--lacking"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=directory, check=True
        )
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def check_sandbox(config: PythonToolConfig) -> None:
    """Let programs run only where they can be confined. Raises ConfigError where this node cannot, and it is required."""
    if found := lacking():
        what = f"{socket.gethostname()} cannot keep the policy's programs from {'; '.join(found)}"
        if config.require_sandbox:
            raise ConfigError(
                f"python_tool: {what}. Run on nodes that can (docs/environments/python_tool.md), or set "
                "environment.skyrl_gym.python_tool.require_sandbox=false if you trust what the policy may write"
            )
        _say_once(f"python_tool: {what}")


@cache
def _say_once(what: str) -> None:
    print(what, flush=True)
