"""Which program a SkyRL command starts, and what that says about the run beside the settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.convert.conversion import Conversion

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FILE = re.compile(r"[^=\s]+\.(py|sh)")
_OWN = re.compile(r"skyrl(_train|\.train)\.entrypoints\.main_base|(.*/)?entrypoints/main_base\.py")
_SFT = re.compile(r"skyrl\.train\.(main_sft|sft_trainer)|(.*/)?skyrl/train/(main_sft|sft_trainer)\.py")


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

    @property
    def is_sft(self) -> bool:
        """Whether it is SkyRL's program for supervised fine-tuning, which has settings of its own."""
        return _SFT.fullmatch(self.name) is not None

    @property
    def is_custom(self) -> bool:
        """Whether it is neither SkyRL's own nor one of its examples whose code has a setting here."""
        return bool(self.name) and not (_OWN.fullmatch(self.name) or self.is_sft or self.last in _EXAMPLES)


# Programs of SkyRL's examples whose own code is a setting here -> what it is.
_EXAMPLES = {
    "main_fully_async": "fully asynchronous training, trainer.fully_async",
    "main_async": "the next batch is generated while one is trained: fully asynchronous training, one step off-policy",
    "main_dapo": "its penalty for long responses is environment.overlong_reward here",
    "main_dapo_fully_async": "fully asynchronous training, whose penalty for long responses is environment.overlong_reward here",
    "geometry3k_entrypoint": "its environment is geometry3k here",
}


def program_of(words: Sequence[str]) -> PythonProgram:
    """Return the program that the words of a command start: what follows -m, or else the first file of Python or of a shell."""
    for place, word in enumerate(words[:-1]):
        if word == "-m" and _MODULE.fullmatch(words[place + 1]):
            return PythonProgram(words[place + 1], list(words[place + 2 :]))
    for place, word in enumerate(words):
        if _FILE.fullmatch(word):
            return PythonProgram(word, list(words[place + 1 :]))
    return PythonProgram("", list(words))


def note_program(program: PythonProgram, conversion: Conversion) -> None:
    """Note what the program means, and as a conflict what of it no setting can say."""
    if program.last in _EXAMPLES:
        conversion.note("translated", program.name, "", _EXAMPLES[program.last])
    elif program.last == "main_generate":
        conversion.note(
            "conflict", program.name, "", "only generates and scores; `hpcrl eval` does that with a model or a run"
        )
    elif program.name.endswith(".sh"):
        message = "a script of its own, whose settings count too; convert it, and set there what this one changes"
        conversion.note("conflict", program.name, "", message)
    elif program.is_custom:
        message = (
            "a program of its own beside SkyRL's main_base: its code may replace environment, rewards, loss, generator or trainer; write what "
            "it does for hpcrl (docs/environments, docs/rewards.md, docs/algorithms.md)"
        )
        conversion.note("conflict", program.name, "", message)
