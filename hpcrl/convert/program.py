"""Which Python program or shell script a command starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FILE = re.compile(r"[^=\s]+\.(py|sh)")


@dataclass(frozen=True)
class PythonProgram:
    """A program that reads settings.

    Attributes:
        name: its module or file; empty where the command names none, as where only overrides are given.
        arguments: the words after it.
    """

    name: str
    arguments: list[str]

    @property
    def last(self) -> str:
        """The last part of its name, such as main_base."""
        return self.name.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def program_of(words: Sequence[str]) -> PythonProgram:
    """Return the program that the words of a command start: what follows -m, or else the first file of Python or of a shell."""
    for place, word in enumerate(words[:-1]):
        if word == "-m" and _MODULE.fullmatch(words[place + 1]):
            return PythonProgram(words[place + 1], list(words[place + 2 :]))
    for place, word in enumerate(words):
        if _FILE.fullmatch(word):
            return PythonProgram(word, list(words[place + 1 :]))
    return PythonProgram("", list(words))
