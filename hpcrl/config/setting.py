"""Declares a setting in a section: its default, range, condition of use and effect of a change in one line, above its meaning.

    gamma: float = setting(1.0, range=SHARE, used_by=when("trainer.critic.model.path"))

A section of its own is declared with `section(Class)`; what is given there holds for every setting in it that declares nothing else.
A plain default is enough for a setting that may have any value of its type.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar
from unicodedata import category

T = TypeVar("T")
Kind = Literal["harmless", "warning", "refused"]
_FACTS = "hpcrl"


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included unless they are open; infinity and NaN never are.

    Attributes:
        at_low: error for `low` itself where it is open; empty: as for any other number outside.
    """

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    at_low: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        parts = []
        if self.low > -math.inf:
            parts.append(f"more than {self.low:g}" if self.low_open else f"at least {self.low:g}")
        if self.high < math.inf:
            parts.append(f"less than {self.high:g}" if self.high_open else f"at most {self.high:g}")
        return " and ".join(parts) or "a finite number"

    def error(self, value: float) -> str | None:
        """Return why a number is refused, or None."""
        if value in self:
            return None
        return self.at_low if self.at_low and value == self.low else f"expected {self}, found {value}"


COUNT, SEVERAL, NOT_NEGATIVE, POSITIVE = Range(1), Range(2), Range(0), Range(0, low_open=True)
SHARE, SHARE_ABOVE_0 = Range(0, 1), Range(0, 1, low_open=True)
SHARE_BELOW_1 = Range(0, 1, high_open=True)
FINITE = Range()

Count = Annotated[int, COUNT]
Several = Annotated[int, SEVERAL]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
Share = Annotated[float, SHARE]
"""Types of settings in the signatures of losses and advantage estimators."""


@dataclass(frozen=True)
class Check:
    """A condition on a value that is no range of numbers.

    Attributes:
        message: the error, with `{value}` for the value.
    """

    message: str
    holds: Callable[[Any], bool]

    def error(self, value: Any) -> str | None:
        """Return why a value is refused, or None."""
        return None if self.holds(value) else self.message.format(value=value)


ALL_OR_COUNT = Check("expected -1 (all) or at least 1, found {value}", lambda value: value == -1 or value >= 1)
NOT_EMPTY = Check("expected texts that are not empty", all)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _texts(item)
    if isinstance(value, str):
        yield value


def on_one_line(value: Any) -> bool:
    """Return whether all texts of a value, keys too, have no control characters and no line breaks."""
    return not any(category(one) in ("Cc", "Zl", "Zp") for text in _texts(value) for one in text)


ONE_LINE = Check("expected one line without control characters, found {value!r:.140}", on_one_line)


@dataclass(frozen=True)
class Effect:
    """The effect of a change on a run that continues from a checkpoint.

    Attributes:
        kind: for a later attempt of the same run.
        reason: why, in a few words.
        from_path: for another run that starts from a checkpoint of this one.
    """

    kind: Kind
    reason: str
    from_path: Kind = "harmless"


@dataclass(frozen=True)
class Unimplemented:
    """Why a setting cannot be changed yet.

    Attributes:
        feature: what it belongs to, which is not implemented yet.
        works: the values that work already, beside the default.
    """

    feature: str
    works: tuple[Any, ...] = ()


@dataclass(frozen=True)
class When:
    """A condition on other settings, without which a setting has no effect.

    Attributes:
        needs: the condition, as an error names it; `{section}` is the section of the setting that declares the condition.
        tests: paths with tests of their values, of which one has to hold. A path that begins with "." is one of the same section,
            and one may name a property of a section.
    """

    needs: str
    tests: tuple[tuple[str, Callable[[Any], bool]], ...]


def when(path: str, *values: Any, needs: str = "", test: Callable[[Any], bool] | None = None) -> When:
    """Return the condition that a setting has one of some values, or passes a test; without either, that it is set to something.

    Args:
        needs: the condition in words; empty: made of path and values.
    """
    shown = f"{{section}}{path}" if path.startswith(".") else path
    if values:
        *others, last = (f'"{value}"' if isinstance(value, str) else str(value).lower() for value in values)
        shown = f"{shown}={', '.join(others)} or {last}" if others else f"{shown}={last}"
        return When(needs or shown, ((path, values.__contains__),))
    return When(needs or shown, ((path, test or _is_something),))


def any_of(*conditions: When, needs: str = "") -> When:
    """Return the condition that one of several holds."""
    words = needs or " or ".join(condition.needs for condition in conditions)
    return When(words, tuple(test for condition in conditions for test in condition.tests))


def _is_something(value: Any) -> bool:
    return value not in (None, False, 0, [], {})


@dataclass(frozen=True)
class Named:
    """A function that a setting chooses by its name.

    Attributes:
        summary: what it is, in a few words.
        settings: names of the settings that it reads.
    """

    summary: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Facts that a section declares of one of its settings, or of a section in it, beside type and default."""

    range: Range | None = None
    check: Check | None = None
    used_by: tuple[When, ...] = ()
    on_change: Effect | None = None
    unimplemented: Unimplemented | None = None
    why: str = ""
    named: Mapping[str, Named] = field(default_factory=dict)


def setting(
    default: T,
    *,
    range: Range | None = None,
    check: Check | None = None,
    used_by: When | tuple[When, ...] = (),
    on_change: Effect | None = None,
    unimplemented: Unimplemented | None = None,
    why: str = "",
    named: Mapping[str, Named] | None = None,
) -> T:
    """Return the dataclass field of a setting.

    Args:
        default: a list or a table is copied for each section.
        range: of a number.
        check: of another value.
        used_by: conditions, all of which must hold for the setting to have an effect; refused elsewhere. One on the same path as a
            condition of the section takes its place.
        on_change: effect of a change at a resume; None: that of the section.
        unimplemented: why it is accepted at its default only.
        why: why the default is not SkyRL's.
        named: functions that it may name; `{names}` in its meaning stands for them.
    """
    facts = _metadata(
        range=range,
        check=check,
        used_by=used_by,
        on_change=on_change,
        unimplemented=unimplemented,
        why=why,
        named=named,
    )
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=facts)
    return field(default=default, metadata=facts)


def required(*, on_change: Effect | None = None, why: str = "") -> Any:
    """Return the dataclass field of a setting without a default; as `setting`."""
    return field(metadata=_metadata(on_change=on_change, why=why))


def section(cls: type[T], *, used_by: When | tuple[When, ...] = (), on_change: Effect | None = None) -> T:
    """Return the dataclass field of a section, with what holds for all settings in it; as `setting`."""
    return field(default_factory=cls, metadata=_metadata(used_by=used_by, on_change=on_change))


def facts_of(cls: type, name: str) -> Facts:
    """Return the declared facts of a section's field; facts that it leaves out come from the class it is derived from."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        declared = vars(base).get("__dataclass_fields__", {}).get(name)
        found |= declared.metadata.get(_FACTS, {}) if declared else {}
    return Facts(**found)


def _metadata(**facts: Any) -> dict[str, dict[str, Any]]:
    if isinstance(facts.get("used_by"), When):
        facts["used_by"] = (facts["used_by"],)
    return {_FACTS: {name: fact for name, fact in facts.items() if fact}}
