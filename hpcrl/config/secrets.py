"""Finds secrets in settings, and masks them in copies of a configuration that leave its run: in reports, trackers and TensorBoard."""

from __future__ import annotations

import re
from typing import Any, TypeVar

T = TypeVar("T")

_NAMED = re.compile(
    r"\b(\w*(?:_KEY|APIKEY|TOKEN|SECRET|PASSWORD))(=['\"]?)[\w+.-][^\s'\"&;]*", re.IGNORECASE
)  # no path
_LOGIN = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")


def name_of_secret(text: str) -> str | None:
    """Return the name of a variable, or of a parameter, to which a text gives a key, token or password; None without one."""
    found = _NAMED.search(text)
    return found[1] if found else None


def masked(value: T) -> T:
    """Return a value of a configuration, its tables and lists too, without keys of variables and without names and passwords in addresses."""
    found: Any = value
    if isinstance(found, str):
        found = _LOGIN.sub("…", _NAMED.sub(r"\1\2…", found))
    elif isinstance(found, dict):
        found = {name: masked(one) for name, one in found.items()}
    elif isinstance(found, list):
        found = [masked(one) for one in found]
    return found
