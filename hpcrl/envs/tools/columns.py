"""Reads the columns that an environment needs from the extras of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard
from unicodedata import normalize

from hpcrl.errors import DataError


def whole_number(environment: str, extras: Mapping[str, Any], column: str) -> int:
    """Return the whole number in a column. Raises DataError where there is none."""
    value = extras.get(column)
    if not is_whole(value):
        raise lacking(environment, column, "a whole number", value)
    return value


def word(environment: str, extras: Mapping[str, Any], column: str) -> str:
    """Return the word in a column, letters only; one with an accent is one character (Unicode's form NFC). Raises DataError where there is none."""
    value = extras.get(column)
    composed = normalize("NFC", value) if isinstance(value, str) else ""
    if not composed.isalpha():
        raise lacking(environment, column, "a word, letters only", value)
    return composed


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def lacking(environment: str, column: str, expected: str, found: Any) -> DataError:
    """Return the error of a row that does not have what its environment needs."""
    return DataError(f"{environment}: the row needs a column `{column}` with {expected}, found {found!r:.80}")
