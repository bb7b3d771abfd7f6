"""Finds the SkyRL command in a shell script, and splits and expands it as the shell would.

Understood are what SkyRL's own scripts use: comments, lines continued by a backslash, quotes, variables that the script sets
(`NAME=value`, `export NAME=value`, `: "${NAME:=value}"`) and `${NAME:-value}`. No command is run. A variable that the script does not
set stays as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from hpcrl.errors import ConfigError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ASSIGNED_UNLESS_SET = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\})")
_OVERRIDE = re.compile(r"[+~]*[a-z_]\w*(\.[\w.]+)+=.*", re.DOTALL)
_REST = {"$@", "$*", "${@}", "${@:1}"}
_END = set(";&|()<>\n")


def command_words(text: str, origin: str) -> list[str]:
    """Return the words of the first command in `text` that has overrides such as trainer.epochs=2.

    Raises:
        ConfigError: there is none, or quotes do not match.
    """
    variables: dict[str, str] = {}
    try:
        for words in _commands(text):
            expanded = [_expand(word, variables) for word in words if word not in _REST]
            if any(_OVERRIDE.fullmatch(word) for word in expanded):
                return expanded
            for word in words:
                match = _ASSIGNED.fullmatch(word) or _ASSIGNED_UNLESS_SET.fullmatch(word)
                if match:
                    variables[match[1]] = _expand(match[2], variables)
    except ValueError as error:
        raise ConfigError(f"{origin}: not a shell command: {error}") from None
    raise ConfigError(f"{origin}: no SkyRL command; expected words such as trainer.epochs=2")


def _commands(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text.replace("\r\n", "\n").replace("\\\n", " "), posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    for word in lexer:
        if _END.issuperset(word):
            yield words[:-1] if word[0] in "<>" and words and words[-1].isdigit() else words
            words = []
        else:
            words.append(word)
    yield words


def _expand(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, f"${name}" if match[3] is None else match[3])

    return _VARIABLE.sub(value, word)
