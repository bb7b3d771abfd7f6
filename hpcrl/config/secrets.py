"""Finds secrets in settings, and masks them in copies of a configuration that leave its run: in reports, trackers and TensorBoard."""

from __future__ import annotations

import re
from typing import Any, TypeVar

T = TypeVar("T")

_NAMED = re.compile(
    r"\b(?P<name>\w*(?:_KEY|APIKEY|TOKEN|SECRET|PASSWORD))="
    r"(?:\$?(?P<quote>\\?['\"])(?P<quoted>.+?)(?=(?<!\\)(?P=quote)|\Z)|(?P<bare>[^\s'\"&;\\=(<{\[|][^\s'\"&;]*))",
    re.IGNORECASE | re.DOTALL,
)
_FROM_ELSEWHERE = re.compile(r"~/|`|\$\(|\$(?:\w+|\{\w+\})(?:[/,:]|\Z)")
"""Beginning of a value that the shell reads from a file, a command or a variable."""
_NO_FILE = re.compile(r"API_?KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
"""Names whose values are no files of keys, though they begin with a slash."""
_LOGIN = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")


def name_of_secret(text: str) -> str | None:
    """Return the name of a variable, or of a parameter, to which a text gives a key, token or password; None without one."""
    return next((found["name"] for found in _NAMED.finditer(text) if _is_secret(found)), None)


def _is_secret(found: re.Match[str]) -> bool:
    value = found["quoted"] or found["bare"]
    if not (found["quote"] or "").endswith("'") and _FROM_ELSEWHERE.match(value):
        return False
    return not value.startswith("/") or _NO_FILE.search(found["name"]) is not None


def _masked(found: re.Match[str]) -> str:
    value = found["quoted"] or found["bare"]
    return found[0].removesuffix(value) + "…" if _is_secret(found) else found[0]


def masked(value: T) -> T:
    """Return a value of a configuration, its tables and lists too, without keys of variables and without names and passwords in addresses."""
    found: Any = value
    if isinstance(found, str):
        found = _LOGIN.sub("…", _NAMED.sub(_masked, found))
    elif isinstance(found, dict):
        found = {name: masked(one) for name, one in found.items()}
    elif isinstance(found, list | tuple):
        found = [masked(one) for one in found]
    return found
