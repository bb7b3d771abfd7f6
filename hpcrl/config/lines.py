"""Finds the line of a TOML text that sets a path."""

from __future__ import annotations

import re
from functools import lru_cache

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
NAME = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_TABLE = re.compile(rf"\s*\[\[?\s*({NAME})\s*\]")
_KEY = re.compile(rf"\s*({NAME})\s*=")
_QUOTED = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*''',
    re.DOTALL,
)


def line_of(text: str, path: str) -> int | None:
    """Return the number of the line that sets `path`, or else of the line that begins the innermost table around it.

    Returns:
        The line, counted from 1; None where the file does not mention the path.
    """
    found = lines_of(text)
    while path and path not in found:
        path = path.rpartition(".")[0]
    return found.get(path)


@lru_cache(maxsize=8)
def lines_of(text: str) -> dict[str, int]:
    """Return the line of each key and table of TOML text, counted from 1, by its dotted path; the first where it is there twice."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(_QUOTED.sub(_blank, text).split("\n"), 1):
        if header := _TABLE.match(line):
            table = ".".join(parts(header[1])) + "."
            found.setdefault(table[:-1], number)
        elif key := _KEY.match(line):
            found.setdefault(table + ".".join(parts(key[1])), number)
    return found


def _blank(quoted: re.Match[str]) -> str:
    """Return only the line ends of a comment or of text in three quotes, which may look like a key; other text as it is."""
    text = quoted[0]
    return "\n" * text.count("\n") if text.startswith(("#", '"""', "'''")) else text


def parts(name: str) -> list[str]:
    """Return the parts of a dotted name, some of which may be quoted."""
    return [part.strip("\"'") for part in re.findall(_PART, name)]
