"""Reads which cases passed from the output of test programs: pytest's summary and its verbose lines, and unittest's, which Django prints too."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_SUMMARY = re.compile(rf"({_STATUS}) (\S+(?:::|\.py\b).*)")
_VERBOSE = re.compile(rf" ({_STATUS})(?!\S)")
_UNITTEST = re.compile(r"(\S.*?) \.\.\. (ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)")
_PASSED = {"PASSED", "XFAIL", "ok", "expected failure"}
_LEFT_OUT = ("SKIPPED", "skipped")


def outcomes(output: str) -> dict[str, bool]:
    """Return whether each test case passed, by its name; skipped ones are left out. A case that is named twice has passed if both say so."""
    found = dict[str, bool]()
    for line in _COLOUR.sub("", output).splitlines():
        text = line.strip()
        if (match := _SUMMARY.fullmatch(text)) is not None:
            status, name = match[1], match[2] if match[1] == "PASSED" else match[2].partition(" - ")[0]
        elif "::" in text.partition(" ")[0] and (
            match := _VERBOSE.search(text)
        ):  # a policy writes lines too: linear in time
            name, status = text[: match.start()], match[1]
        elif match := _UNITTEST.fullmatch(text):
            name, status = match[1], match[2]
        else:
            continue
        if not status.startswith(_LEFT_OUT):
            found[name] = found.get(name, True) and status in _PASSED
    return found


def share_passed(names: Iterable[str], found: dict[str, bool]) -> float:
    """Return the share of named cases that passed, 1 where none is named; one that was not run has not."""
    passed = [found.get(name, False) for name in names]
    return sum(passed) / len(passed) if passed else 1.0
