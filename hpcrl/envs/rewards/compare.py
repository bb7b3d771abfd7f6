"""Compares mathematical answers in a process of its own: python -m hpcrl.envs.rewards.compare SECONDS

Reads lines of JSON [ground truth, response] until the input ends, and writes a line for each: true, false, or null where the ground
truth cannot be parsed. An empty line before all others marks it ready. If a comparison takes more than SECONDS
of processor time, the system ends the process at any point; how busy the machine is makes no difference. A comparison
waits for nothing, so that it cannot last without using up that time.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import ExtractionTarget

from hpcrl.envs.rewards.answers import after_thought, as_latex, formula_of, last_box, plain_minus

_LATEX, _ANYTHING = (LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig())
# where a box cannot be parsed, no part is taken for the whole
_BOX = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)
_FULL_STOP = re.compile(r"(?<=\d)\.$")
_MEMORY = 8 * 2**30  # bytes of address space; an expression such as 9^{9^{9}} would take all there is


def main(seconds: float) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    logging.disable()
    # who asks ends with them, and takes a process that a signal has ended for a wrong answer
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    for one in (signal.SIGPROF, signal.SIGPIPE):  # the latter: who asks was killed
        signal.signal(one, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print(file=answers, flush=True)
    for line in sys.stdin:
        if not line.endswith("\n"):  # who asks was killed
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(same(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=answers, flush=True)


def same(truth: str, text: str) -> bool | None:
    """Return whether the answer in a response is the ground truth; None where the ground truth cannot be read."""
    answer = plain_minus(after_thought(text))
    box = last_box(answer)
    expected = _expected(truth)
    found = _parsed(answer, _ANYTHING) if box is None else _in_box(box)
    return verify(expected, found, timeout_seconds=None) if expected else None


def _expected(truth: str) -> list[Any]:
    """Read a ground truth as an answer in a box is read.

    A bare one is never searched for a formula: math-verify would take the first fraction of it for the whole.
    """
    formula = formula_of(truth)
    return _parsed(truth, _LATEX) or _in_box(truth) if formula is None else _in_box(formula)


def _in_box(formula: str) -> list[Any]:
    return _parsed(f"\\boxed{{{_FULL_STOP.sub('', as_latex(formula).strip())}}}", _BOX)


def _parsed(text: str, kinds: Sequence[ExtractionTarget]) -> list[Any]:
    return parse(text, kinds, parsing_timeout=None)  # type: ignore[arg-type]  None is what its documentation names


if __name__ == "__main__":
    main(float(sys.argv[1]))
