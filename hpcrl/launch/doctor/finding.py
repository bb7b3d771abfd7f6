"""One finding of `hpcrl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at, in a word or two.
        found: what it is.
        remedy: what to do, or what follows from it; may be empty where all is well.
    """

    level: Level
    subject: str
    found: str
    remedy: str = ""


def ok(subject: str, found: str, note: str = "") -> Finding:
    return Finding("ok", subject, found, note)


def warning(subject: str, found: str, remedy: str) -> Finding:
    return Finding("warning", subject, found, remedy)


def error(subject: str, found: str, remedy: str) -> Finding:
    return Finding("error", subject, found, remedy)
