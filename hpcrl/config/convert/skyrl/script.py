"""Finds the SkyRL command in a shell script, and splits and expands it as the shell would.

Understood are what SkyRL's own scripts use: comments, lines continued by a backslash, quotes, variables that the script sets
(`NAME=value`, `export NAME=value`, `: "${NAME:=value}"`, `NAME=(value ...)`) and `${NAME:-value}`. No command is run: `$(date)` stays as it
is, and so does a variable that the script does not set.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from io import StringIO

from hpcrl.errors import ConfigError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ASSIGNED_UNLESS_SET = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}", re.DOTALL)
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ITEMS = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\})")
_OVERRIDE = re.compile(r"[+~]*[a-z_]\w*(\.[\w.]+)+=.*", re.DOTALL)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_SUBSTITUTED = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`")
_HIDDEN = {ord(letter): 0xE000 + ord(letter) for letter in " \t\n()<>;&|#'\"\\"}
_SHOWN = {hidden: letter for letter, hidden in _HIDDEN.items()}
_REST = {"$@", "$*", "${@}", "${@:1}"}
_END = set(";&|()<>\n")


def command_words(text: str, origin: str) -> tuple[list[str], list[str]]:
    """Return the words of the first command in `text` that has overrides such as trainer.epochs=2, and the overrides of others.

    Raises:
        ConfigError: there is none, or quotes do not match.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    found: list[list[str]] = []
    try:
        for words in _commands(text):
            expanded = [item for word in words if word not in _REST for item in _expand(word, variables, arrays)]
            if words and words[0].endswith("(") and (array := _ARRAY.fullmatch(words[0][:-1])):
                arrays[array[1]] = [*(arrays.get(array[1], []) if array[2] else []), *expanded[1:]]
            elif any(_OVERRIDE.fullmatch(word) for word in expanded):
                found.append(expanded)
            else:
                for word in words:
                    if match := _ASSIGNED.fullmatch(word) or _ASSIGNED_UNLESS_SET.fullmatch(word):
                        variables[match[1]] = "".join(_expand(match[2], variables, {}))
    except ValueError as error:
        raise ConfigError(f"{origin}: not a shell command: {error}") from None
    if not found:
        raise ConfigError(f"{origin}: no SkyRL command; expected words such as trainer.epochs=2")
    return found[0], [word for words in found[1:] for word in words if _OVERRIDE.fullmatch(word)]


class _Lines(StringIO):
    """Text whose comments, which the lexer skips by the line, do not take the end of the line with them."""

    def readline(self, size: int = -1, /) -> str:
        line = super().readline(size)
        self.seek(self.tell() - line.endswith("\n"))
        return line


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; those of an array start with "NAME=("."""
    text = _SUBSTITUTED.sub(lambda found: found[0].translate(_HIDDEN), _COMMENT.sub("", text.replace("\r\n", "\n")))
    lexer = shlex.shlex(_Lines(text.replace("\\\n", " ")), posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    in_array = False
    for word in lexer:
        if not _END.issuperset(word):
            words.append(word.translate(_SHOWN))
        elif word[0] == "(" and words and _ARRAY.fullmatch(words[-1]):
            words, in_array = [words[-1] + "("], True
        elif not in_array or ")" in word:
            yield words[:-1] if word[0] in "<>" and words and words[-1].isdigit() else words
            words, in_array = [], False
    yield words


def _expand(word: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, f"${name}" if match[3] is None else match[3])

    items = _ITEMS.fullmatch(word)
    return arrays[items[1]] if items and items[1] in arrays else [_VARIABLE.sub(value, word)]
