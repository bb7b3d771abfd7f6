"""Problems of a configuration: collected, each with where it comes from, raised together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from hpcrl.config.fields import Setting
from hpcrl.errors import ConfigError, HpcrlError, similar

_MOST_SHOWN = 3
_MOST_LISTED = 20
_LONGEST = 80
_LONGEST_PATH = 300


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: dotted path of the setting.
        message: what was expected and found, and the remedy.
        source: file, with the line, or override that is wrong; empty: what sets the path.
    """

    path: str
    message: str
    source: str = ""


class UnknownSetting(Problem):
    """A setting that does not exist."""


def raise_together(
    problems: Sequence[Problem], source_of: Callable[[str], str | None], kind: type[HpcrlError] = ConfigError
) -> None:
    """Raise one error with a line per problem, or return if there is none.

    Args:
        source_of: file or override that set a dotted path; None for a default.
    """
    if problems:
        found = [replace(one, source=one.source or source_of(one.path) or "") for one in problems]
        text = "\n".join(map(_line, found))
        unknown = {one.path: one.message for one in problems if isinstance(one, UnknownSetting)}
        raise ConfigError(text, unknown, found) if unknown or kind is ConfigError else kind(text)


def _line(problem: Problem) -> str:
    path = problem.path if len(problem.path) <= _LONGEST_PATH else problem.path[:_LONGEST_PATH] + "..."
    line = ": ".join(part for part in (problem.source, path, problem.message) if part)
    # what a file says may move the cursor or change the title of the terminal that shows the error
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in line)


def shown(value: Any) -> str:
    """Return a value as an error names it, with its kind."""
    if isinstance(value, dict):
        return "a table"
    kinds = {bool: "true or false", int: "whole number", float: "number", str: "text", list: "list", type(None): "null"}
    kind = kinds.get(type(value), type(value).__name__)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def unknown(path: str, known: Sequence[Setting]) -> UnknownSetting:
    """Return the problem of a name that does not exist, with the names that it may have meant.

    One letter too few, too many, changed or swapped always leads to the right name.
    """
    if near := nearest(path, [setting.path for setting in known]):
        return UnknownSetting(path, f"unknown setting; did you mean {' or '.join(near)}?")
    parent, names = path, list[str]()
    while parent and not names:
        parent = parent.rpartition(".")[0]
        names = [setting.name for setting in known if setting.path.rpartition(".")[0] == parent]
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return UnknownSetting(path, f"unknown setting; expected one of {', '.join(names[:_MOST_LISTED])}{more}")


def nearest(path: str, known: Sequence[str]) -> list[str]:
    """Return at most three of the paths `known` whose last parts resemble that of `path`, the nearest first."""
    parent, _, name = path.rpartition(".")
    scores: dict[str, float] = {}
    names = {other: other.rpartition(".")[2] for other in known}
    alike = _one_letter_off(name, tuple(dict.fromkeys(names.values())))
    here = {own for other, own in names.items() if other.rpartition(".")[0] == parent}
    if alike.isdisjoint(here) and (beside := _same_words(path, known)):
        return beside
    alike = alike or set(similar(name[:_LONGEST], set(names.values()), _MOST_SHOWN, 0.7))
    for other, own in names.items():
        if own in alike:
            beside = other.rpartition(".")[0] == parent
            scores[other] = SequenceMatcher(None, name, own).ratio() + (0.5 if beside else 0.0)
    if "." in parent and any(other.startswith(parent + ".") for other in known):
        # another section's name that only resembles it would lead away from this one
        scores = {other: scores[other] for other in scores if other.startswith(parent + ".") or names[other] == name}
    best = max(scores.values(), default=0.0)
    likely = [other for other in scores if scores[other] > best - 0.5]
    return sorted(likely, key=lambda other: -scores[other])[:_MOST_SHOWN]


def _same_words(path: str, known: Sequence[str]) -> list[str]:
    """Return the settings of the same section with all words of a name, or whose words it all has: time_minutes for time.

    Those that differ in the fewest words; first one with a word of the section more, as trainer.train_batch_size for batch_size.
    """
    parent, _, name = path.rpartition(".")
    words, found = set(name.split("_")), []
    for other in known:
        own = set(other.rpartition(".")[2].split("_"))
        if other.rpartition(".")[0] == parent and (own < words or words < own):
            of_section = any(parent.rpartition(".")[2].startswith(word) for word in own - words)
            found.append((len(own ^ words), not of_section, other))
    least = min(found, default=(0,))[0]
    return [other for missing, _, other in sorted(found) if missing == least][:_MOST_SHOWN]


def _one_letter_off(name: str, names: tuple[str, ...]) -> set[str]:
    if len(name) > _LONGEST:
        return set()
    index = _shortened(names)
    return {other for short in _without_one(name) for other in index.get(short, ())}


@lru_cache(maxsize=4)
def _shortened(names: tuple[str, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        for short in _without_one(name):
            found.setdefault(short, []).append(name)
    return found


def _without_one(name: str) -> set[str]:
    """Return the text, and the text without each one of its letters; texts that differ in one letter share some of these."""
    return {name, *(name[:i] + name[i + 1 :] for i in range(len(name)))}
