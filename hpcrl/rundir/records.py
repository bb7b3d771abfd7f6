"""Reads and writes JSON records of a run, in files of their own and as lines of others; damaged ones are named, with the remedy.

The last field of a record is the checksum of the text before it:

    {"attempt": 3, "from": "s000040", "blake2b": "0f343b0931126a20f133d67c2b018a3b"}

A record without one was written by a person or by an earlier version of hpcrl, and is believed if it has the right form.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from hpcrl.errors import RunError
from hpcrl.rundir.commit import digest_of, make_directory, parse_json, read_bytes

Record = TypeVar("Record")

_CHECKSUM = "blake2b"
_LATEST = 1e11  # the year 5138
_AT_END = re.compile(rb'(.*), "blake2b": "([0-9a-f]{32})"\}[ \t\r\n]*', re.DOTALL)
_NAME_DAMAGED = re.compile(rb', "[^"]{7}": "[0-9a-f]{32}"\}\s*\Z')
_BEFORE_END = re.compile(rb'"blake2b": "[0-9a-f]{32}".', re.DOTALL)


def with_checksum(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of a record, which has a field, with its checksum as the last one; and that checksum."""
    text = json.dumps(record)
    checksum = digest_of(text.encode())
    return f'{text[:-1]}, "{_CHECKSUM}": "{checksum}"}}', checksum


def parse_record(content: bytes, required: bool = False) -> tuple[Any, str]:
    """Return the value of a record without its checksum, and the checksum of the text without it.

    Args:
        required: what has no checksum is none.

    Raises:
        ValueError: it is no JSON, or its checksum differs.
    """
    found = _AT_END.fullmatch(content)
    text = found[1] + b"}" if found else content
    checksum = digest_of(text)
    if found and found[2].decode() != checksum:
        raise ValueError("its checksum differs")
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    # where the damage is in the checksum itself, or in its name
    unusable = (isinstance(value, dict) and _CHECKSUM in value) or _NAME_DAMAGED.search(content)
    if not found and (required or unusable):
        raise ValueError("it has no usable checksum")
    return value, checksum


def append_text(path: Path, text: str) -> None:
    """Append whole lines to a file, which is made where there is none; one that a kill has cut off ends before them. They outlive a crash of the
    node from then on."""
    make_directory(path.parent)
    with path.open("ab+") as file:
        end = file.tell()
        cut_off = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        file.write((b"\n" if cut_off else b"") + text.encode())
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> list[tuple[str, bytes]]:
    """Return the lines of a file to which records are appended, each after its place, for errors; without what a kill has cut off.

    A node that goes down may leave zeros in the place of what it wrote last.
    """
    lines = [line.rstrip(b"\0") for line in (read_bytes(path) or b"").split(b"\n")]
    return [(f"{path}, line {number},", line) for number, line in enumerate(lines, 1) if not _is_cut_off(line)]


def _is_cut_off(line: bytes) -> bool:
    """Return whether it is no more than the beginning of a record, or nothing."""
    if line[:1] != b"{" or _BEFORE_END.search(line):
        return not line.strip()
    return line[-1:] != b"}" or _ends_too_early(line)


def _ends_too_early(line: bytes) -> bool:
    """Return whether JSON goes on behind the line: it may end with a record inside of the record."""
    text = line.decode(errors="replace")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    return False


def parse_line(place: str, line: bytes, remedy: str) -> Any:
    """Return the value of one of `whole_lines` without its checksum."""
    try:
        return parse_record(line)[0]
    except ValueError as error:
        raise damaged(place, str(error), remedy) from None


def damaged(place: str | Path, why: str, remedy: str) -> RunError:
    """Return the error that names a file, or a line of one, that cannot be used as it is."""
    return RunError(f"{place} is damaged: {why}. Restore it from a backup, or {remedy}")


def read_object(path: Path, remedy: str) -> dict[str, Any] | None:
    """Return the record at `path` without its checksum, or None where there is no such file.

    Args:
        remedy: what to do where there is no backup.
    """
    if (content := read_bytes(path)) is None:
        return None
    try:
        value, _ = parse_record(content)
    except ValueError as error:
        raise damaged(path, str(error), remedy) from None
    if not isinstance(value, dict):
        raise damaged(path, f"expected an object, found {type(value).__name__}", remedy)
    return value


def is_time(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a Unix time or a duration, in seconds; NaN, infinity and numbers of absurd size are none."""
    return type(value) in (int, float) and 0 <= value <= _LATEST


def as_record(kind: type[Record], value: Any, place: str | Path, remedy: str) -> Record:
    """Return a JSON object as a dataclass, whose floats are times; what a later hpcrl has added to it is passed over.

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
    hints = get_type_hints(kind)
    optional = {one.name for one in fields(kind) if one.default is not MISSING or one.default_factory is not MISSING}
    return {one.name: hints[one.name] for one in fields(kind)}, optional


def _fits(value: Any, wanted: Any) -> bool:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if wanted is Any:
        return True
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if wanted is float:
        return is_time(value)
    return type(value) is (origin or wanted)
