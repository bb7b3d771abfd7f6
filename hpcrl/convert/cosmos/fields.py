"""Cosmos-RL's fields: types, defaults, and what becomes of each here.

They are those of its HEAD (89f2e5b, July 2026) and, where a file sets them, those that only the version of January 2026 had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union

from hpcrl.config.fields import Setting, alternatives
from hpcrl.convert.mapping import Target, rows, target_of

_KINDS: dict[str, Any] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "null": None,
    "strings": list[str],
    "integers": list[int],
    "numbers": list[float],
    "tables": list[dict[str, Any]],
    "table of any": dict[str, Any],
    "table of booleans": dict[str, bool],
    "table of integers": dict[str, int],
    "table of numbers": dict[str, float],
}


@dataclass(frozen=True)
class Field:
    """A field of Cosmos-RL's configuration.

    Attributes:
        setting: path, type and default; a table that may be null has type None.
        variant: the train_policy.type that has it; empty: both.
        since: "head" or "seed" where only that version has it.
    """

    setting: Setting
    variant: str
    since: str

    @property
    def path(self) -> str:
        return self.setting.path

    @property
    def is_table(self) -> bool:
        return self.setting.annotation is None


@cache
def fields() -> tuple[Field, ...]:
    """Return all fields, those of both variants of train_policy included."""
    return tuple(map(_field, rows("cosmos/fields.tsv")))


def _field(row: Mapping[str, str]) -> Field:
    annotation = None if row["type"].startswith("section") else _annotation(row["type"])
    types = tuple(found for found in alternatives(annotation) if found not in (None, type(None)))
    name, optional = row["path"].rpartition(".")[2], "null" in row["type"]
    setting = Setting(row["path"], object, name, annotation, types, optional, False, json.loads(row["default"]))
    return Field(setting, row["variant"], row["since"])


def _annotation(kind: str) -> Any:
    """Return the Python type that a type of the table of fields stands for: names of _KINDS, and "one of" some texts."""
    parts = kind.split(" | ")
    found = [Literal[tuple(part[7:].split(","))] if part.startswith("one of ") else _KINDS[part] for part in parts]  # type: ignore[valid-type]
    return Union[tuple(found)]  # noqa: UP007


LOST = {"train.train_policy.group_reward_calculation", "policy.model_safetensor_path"}
"""Fields that are not supported, without which a file that sets them would be another run."""

TARGETS: dict[str, Target] = {
    row["path"]: target_of(row) for row in rows("cosmos/fields.tsv") if not row["type"].startswith("section")
}
"""Dotted path of each field, of both variants of train_policy, to what becomes of it."""
