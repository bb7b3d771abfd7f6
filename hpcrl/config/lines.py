"""Finds the line of a TOML file that sets a dotted path; tomllib itself only tells lines of syntax errors."""

from __future__ import annotations

import re

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_NAME = rf"{_PART}(?:\s*\.\s*{_PART})*"
_TABLE = re.compile(rf"\s*\[\[?\s*({_NAME})\s*\]")
_KEY = re.compile(rf"\s*({_NAME})\s*=")
_LONG_QUOTE = re.compile(r'"""|\'\'\'')


def line_of(text: str, path: str) -> int | None:
    """Return the number of the line that sets `path`, or else of the line that begins the innermost table around it.

    Returns:
        The line, counted from 1; None where the file does not mention the path.
    """
    found: dict[str, int] = {}
    table, quote = "", None
    for number, line in enumerate(text.splitlines(), 1):
        if quote is None:
            if header := _TABLE.match(line):
                table = _dotted(header[1]) + "."
                found.setdefault(table[:-1], number)
            elif key := _KEY.match(line):
                found.setdefault(table + _dotted(key[1]), number)
        for mark in _LONG_QUOTE.findall(line):
            quote = mark if quote is None else None if quote == mark else quote
    while path and path not in found:
        path = path.rpartition(".")[0]
    return found.get(path)


def _dotted(name: str) -> str:
    return ".".join(part.strip("\"'") for part in re.findall(_PART, name))
