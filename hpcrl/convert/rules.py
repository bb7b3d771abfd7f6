"""Converts the settings of a table: each by its rule, by its row of the table alone, or with the reason why it has no place here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, get_origin

from hpcrl.config.difference import value_as_toml
from hpcrl.convert.conversion import Conversion, known, location
from hpcrl.convert.field_table import TableSource
from hpcrl.convert.mapping import Dropped, To
from hpcrl.convert.sbatch import convert_sbatch

S = TypeVar("S", bound=TableSource)
Rule = Callable[[S, Conversion, str], None]
WithoutEffect = Callable[[S, str], str]
"""Returns why a setting did nothing in the source's run; empty: it did."""


def put(source: TableSource, conversion: Conversion, path: str, target: str, value: Any, how: str = "") -> None:
    """Set what a setting of the source becomes, and note it if the source names it or the default here is another.

    Args:
        path: the setting of the source.
        target: the setting here.
        how: the rule by which the value came about; empty where it is as it was.
    """
    conversion.values[target] = value
    if path in source.names:
        conversion.note("translated" if how else "mapped", source.names[path], target, how)
    elif value is not None and not known()[target].is_default(value):
        default = value_as_toml(value)
        conversion.note(
            "translated",
            path,
            target,
            f"left out: {source.table.framework}'s default, {default}" + (f" ({how})" if how else ""),
        )


def seen(source: TableSource, conversion: Conversion, path: str, target: str = "", message: str = "") -> None:
    """Note a setting that the source names, whose value another one has decided about."""
    if path in source.names:
        conversion.note("translated" if message else "mapped", source.names[path], target, message)


def lost(source: TableSource, conversion: Conversion, path: str, target: str, message: str) -> None:
    """Note a value that has no place here, given or the default."""
    conversion.note("conflict", source.names.get(path, path), target, message)


def convert_fields(
    source: S, conversion: Conversion, rules: Mapping[str, Rule[S]], without_effect: WithoutEffect[S], batch: str = ""
) -> Conversion:
    """Return the conversion of all settings of a source, filled and checked.

    Args:
        rules: what writes a setting that decides with others, by its path.
        batch: a script's text whose `#SBATCH` lines count.
    """
    table = source.table
    for path, target in table.targets.items():
        if isinstance(target, Dropped) and path not in rules:
            _note_dropped(source, conversion, path, target)
        elif path in source.unread:
            conversion.note_unread(source.names[path], target, source.unread[path])
        elif isinstance(target, To) and path not in rules:
            _map(source, conversion, path, target, without_effect(source, path))
        else:
            rules[path](source, conversion, path)
    convert_sbatch(batch, conversion)
    order = {name: index for index, name in enumerate(source.names.values())}
    conversion.entries.sort(key=lambda entry: order.get(entry.source, len(order)))
    left_out = set(table.targets) - set(source.names.values())
    conversion.finish()
    conversion.entries = [one for one in conversion.entries if one.kind != "dropped" or one.source not in left_out]
    return conversion


def _note_dropped(source: TableSource, conversion: Conversion, path: str, target: Dropped) -> None:
    if path not in source.names:
        return
    lost = path in source.table.lost and (path in source.unread or not _is_default(source, path))
    conversion.note("conflict" if lost else "dropped", source.names[path], "", target.reason)


def _is_default(source: TableSource, path: str) -> bool:
    """Return whether a setting without a place here has the value with which nothing is lost: the default, or nothing at all."""
    value = source.given[path]
    off = isinstance(value, dict) and not value.get("enable", value.get("enabled", bool(value)))
    return value == source.default(path) or value in (None, "", [], "null") or off


def _map(source: TableSource, conversion: Conversion, path: str, target: To, unused: str) -> None:
    value, setting = source[path], known().get(target.path)
    if isinstance(value, Hashable):
        value = target.values.get(value, value)
    if setting and setting.location:
        value = location(value)
    if isinstance(value, str) and setting and all(get_origin(kind) is list for kind in setting.types):
        value = [value]
    if value is None and setting and not setting.optional:
        if path in source.names:
            conversion.note("dropped", source.names[path], "", "null: the default here")
    elif not unused:
        put(source, conversion, path, target.path, value)
    elif path in source.names:
        conversion.note("dropped", source.names[path], "", unused)
