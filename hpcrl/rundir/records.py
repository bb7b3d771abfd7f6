"""Small JSON files of a run, read as what they should hold; one that holds something else is named, with the remedy.

They are few and not checksummed, because a person may read and repair them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hpcrl.errors import RunError
from hpcrl.rundir.commit import read_json

Record = TypeVar("Record")


def damaged(place: str | Path, why: str, remedy: str) -> RunError:
    """Return the error that names a file, or a line of one, that cannot be used as it is."""
    return RunError(f"{place} is damaged: {why}. Restore it from a backup, or {remedy}")


def read_object(path: Path, remedy: str) -> dict[str, Any] | None:
    """Return the JSON object at `path`, or None where there is no such file.

    Args:
        remedy: what to do where there is no backup.

    Raises:
        RunError: it holds anything else.
    """
    try:
        value = read_json(path)
    except ValueError as error:
        raise damaged(path, f"it is no JSON ({error})", remedy) from None
    if value is not None and not isinstance(value, dict):
        raise damaged(path, f"expected an object, found {type(value).__name__}", remedy)
    return value


def as_record(kind: type[Record], value: Any, place: str | Path, remedy: str) -> Record:
    """Return a JSON object as a dataclass; what a later hpcrl has added to it is passed over.

    Args:
        place: where it was found.

    Raises:
        RunError: a field is missing or has the wrong type.
    """
    known, optional = _fields_of(kind)
    if not isinstance(value, Mapping):
        raise damaged(place, f"expected an object, found {type(value).__name__}", remedy)
    for name, wanted in known.items():
        if name not in value and name not in optional:
            raise damaged(place, f"it has no {name!r}", remedy)
        if name in value and not _fits(value[name], wanted):
            raise damaged(place, f"{name!r} is {value[name]!r:.80}", remedy)
    return kind(**{name: value[name] for name in known if name in value})


@lru_cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the fields of a dataclass with their types, and the names of those that have a default."""
    hints = get_type_hints(kind)
    optional = {one.name for one in fields(kind) if one.default is not MISSING or one.default_factory is not MISSING}
    return {one.name: hints[one.name] for one in fields(kind)}, optional


def _fits(value: Any, wanted: Any) -> bool:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if wanted is float:
        return type(value) in (int, float)
    return type(value) is (origin or wanted)
