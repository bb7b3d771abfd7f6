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


def renamed(source: str, target: str, names: str) -> dict[str, Target]:
    """Return targets of several fields of the table `source`, in the table `target`.

    Args:
        names: separated by spaces: a name that stays as it is, or `old=new`.
    """
    pairs = [name.partition("=") for name in names.split()]
    return {f"{source}.{old}": To(f"{target}.{new or old}") for old, _, new in pairs}


def alike(source: str, names: str, target: Target) -> dict[str, Target]:
    """Return one target for several fields, separated by spaces, of the table `source`."""
    return {f"{source}.{name}": target for name in names.split()}
