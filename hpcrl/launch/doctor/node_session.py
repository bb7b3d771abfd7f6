"""Sends requests to `hpcrl.launch.doctor.node` on a compute node, through the pipes of srun."""

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


class NoAnswerError(Exception):
    """A command, or the node's process, failed or did not answer in time; the message has its output."""


class NodeSession:
    """Starts a command, sends it requests and reads its answers; leaving the context ends the command.

    Raises:
        NoAnswerError: there is no such program.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        except OSError as error:
            self._errors.close()
            raise NoAnswerError(f"{command[0]}: {error.strerror}") from None
        self._received = b""

    def send(self, **request: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NoAnswerError(self._error_output()) from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            NoAnswerError: there is none.
        """
        assert self._process.stdout
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise NoAnswerError(self._error_output() or f"no answer in {limit_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._process.wait()
                raise NoAnswerError(self._error_output() or f"it ended with exit code {self._process.returncode}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def request(self, limit_s: float, /, **request: str) -> dict[str, Any]:
        self.send(**request)
        return self.receive(limit_s)

    def _error_output(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def __enter__(self) -> NodeSession:
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
