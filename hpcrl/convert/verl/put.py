"""Writes a setting of a converted run, and the line of the report about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcrl.config.difference import value_as_toml
from hpcrl.convert.conversion import Conversion, known
from hpcrl.convert.verl.source import VerlSource

Rule = Callable[[VerlSource, Conversion, str], None]


def put(source: VerlSource, conversion: Conversion, path: str, target: str, value: Any, how: str = "") -> None:
    """Set what a setting of verl becomes, and note it if the source names it or the default here is another.

    Args:
        path: the setting of verl.
        target: the setting here.
        how: the rule by which the value came about; empty where it is as it was.
    """
    conversion.values[target] = value
    if path in source.names:
        conversion.note("translated" if how else "mapped", source.names[path], target, how)
    elif value is not None and not known()[target].is_default(value):
        default = value_as_toml(value)
        conversion.note(
            "translated", path, target, f"left out: verl's default, {default}" + (f" ({how})" if how else "")
        )


def seen(source: VerlSource, conversion: Conversion, path: str, target: str = "", message: str = "") -> None:
    """Note a setting that the source names, whose value another one has decided about."""
    if path in source.names:
        conversion.note("translated" if message else "mapped", source.names[path], target, message)


def lost(source: VerlSource, conversion: Conversion, path: str, target: str, message: str) -> None:
    """Note a value that has no place here, given or verl's default."""
    conversion.note("conflict", source.names.get(path, path), target, message)
