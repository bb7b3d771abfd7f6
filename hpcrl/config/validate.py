"""From a tree of plain values to the dataclasses: strict types, no unknown names, every error at once."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpcrl.config.problem import Problem, raise_together, shown, unknown
from hpcrl.config.surface import Setting, settings

Root = TypeVar("Root")


@cache
def _adapter(cls: type[Root]) -> TypeAdapter[Root]:
    return TypeAdapter(cls)


def build(cls: type[Root], tree: Mapping[str, Any], source_of: Callable[[str], str | None]) -> Root:
    """Return the dataclass `cls` filled from `tree`.

    Args:
        cls: root of the settings; its `__pydantic_config__` forbids unknown names.
        source_of: file or override that set a dotted path.

    Raises:
        ConfigError: names every unknown setting, wrong type and missing value.
    """
    known = {setting.path: setting for setting in settings(cls)}
    filled = _with_required_sections(tree, known)
    raise_together(list(_dates(filled, "")), source_of)
    try:
        # JSON, because pydantic's strict mode takes a dataclass from a table only there.
        return _adapter(cls).validate_json(json.dumps(filled), strict=True)
    except ValidationError as error:
        problems = [_problem(dict(entry), known) for entry in error.errors(include_url=False)]
        raise_together(problems, source_of)
        raise


def _with_required_sections(tree: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return a copy that has every required section, so that an error names the setting that is missing in it."""
    copy = dict(tree)
    for setting in known.values():
        if setting.is_section and setting.required:
            *parents, name = setting.path.split(".")
            table: Any = copy
            for parent in parents:
                table = table[parent] if isinstance(table, dict) else None
            if isinstance(table, dict):
                inner = table.get(name, {})
                table[name] = dict(inner) if isinstance(inner, Mapping) else inner
    return copy


def _dates(value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, datetime.date | datetime.time):
        yield Problem(path, f"expected text, a number, a list or a table, found the date {value}; quote it")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _dates(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _dates(inner, f"{path}[{index}]")


def _problem(error: dict[str, Any], known: Mapping[str, Setting]) -> Problem:
    names = [part for part in error["loc"] if isinstance(part, str)]
    path = ".".join(names)
    item = "".join(f"[{part}]" for part in error["loc"] if isinstance(part, int))
    if path not in known:
        return unknown(path, list(known.values()))
    expected = known[path].expects(item=bool(item))
    if error["type"] == "missing":
        return Problem(path, f"required: expected {expected}; set it in a TOML file or with {path}=...")
    return Problem(path + item, f"expected {expected}, found {shown(error['input'])}")
