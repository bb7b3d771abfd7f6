"""What becomes of a setting of another framework.

The tables `fields.tsv` of the sources list the settings of each, one to a row, with tabs between the columns. `becomes` has the paths
here, = for the same one. `values` has pairs of values there and here as JSON; for a setting without a place here, the values that
change nothing. `why` has the rule of a setting that decides with others about those paths, or the reason why one is not supported.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class To:
    """It is the setting at `path` here.

    Attributes:
        values: the source's values that are written differently here; others stay as they are.
    """

    path: str
    values: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Translated:
    """It decides, with others, about the settings at `paths`.

    Attributes:
        how: the rule, for documentation and report.
    """

    paths: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class Dropped:
    """It is not supported.

    Attributes:
        reason: why, and what replaces it.
    """

    reason: str


Target = To | Translated | Dropped


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of one of those tables, by the names of its columns."""
    lines = files("hpcrl.convert").joinpath(name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def target_of(row: Mapping[str, str]) -> Target:
    """Return what becomes of the setting of one row."""
    paths = [row["path"] if path == "=" else path for path in row["becomes"].split()]
    if not paths:
        return Dropped(row["why"])
    if row["why"]:
        return Translated(tuple(paths), row["why"])
    return To(paths[0], dict(json.loads(row["values"])) if row["values"] else {})


def harmless(table: Iterable[Mapping[str, str]]) -> dict[str, tuple[Any, ...]]:
    """Return the settings without a place here that change what a run does unless they have one of some values, with these."""
    return {row["path"]: tuple(json.loads(row["values"])) for row in table if row["values"] and not row["becomes"]}
