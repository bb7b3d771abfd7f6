"""Compares two configurations, setting by setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from hpcrl.config.sections.tree import ConfigTree

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Difference:
    """One setting, or one key of a table whose keys are the user's, that two configurations give different values.

    Attributes:
        path: dotted path.
        left: value in the first configuration; None where it is unset or has no such key.
        right: value in the second one.
    """

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path}: {value_as_toml(self.left)} -> {value_as_toml(self.right)}"


def differences(left: ConfigTree, right: ConfigTree) -> list[Difference]:
    """Return the settings that differ, in their order; 1 and 1.0 are equal, 1 and true are not."""
    ours, theirs = dict(flat(asdict(left))), dict(flat(asdict(right)))
    return [
        Difference(path, ours.get(path), theirs.get(path))
        for path in ours | theirs
        if _distinct(ours.get(path), theirs.get(path))
    ]


def value_as_toml(value: Any) -> str:
    """Return a value on one line, as in an override; None is `unset`."""
    if value is None:
        return "unset"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {value_as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_as_toml, value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return tables as YAML in ASCII, in their order; None is null."""
    import yaml  # which takes longer to import than a configuration to load

    return yaml.safe_dump(tree, sort_keys=False)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a tree of tables, by dotted path."""
    for key, value in tree.items():
        path = prefix + _key(key)
        if isinstance(value, Mapping):
            yield from flat(value, path + ".")
        else:
            yield path, value


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _distinct(left: Any, right: Any) -> bool:
    return left != right or isinstance(left, bool) != isinstance(right, bool)
