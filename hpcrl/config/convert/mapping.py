"""What becomes of a setting of another framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class To:
    """It is the setting at `path` here.

    Attributes:
        values: the source's values that are written differently here; others stay as they are.
    """

    path: str
    values: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Translated:
    """It decides, with others, about the settings at `paths`.

    Attributes:
        how: the rule, for documentation and report.
    """

    paths: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class Dropped:
    """It has no place here.

    Attributes:
        reason: why, and what replaces it.
    """

    reason: str


Target = To | Translated | Dropped
