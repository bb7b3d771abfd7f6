"""Cases that hpcrl answers differently on purpose: patterns, read from differences.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpcrl.config.load import parse
from tests.golden.case import Case
from tests.golden.conditions import CONDITIONS, PLACES

FILE = Path(__file__).parent / "differences.toml"


@dataclass(frozen=True)
class Difference:
    """A pattern on what a case is given, never on its name; `*`, `?` and `[…]` mean what they do for file names.

    Attributes:
        params: names to values; a case must have them all, among its params or the overrides and tables of its inputs. A value that
            is text is a pattern on the case's value, written as JSON where that is no text.
        sets: names; a case must have at least one of them, with any value.
        when: the name of one of CONDITIONS, which must hold.
        at: the name of one of PLACES; the case must have such places, and of `outputs` only those are left out.
        outputs: patterns on what is not compared; where it is empty, nothing of the case is.
        reason: why.
        instead: what hpcrl does.
    """

    fn: str
    reason: str
    instead: str
    params: tuple[tuple[str, Any], ...] = ()
    sets: tuple[str, ...] = ()
    when: str = ""
    at: str = ""
    outputs: tuple[str, ...] = ()

    def matches(self, case: Case) -> bool:
        if not fnmatchcase(case.fn, self.fn):
            return False
        given = settings_of(case)
        if self.sets and not any(fnmatchcase(name, pattern) for name in given for pattern in self.sets):
            return False
        if not all(
            any(fnmatchcase(name, pattern) and _fits(value, wanted) for name, value in given.items())
            for pattern, wanted in self.params
        ):
            return False
        if self.when and not CONDITIONS[self.when](case):
            return False
        return not self.at or bool(PLACES[self.at](case))

    def excused(self, case: Case) -> tuple[str, ...]:
        """Return patterns on the outputs of a case that are not compared."""
        if not self.at:
            return self.outputs
        return tuple(f"{output}.{place}" for output in self.outputs for place in PLACES[self.at](case))


def _fits(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, str):
        return type(value) is type(wanted) and value == wanted
    return fnmatchcase(value if isinstance(value, str) else json.dumps(value), wanted)


def settings_of(case: Case) -> dict[str, Any]:
    """Return what a case sets, by dotted names: its params, `name=value` arguments and the values of tables among its inputs."""
    found = _flat(case.params, "")
    for name, value in case.inputs.items():
        if name == "args":
            found |= {argument.partition("=")[0]: argument.partition("=")[2] for argument in value}
        elif isinstance(value, Mapping):
            found |= _flat(value, "")
        else:
            found[name] = value
    return found


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def read(path: Path = FILE) -> list[Difference]:
    """Return the patterns of a file.

    Raises:
        TypeError: an entry lacks a key, or has one that Difference does not know.
        LookupError: an entry names a condition or places that conditions.py does not have.
    """
    listed = parse(path.read_text(encoding="utf-8"), str(path))["difference"]
    return [_difference(entry) for entry in listed]


def _difference(entry: dict[str, Any]) -> Difference:
    params = tuple(entry.pop("params", {}).items())
    sets, outputs = (tuple(entry.pop(name, ())) for name in ("sets", "outputs"))
    found = Difference(**entry, params=params, sets=sets, outputs=outputs)
    if found.when not in ("", *CONDITIONS) or found.at not in ("", *PLACES):
        raise LookupError(f"{found.instead}: conditions.py has no {found.when or found.at}")
    return found
