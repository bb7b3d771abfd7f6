"""A conversation with `hpcrl.launch.doctor.node` on a compute node, through the pipes of srun."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_LEAVING_S = 10.0


class Silent(Exception):
    """The node's process ended, or did not answer in time; the message has srun's output."""


class Talk:
    """Starts the command and talks with it; its end is the end of the command.

    Raises:
        Silent: there is no such program.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the conversation
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        except OSError as error:
            self._errors.close()
            raise Silent(f"{command[0]}: {error.strerror}") from None
        self._heard = b""

    def say(self, **request: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Silent(self._complaint()) from None

    def hear(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            Silent: there is none.
        """
        assert self._process.stdout
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Silent(self._complaint() or f"no answer in {limit_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._process.wait()
                raise Silent(self._complaint() or f"it ended with exit code {self._process.returncode}")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def ask(self, limit_s: float, /, **request: str) -> dict[str, Any]:
        self.say(**request)
        return self.hear(limit_s)

    def _complaint(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()  # the node ends by itself
        for end in (lambda: None, process.terminate, process.kill):
            end()
            try:
                process.wait(_LEAVING_S)
                break
            except subprocess.TimeoutExpired:
                continue
        if process.stdout:
            process.stdout.close()
        self._errors.close()
