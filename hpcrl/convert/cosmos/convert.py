"""A TOML of Cosmos-RL to one of hpcrl that does the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hpcrl.config.difference import value_as_toml
from hpcrl.config.lines import line_of
from hpcrl.config.load import parse
from hpcrl.convert.conversion import Conversion, known
from hpcrl.convert.cosmos import generation as cosmos_generation
from hpcrl.convert.cosmos import training as cosmos_training
from hpcrl.convert.cosmos.conditions import without_effect
from hpcrl.convert.cosmos.fields import LOST, TARGETS
from hpcrl.convert.cosmos.numbers import numbers
from hpcrl.convert.cosmos.resolve import Resolved, resolve
from hpcrl.convert.mapping import Dropped, To, Translated

RULES = (*cosmos_training.RULES, *cosmos_generation.RULES)

__all__ = ["TARGETS", "convert_toml"]


def convert_toml(text: str, origin: str) -> Conversion:
    """Return the conversion of a TOML of Cosmos-RL, defaults of the source that differ included.

    Args:
        origin: where the text comes from, for errors and for the first line of the result.

    Raises:
        ConfigError: it is no TOML, no training configuration, or one that Cosmos-RL refuses.
    """

    def source_of(path: str) -> str:
        line = line_of(text, path)
        return f"{origin}:{line}" if line else origin

    return _converted(resolve(parse(text, origin), source_of), origin)


def _converted(source: Resolved, origin: str) -> Conversion:
    conversion = Conversion(origin, ignores_unknown=True)
    unused = without_effect(source)
    for path, value in source.values.items():
        target = TARGETS.get(path)
        if isinstance(target, To) and path not in unused:
            conversion.values[target.path] = _as_here(value, target)
    reported = [entry for rule in RULES for entry in rule(source, conversion.values)]
    for path in source.given:
        own = [entry for entry in reported if entry.source == path]
        if all(entry.kind == "conflict" for entry in own):
            _note(conversion, path, source, unused.get(path))
        conversion.entries += own
    conversion.entries += [entry for entry in reported if entry.source not in source.given and entry.kind == "conflict"]
    conversion.entries += numbers(source)
    for path, explanation in source.unknown.items():
        conversion.note("unknown", path, "", explanation)
    conversion.finish()
    return conversion


def _as_here(value: Any, target: To) -> Any:
    return target.values.get(value, value) if isinstance(value, Hashable) else value


def _note(conversion: Conversion, path: str, source: Resolved, needed: str | None) -> None:
    """Note what became of a field that the file sets."""
    target = TARGETS[path]
    if isinstance(target, Dropped):
        conversion.note("conflict" if path in LOST and source[path] else "dropped", path, "", target.reason)
    elif needed is not None:
        conversion.note("dropped", path, "", f"has no effect without {needed}")
    else:
        _note_result(conversion, path, source[path], target)


def _note_result(conversion: Conversion, path: str, given: Any, target: To | Translated) -> None:
    names = (target.path,) if isinstance(target, To) else target.paths
    results = {name: conversion.values[name] for name in names if name in conversion.values}
    changed = {
        name: value for name, value in results.items() if value is not None and not known()[name].is_default(value)
    }
    how = target.how if isinstance(target, Translated) else ""
    if not results:
        conversion.note("dropped", path, "", how)
    elif not changed or changed == {names[0]: given}:
        conversion.note("mapped", path, next(iter(changed or results)))
    else:
        first, *others = changed
        found = [value_as_toml(changed[first]), *(f"{name} = {value_as_toml(changed[name])}" for name in others)]
        conversion.note("translated", path, first, ", ".join(found) + (f" ({how})" if how else ""))
