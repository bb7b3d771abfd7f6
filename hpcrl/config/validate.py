"""Builds the dataclasses from a tree of plain values: strict types, no unknown names, every error at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from hpcrl.config.errors import Problem, raise_together, shown, unknown
from hpcrl.config.fields import Location, Setting, alternatives, noun, section_settings, settings

Section = TypeVar("Section")

Given = list[tuple[Setting, Any]]

UNCONVERTED = "unconverted"
"""The table in which `hpcrl config convert` writes what the source has and a file cannot say; each of its lines is an error."""

_LARGEST_INT = 2**63
_LONGEST_REMEDY = 60
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def build(
    cls: type[Section],
    tree: Mapping[str, Any],
    source_of: Callable[[str], str | None] = lambda _: None,
    also: Callable[[Given], Iterable[Problem]] = lambda _: (),
) -> Section:
    """Return the dataclass `cls`, a section or the whole configuration, filled from the table `tree`.

    Tables whose keys are the user's are merged with their defaults, key by key. None means unset.

    Args:
        source_of: file or override that set a dotted path.
        also: checks single values of the right type; called only when something else is wrong, so that all is reported at once.

    Raises:
        ConfigError: names every unknown setting, wrong type and missing value.
    """
    reader = _Reader(settings(cls))
    built = reader.section(cls, tree, "")
    if reader.problems:
        raise_together([*reader.problems, *also(reader.valid)], source_of)
    return built


def without_unconverted(tree: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Problem]]:
    """Return a tree without the table of what `hpcrl config convert` could not write as settings, and the problem of each of its lines."""
    table = tree.get(UNCONVERTED)
    if not isinstance(table, Mapping):
        return tree, []
    rest = {name: value for name, value in tree.items() if name != UNCONVERTED}
    return rest, [
        Problem(f"{UNCONVERTED}.{source}", f"{message}; settle it, then delete this line")
        for source, message in table.items()
    ]


@dataclass
class _Reader:
    """Fills sections, and collects what is wrong.

    Attributes:
        known: all settings, for the nearest names of one that is unknown.
        valid: settings whose given values have the right type.
    """

    known: tuple[Setting, ...]
    problems: list[Problem] = field(default_factory=list)
    valid: Given = field(default_factory=list)

    def section(self, cls: type[Section], tree: Mapping[str, Any], prefix: str) -> Section:
        here = {setting.name: setting for setting in section_settings(cls, prefix)}
        self.problems += [self._unknown(str(name), prefix) for name in tree if name not in here]
        values: dict[str, Any] = {}
        for name, setting in here.items():
            given = tree.get(name)
            if given is None:
                if not setting.required:
                    continue
                if not setting.subsection:
                    self.problems.append(_missing(setting))
                    continue
                given = {}  # so that an error names the setting that is missing in it
            if setting.subsection and isinstance(given, Mapping):
                values[name] = self.section(setting.subsection, given, setting.path + ".")
            else:
                values[name] = self._value(setting, given)
        if not self.problems:
            try:
                return cls(**values)
            except ValueError as error:  # from the __post_init__ of a user's own class
                self.problems.append(Problem(prefix.rstrip("."), str(error)))
        return None  # type: ignore[return-value]  # build raises

    def _unknown(self, name: str, prefix: str) -> Problem:
        if "." in name:
            return Problem(
                prefix + name,
                "a dot in a quoted name, or in a key below the top of a dict, does not separate names; write tables instead",
            )
        return unknown(prefix + name, self.known)

    def _value(self, setting: Setting, given: Any) -> Any:
        value, misfits = coerce(given, setting.annotation, setting.path)
        if misfits:
            self.problems += misfits
            return None
        if isinstance(value, dict) and isinstance(setting.default, dict):
            value = {**setting.default, **value}
        self.valid.append((setting, value))
        return value


def _missing(setting: Setting) -> Problem:
    return Problem(
        setting.path,
        f"required: expected {setting.expects()}; set it in a TOML file or with {setting.path}=...",
    )


def coerce(value: Any, annotation: Any, path: str) -> tuple[Any, list[Problem]]:
    """Return a value of the annotated type that equals the given one, and what is wrong with it."""
    if any(map(is_dataclass, (held for kind in alternatives(annotation) for held in get_args(kind)))):
        value = _without_unset(value)
    unfit = list(_not_toml(value, path))
    return (None, unfit) if unfit else _coerce(value, annotation, path)


def _without_unset(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_unset(item) for name, item in value.items() if item is not None}
    return list(map(_without_unset, value)) if isinstance(value, list | tuple) else value


def _coerce(value: Any, annotation: Any, path: str) -> tuple[Any, list[Problem]]:
    kinds = alternatives(annotation)
    if any(_is_one(value, kind) for kind in kinds):
        return value, []
    if float in kinds and _is_one(value, int):
        return float(value), []
    if isinstance(value, Mapping) and isinstance(kinds[0], type) and is_dataclass(kinds[0]):
        return _entry(value, kinds[0], path)
    inside: list[Problem] = []
    for kind in kinds:
        if isinstance(value, list | tuple) and get_origin(kind) is list:
            places = {index: f"{path}[{index}]" for index in range(len(value))}
            parts = [_coerce(value[index], get_args(kind)[0], place) for index, place in places.items()]
            fitted: Any = [part for part, _ in parts]
        elif isinstance(value, Mapping) and get_origin(kind) is dict:
            parts = [_coerce(item, get_args(kind)[1], f"{path}.{key}") for key, item in value.items()]
            fitted = dict(zip(value, (part for part, _ in parts), strict=True))
        else:
            continue
        found = [problem for _, problems in parts for problem in problems]
        if not found:
            return fitted, []
        inside = inside or found
    expected = " or ".join(noun(kind) for kind in kinds if kind is not type(None))
    return None, inside or [Problem(path, f"expected {expected}, found {shown(value)}{_remedy(value, kinds)}")]


def _remedy(value: Any, kinds: Iterable[Any]) -> str:
    """Return how to write a value that has the wrong type only; empty where that is not clear."""
    if str in kinds and isinstance(value, int | float):
        quoted = f'"{json.dumps(value)}"'
        return f"; quote it: {quoted}, on a command line '{quoted}'"
    if not isinstance(value, str) or len(value) > _LONGEST_REMEDY:
        return ""
    if bool in kinds and value.lower() in ("true", "false"):
        return f"; write {value.lower()}, without quotes"
    if (float in kinds and _NUMBER.fullmatch(value)) or (int in kinds and value.lstrip("-").isdecimal()):
        return f"; write {value}, without quotes"
    if any(kind == list[str] or get_args(kind)[:1] == (Location,) for kind in kinds if get_origin(kind) is list):
        return f"; put it into brackets: [{json.dumps(value, ensure_ascii=False)}]"
    return ""


def _entry(value: Mapping[str, Any], kind: type, path: str) -> tuple[Any, list[Problem]]:
    """Return a section whose name is the user's, and what is wrong with it."""
    reader = _Reader(settings(kind))
    return reader.section(kind, value, path + "."), reader.problems


def _is_one(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    # to Python 3.10 list[str] is a type, too
    is_class = get_origin(kind) is None and isinstance(kind, type)
    return is_class and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _not_toml(value: Any, path: str) -> Iterator[Problem]:
    """Yield what TOML cannot hold, or no program that reads the configuration could use."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_toml(key, f"{path}: a name in it") if isinstance(key, str) else _no_text(key, path)
            yield from _not_toml(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_toml(inner, f"{path}[{index}]")
    elif isinstance(value, str):
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in value):
            yield Problem(path, f"expected text in UTF-8, found {value!r:.60}")
    elif isinstance(value, bool | float):
        pass
    elif not isinstance(value, int):
        hint = "; quote it" if hasattr(value, "isoformat") else ""
        yield Problem(path, f"expected text, a number, a list or a table, found {shown(value)}{hint}")
    elif not -_LARGEST_INT <= value < _LARGEST_INT:
        yield Problem(path, "expected a number of at most 64 bits")


def _no_text(key: Any, path: str) -> Iterator[Problem]:
    yield Problem(path, f"expected names that are text, found {shown(key)}")
