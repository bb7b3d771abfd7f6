"""Renders chat templates in a process of its own, which bounds the time and the memory of a foreign template.

Jinja's sandbox bounds neither: three nested loops of 99,999 never end, and `'a' * 10 ** 11` takes 100 GB. The kernel ends the process when its
processor time is over (hpcrl/data/render_process.py); the next rendering starts another one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpcrl.errors import DataError, HpcrlError

SECONDS = 10
"""Processor time of one rendering."""
_SMALL = 1 << 20  # bytes of a request that no template needs that time for


class RefusedError(DataError):
    """A template raises an error for its messages, or is no Jinja; the message is the error's."""


class _Renderer:
    """The process that renders for this one. A process that was forked has its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._endless: set[str] = set()

    def render(self, template: str, options: Mapping[str, Any]) -> str:
        request = json.dumps((template, dict(options))).encode()
        with self._lock:
            if template in self._endless:
                raise DataError(_endless())
            answer, status = self._ask(request)
            if answer is None and status != -signal.SIGPROF:  # somebody else ended it
                answer, status = self._ask(request)
            if answer is not None:
                return answer
            if status != -signal.SIGPROF:
                raise HpcrlError(
                    f"the process that renders chat templates ended with status {status}; see the output above"
                )
            if len(request) - len(template) < _SMALL:
                self._endless.add(template)
            raise DataError(_endless())

    def _ask(self, request: bytes) -> tuple[str | None, int]:
        if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
            self._process, self._owner = _start(), os.getpid()
        answer = _answer(self._process, request)
        return answer, 0 if answer is not None else _end(self._process)


def _endless() -> str:
    return f"it did not end within {SECONDS} s of processor time; use another one (generator.chat_template)"


def _answer(process: subprocess.Popen[bytes], request: bytes) -> str | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(request).to_bytes(8, "little") + request)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    head = process.stdout.read(9)
    size = int.from_bytes(head[1:], "little")
    content = process.stdout.read(size) if len(head) == 9 else b""
    if len(head) < 9 or len(content) < size:
        return None
    text = content.decode("utf-8", "surrogatepass")
    if head[0]:
        raise RefusedError(text)
    return text


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hpcrl.data.render_process", str(SECONDS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end(process: subprocess.Popen[bytes]) -> int:
    with suppress(BrokenPipeError), process:
        pass
    return process.wait()


_RENDERER = _Renderer()


def render(template: str, options: Mapping[str, Any]) -> str:
    """Render a chat template.

    Args:
        options: arguments of transformers' `render_jinja_template` beside the template.

    Raises:
        RefusedError: the template raises an error, or needs more than 1 GiB.
        DataError: it does not end in `SECONDS` of processor time.
        TypeError, ValueError, AttributeError, RecursionError: the options cannot be sent to another process.
    """
    return _RENDERER.render(template, options)
