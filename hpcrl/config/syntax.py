"""Explains syntax errors of TOML: the line, what was expected and the remedy. Loaded only when a file cannot be read."""

from __future__ import annotations

import re

from hpcrl.config.lines import NAME, lines_of, parts

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_DECLARED = re.compile(r"Cannot (?:declare|mutate immutable namespace|redefine namespace) \((.*?),?\)")
_YAML = re.compile(r"""\s*(?:- |---|[\w."'-]+:(?:\s|$))""")
_PYTHON = {"True": "true", "False": "false", "None": "default on a command line, or no line at all"}


def explained(text: str, error: str, origin: str) -> tuple[int, str]:
    """Return the line of a syntax error of TOML, counted from 1, and its explanation.

    Args:
        text: TOML text that was refused.
        error: message of tomli, with the place.
        origin: name of the file.
    """
    place = _PLACE.search(error)
    reason = error[: place.start()] if place else error
    lines = text.split("\n")
    at_end = not place or place[1] is None
    if not place or place[1] is None:  # tomli names no line there; a list that is not closed began with the last key
        last = len(text.rstrip().split("\n"))
        number, column = last if reason.startswith("Cannot") else max(lines_of(text).values(), default=last), 1
    else:
        number, column = int(place[1]), int(place[2])
    line = lines[number - 1] if number <= len(lines) else ""
    known = _foreign(text, line, origin) or _twice(text, number, reason)
    if at_end and not known:
        return number, f"not valid TOML: a value, text, list or table is not closed before the file ends ({reason})"
    return number, known or _value(_path(text, number), line[column - 1 :], reason)


def _foreign(text: str, line: str, origin: str) -> str | None:
    """Return the remedy where the text is a shell script, YAML or JSON."""
    convert = (
        f"a run reads TOML; of one for SkyRL, hpcrl config convert --from skyrl {origin} -o experiment.toml makes TOML"
    )
    if text.startswith("#!"):
        return f"looks like a shell script; {convert}"
    if text.lstrip().startswith("{"):
        return "looks like JSON; a run reads TOML"
    if _YAML.match(line) and not re.match(rf"\s*{NAME}\s*=", line):
        return f"looks like YAML; {convert}"
    return None


def _twice(text: str, number: int, reason: str) -> str | None:
    if declared := _DECLARED.match(reason):
        table = ".".join(part.strip().strip("'\"") for part in declared[1].split(","))
        found = [line for path, line in lines_of(text).items() if f"{path}.".startswith(f"{table}.") and line < number]
        if found:
            return f"[{table}] stands in line {min(found)} already; put both together"
    if not reason.startswith("Cannot overwrite a value"):
        return None
    path = _path(text, number)
    first = lines_of(text).get(path, number)
    where = f"{path} stands in line {first} already" if first < number else path
    return f"a key that is set twice: {where}; leave one of them out"


def _path(text: str, number: int) -> str:
    lines = text.split("\n")[:number]
    header = re.compile(rf"\s*\[\[?\s*({NAME})")
    if found := header.match(lines[-1]):
        return ".".join(parts(found[1]))
    tables = [found[1] for line in lines if (found := header.match(line))]
    key = re.match(rf"\s*({NAME})\s*=", lines[-1])
    return ".".join([*(parts(tables[-1]) if tables else []), *(parts(key[1]) if key else ["KEY"])])


def _value(path: str, rest: str, reason: str) -> str:
    """Return the explanation of a value that TOML does not have.

    Args:
        path: what it is to set.
        rest: its line from the place that tomli names.
    """
    if reason.startswith("Illegal character '\\n'"):
        return "not valid TOML: the text is not closed; expected \" or ' before the end of the line"
    if rest.startswith("$"):
        return f"TOML has no variables; write the value, or {path}={rest.split()[0]} on the command line"
    word = re.match(r"[A-Za-z_][^\s,\]}#]*", rest)
    if reason == "Invalid value" and word:
        remedy = f"write {_PYTHON[word[0]]}" if word[0] in _PYTHON else f'quote it: "{word[0]}"'
        return f"not valid TOML: {word[0]} is no value; {remedy}"
    if "Unescaped '\\'" in reason:
        return f"not valid TOML: {reason}; write \\\\, or put the text in single quotes"
    return f"not valid TOML: {reason}"
