"""Which Python program or shell script a command starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def source_of(program: PythonProgram, origin: str) -> Path | None:
    """Return the Python file of a program: below the folder of the script or the working directory, or else beside the script.

    Args:
        origin: the script that starts it.
    """
    is_file, folder = program.name.endswith(".py"), Path(origin).parent
    below = Path(program.name if is_file else program.name.replace(".", "/") + ".py")
    candidates = (folder / below, below, folder / below.name)
    return next((path for path in candidates if path.suffix == ".py" and path.is_file()), None)
