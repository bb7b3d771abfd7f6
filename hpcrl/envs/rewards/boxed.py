"""A reward for mathematical answers that are compared by computer algebra (math-verify)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, cast

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import Response, ground_truth
from hpcrl.errors import HpcrlError, UserCodeError

SECONDS = 10.0
"""Processor time that one comparison may take; sympy can be busy for ever with an answer of a few characters."""

_PROCESSES = min(8, len(os.sched_getaffinity(0)))


def boxed_math(response: Response, _environment: EnvironmentConfig) -> float:
    r"""Return 1 if the answer is mathematically the ground truth, else 0.

    Formulas are compared by a package (math-verify, https://github.com/huggingface/Math-Verify).

    The answer is the last \boxed{…} of the text behind </think>, or without a box another formula, or else the last number. Numbers
    count as equal that agree in six decimal places. A last box that does not end is wrong. The ground truth is LaTeX with or without
    \boxed{…} or $…$. Math-verify takes most that it cannot read as a text, with which hardly any answer agrees, and only the rest is an
    error. An answer that cannot be read, or whose comparison takes more than `SECONDS` of processor time or more memory than there is, is
    wrong.

    Formula:
        1 if `\boxed{…}` is mathematically equal to the ground truth
    Use:
        formulas and numbers in LaTeX
    Raises:
        DataError: the row has no ground truth.
        UserCodeError: nothing can be made of the ground truth, or math-verify failed at the comparison.
        HpcrlError: math-verify is not installed.
    """
    truth = ground_truth(response.ground_truth)
    right = _COMPARERS.same(truth, response.text)
    if right is None:
        raise UserCodeError(f"expected a formula or a number as ground truth, found {truth!r:.80}")
    return float(right)


class _Comparers:
    """Processes that compare, as many as are busy at the same time.

    Threads of this process would not do: math-verify's own time limit works in a main thread only. No other thread runs while Python
    multiplies huge numbers.
    """

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_PROCESSES)
        self._idle: list[subprocess.Popen[str]] = []

    def same(self, truth: str, text: str) -> bool | None:
        question = json.dumps([truth, text])
        with self._free:
            while True:
                process = self._take()
                try:
                    print(question, file=process.stdin, flush=True)
                except BrokenPipeError:  # it died before it was asked, which is no answer
                    _end(process)
                    continue
                if answer := cast(IO[str], process.stdout).readline():
                    self._idle.append(process)
                    return json.loads(answer)
                if _end(process) > 0:  # otherwise a signal ended it: its time was over, or its stack or memory
                    raise UserCodeError(f"the comparison with {truth!r:.80} failed; its output above has the reason")
                return False

    def _take(self) -> subprocess.Popen[str]:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _start()
            if process.poll() is None:
                return process
            _end(process)


def _start() -> subprocess.Popen[str]:
    if find_spec("math_verify") is None:
        missing = ModuleNotFoundError("no module named 'math_verify'", name="math_verify")
        raise HpcrlError("comparing needs math-verify: pip install 'hpcrl[job]'") from missing
    command = [sys.executable, "-m", "hpcrl.envs.rewards.compare", str(SECONDS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if not cast(IO[str], process.stdout).readline():
        _end(process)
        raise HpcrlError("comparing cannot start, see the output above; is math-verify whole? pip install 'hpcrl[job]'")
    return process


def _end(process: subprocess.Popen[str]) -> int:
    """Return the exit status of a process that is dead or dying."""
    with suppress(BrokenPipeError), process:
        pass
    return process.wait()


_COMPARERS = _Comparers()
