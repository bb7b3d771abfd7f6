"""Problems of a configuration: collected, told where they come from, raised together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from hpcrl.config.surface import Setting
from hpcrl.errors import ConfigError

_ALIKE = 0.7
_NEAR = 0.15
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: dotted path of the setting.
        message: what was expected and found, and the remedy.
    """

    path: str
    message: str


def raise_together(problems: Sequence[Problem], source_of: Callable[[str], str | None]) -> None:
    """Raise one error with a line per problem, or return if there is none.

    Args:
        source_of: file or override that set a dotted path; None for a default.

    Raises:
        ConfigError: there are problems.
    """
    if problems:
        raise ConfigError("\n".join(_line(problem, source_of(problem.path)) for problem in problems))


def _line(problem: Problem, source: str | None) -> str:
    return ": ".join(part for part in (source, problem.path, problem.message) if part)


def shown(value: Any) -> str:
    """Return a value as an error names it, with its kind."""
    if isinstance(value, dict):
        return "a table"
    kinds = {bool: "true or false", int: "whole number", float: "number", str: "text", list: "list", type(None): "null"}
    kind = kinds.get(type(value), type(value).__name__)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def unknown(path: str, known: Sequence[Setting]) -> Problem:
    """Return the problem of a name that does not exist, with the names that it may have meant."""
    parent, _, name = path.rpartition(".")
    scores: dict[str, float] = {}
    for setting in known:
        alike = SequenceMatcher(None, name, setting.name).ratio()
        if alike >= _ALIKE:
            scores[setting.path] = alike + (_NEAR if setting.path.rpartition(".")[0] == parent else 0.0)
    best = [other for other in scores if scores[other] == max(scores.values())][:_MOST_SHOWN]
    if best:
        return Problem(path, f"unknown setting; did you mean {' or '.join(best)}?")
    names = [setting.name for setting in known if setting.path.rpartition(".")[0] == parent]
    return Problem(path, f"unknown setting; expected one of {', '.join(names)}")
