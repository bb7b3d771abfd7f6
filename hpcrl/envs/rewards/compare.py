"""Compares mathematical answers in a process of its own: python compare.py SECONDS

Reads a line of JSON [ground truth, response] from its input, writes one with true, false, or null where the ground truth cannot be
read, and so on until the input ends. If a comparison takes more than SECONDS, the system ends the process, whatever it is busy with.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import ExtractionTarget

_LATEX, _ANYTHING = (LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig())
_MEMORY = 8 * 2**30  # bytes of address space; an expression such as 9^{9^{9}} would take all there is


def main(seconds: float) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    logging.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = json.dumps(same(*json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, file=answers, flush=True)


def same(truth: str, text: str) -> bool | None:
    expected = _parsed(truth, _LATEX) or _parsed(f"\\boxed{{{truth}}}", _LATEX)
    return verify(expected, _parsed(text, _ANYTHING), timeout_seconds=None) if expected else None


def _parsed(text: str, kinds: Sequence[ExtractionTarget]) -> list[Any]:
    return parse(text, kinds, parsing_timeout=None)  # type: ignore[arg-type]  None is what its documentation names


if __name__ == "__main__":
    main(float(sys.argv[1]))
