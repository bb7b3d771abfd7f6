"""A reward for mathematical answers that are compared by computer algebra (math-verify)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, cast

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import Response, ground_truth
from hpcrl.errors import DataError, HpcrlError

SECONDS = 10.0
"""What one comparison may take; sympy can be busy for ever with an answer of a few characters."""

_PROCESSES = min(8, os.cpu_count() or 1)


def boxed_math(response: Response, _environment: EnvironmentConfig) -> float:
    r"""Return 1 if the answer is mathematically the ground truth; otherwise 0.

    The answer is what \boxed{…} or another formula of the text holds, or else its last number; numbers count as equal that agree in
    six decimal places. The ground truth is LaTeX with or without \boxed{…} or $…$. An answer that cannot be read, or whose
    comparison takes more than `SECONDS` or more memory than there is, is wrong.

    Raises:
        DataError: the row has no ground truth, or it cannot be read.
        HpcrlError: math-verify is not installed.
    """
    truth = ground_truth(response)
    right = _COMPARERS.same(truth, response.text)
    if right is None:
        raise DataError(f"expected a formula or a number as ground truth, found {truth!r:.80}")
    return float(right)


class _Comparers:
    """Processes that compare, as many as are busy at the same time.

    Threads of this process would not do: math-verify's own bound on time works in a main thread only, and neither it nor any other
    thread comes to its turn while Python multiplies huge numbers.
    """

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_PROCESSES)
        self._idle: list[subprocess.Popen[str]] = []

    def same(self, truth: str, text: str) -> bool | None:
        with self._free:
            try:
                process = self._idle.pop()
            except IndexError:
                process = _start()
            answer = _ask(process, json.dumps([truth, text]))
            if answer:
                self._idle.append(process)
                return json.loads(answer)
        if process.wait() > 0:  # otherwise a signal ended it: its time was over, or its stack or memory
            raise HpcrlError("the comparison failed as told above; is math-verify installed? pip install 'hpcrl[job]'")
        return False


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("compare.py")), str(SECONDS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], question: str) -> str:
    to, back = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    try:
        print(question, file=to, flush=True)
        return back.readline()
    except BrokenPipeError:
        return ""


_COMPARERS = _Comparers()
