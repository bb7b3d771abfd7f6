"""Compares mathematical answers in a process of its own: python -m hpcrl.envs.rewards.compare SECONDS

Reads a line of JSON [ground truth, response] from its input, writes one with true, false, or null where the ground truth cannot be
read, and so on until the input ends. An empty line before all others says that it is ready. If a comparison takes more than SECONDS
of processor time, the system ends the process, whatever it is busy with; how busy the machine is makes no difference. A comparison
waits for nothing, so that it cannot last without using up that time.
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
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print(file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(same(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=answers, flush=True)


def same(truth: str, text: str) -> bool | None:
    expected = _parsed(truth, _LATEX) or _parsed(f"\\boxed{{{truth}}}", _LATEX)
    return verify(expected, _parsed(text, _ANYTHING), timeout_seconds=None) if expected else None


def _parsed(text: str, kinds: Sequence[ExtractionTarget]) -> list[Any]:
    return parse(text, kinds, parsing_timeout=None)  # type: ignore[arg-type]  None is what its documentation names


if __name__ == "__main__":
    main(float(sys.argv[1]))
