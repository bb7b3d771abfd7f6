"""From a tree of plain values to the dataclasses: strict types, no unknown names, every error at once.

Only what a file sets is looked at, setting by setting: building one validator for the whole tree would take longer than all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpcrl.config.problem import Problem, raise_together, shown, unknown
from hpcrl.config.surface import Setting, section_settings, settings

Section = TypeVar("Section")

_LARGEST_INT = 2**63


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def build(cls: type[Section], tree: Mapping[str, Any], source_of: Callable[[str], str | None] = lambda _: None) -> Section:
    """Return the dataclass `cls`, a section or the whole configuration, filled from the table `tree`.

    Tables whose keys are the user's are merged with their defaults, key by key. None means unset.

    Args:
        source_of: file or override that set a dotted path.

    Raises:
        ConfigError: names every unknown setting, wrong type and missing value.
    """
    problems: list[Problem] = []
    built = _section(cls, tree, "", settings(cls), problems)
    raise_together(problems, source_of)
    return built


def _section(
    cls: type[Section], tree: Mapping[str, Any], prefix: str, known: tuple[Setting, ...], problems: list[Problem]
) -> Section:
    here = {setting.name: setting for setting in section_settings(cls, prefix)}
    problems += [unknown(prefix + str(name), known) for name in tree if name not in here]
    values: dict[str, Any] = {}
    for name, setting in here.items():
        given = tree.get(name)
        if given is None and (setting.optional or setting.required or name not in tree):
            if setting.required and not setting.subsection:
                problems.append(_missing(setting))
                continue
            if not setting.required:
                continue
            given = {}  # so that an error names the setting that is missing in it
        if setting.subsection and isinstance(given, Mapping):
            values[name] = _section(setting.subsection, given, setting.path + ".", known, problems)
        else:
            values[name] = _value(setting, given, problems)
    return cls(**values) if not problems else None  # type: ignore[return-value]  # build raises


def _missing(setting: Setting) -> Problem:
    return Problem(
        setting.path,
        f"required: expected {setting.expects()}; set it in a TOML file or with {setting.path}=...",
    )


def _value(setting: Setting, given: Any, problems: list[Problem]) -> Any:
    if unfit := list(_unfit(given, setting.path)):
        problems += unfit
        return None
    try:
        value = _adapter(setting.annotation).validate_python(given, strict=True)
    except ValidationError as error:
        places = {_place(setting.path, entry["loc"]): entry["input"] for entry in error.errors(include_url=False)}
        deepest = max(places, key=len) if len(setting.types) == 1 else setting.path
        problems.append(
            Problem(deepest, f"expected {setting.expects()}, found {shown(places.get(deepest, given))}")
        )
        return None
    return {**setting.default, **value} if isinstance(value, dict) and isinstance(setting.default, dict) else value


def _place(path: str, where: tuple[int | str, ...]) -> str:
    return path + "".join(f"[{part}]" for part in where if isinstance(part, int))


def _unfit(value: Any, path: str) -> Iterator[Problem]:
    """Yield what TOML cannot hold, or no program that reads the configuration could use."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _unfit(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _unfit(inner, f"{path}[{index}]")
    elif isinstance(value, str):
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in value):
            yield Problem(path, f"expected text in UTF-8, found {value!r:.60}")
    elif isinstance(value, int) and not -_LARGEST_INT <= value < _LARGEST_INT:
        yield Problem(path, "expected a number of at most 64 bits")
    elif not isinstance(value, bool | int | float):
        hint = "; quote it" if hasattr(value, "isoformat") else ""
        yield Problem(path, f"expected text, a number, a list or a table, found {shown(value)}{hint}")
