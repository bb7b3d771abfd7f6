"""The JSON Schema of a configuration file, from which editors complete and check TOML."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from hpcrl.config.fields import Setting, alternatives, section_settings
from hpcrl.config.root import Config
from hpcrl.config.setting import Range

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def json_schema(cls: type[Config] = Config) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of one TOML file of a configuration; nothing is required, because files are merged."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpcrl configuration",
        "description": "The configuration of a run, or a part of it.",
        **_table(cls, ""),
    }


def _table(section: type, prefix: str) -> dict[str, Any]:
    settings = {setting.name: _setting(setting) for setting in section_settings(section, prefix)}
    return {"type": "object", "additionalProperties": False, "properties": settings}


def _setting(setting: Setting) -> dict[str, Any]:
    if setting.subsection:
        return _table(setting.subsection, setting.path + ".")
    kinds = [_kind(kind, setting.facts.range) for kind in setting.types]
    entry: dict[str, Any] = {
        "description": _description(setting),
        **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}),
    }
    if not setting.required and setting.default is not None:
        entry["default"] = setting.default
    return entry


def _description(setting: Setting) -> str:
    missing = setting.facts.unimplemented
    parts = [
        setting.meaning,
        "Required." if setting.required else "",
        f"Not implemented yet: {missing.feature}." if missing else "",
    ]
    return " ".join(filter(None, parts))


def _kind(kind: Any, allowed: Range | None) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is list:
        return {"type": "array", "items": _any_of(get_args(kind)[0])}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _any_of(get_args(kind)[1])}
    return {"type": _NAMES[kind], **_limits(allowed)} if kind in (int, float) else _plain(kind)


def _plain(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and is_dataclass(kind):
        return _table(kind, "")
    return {} if kind is Any else {"type": _NAMES[kind]}


def _any_of(annotation: Any) -> dict[str, Any]:
    kinds = [_kind(kind, None) for kind in alternatives(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _limits(allowed: Range | None) -> dict[str, float]:
    if allowed is None:
        return {}
    low = "exclusiveMinimum" if allowed.low_open else "minimum"
    high = "exclusiveMaximum" if allowed.high_open else "maximum"
    limits = {low: allowed.low, high: allowed.high}
    return {name: limit for name, limit in limits.items() if abs(limit) != float("inf")}
