"""Which of SkyRL's programs a command starts, and what that means for the run beside the settings."""

from __future__ import annotations

import re

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.program import PythonProgram, source_of
from hpcrl.convert.skyrl.registered import registered_in

_OWN = re.compile(r"skyrl(_train|\.train)\.entrypoints\.main_base|(.*/)?entrypoints/main_base\.py")
_SFT = re.compile(r"skyrl\.train\.(main_sft|sft_trainer)|(.*/)?skyrl/train/(main_sft|sft_trainer)\.py")
# Programs of SkyRL's examples whose own code is a setting here -> what it is.
_EXAMPLES = {
    "main_fully_async": "fully asynchronous training, trainer.fully_async",
    "main_async": "the next batch is generated while one is trained: fully asynchronous training, one step off-policy",
    "main_dapo": "its penalty for long responses is environment.overlong_reward here",
    "main_dapo_fully_async": "fully asynchronous training, whose penalty for long responses is environment.overlong_reward here",
    "geometry3k_entrypoint": "its environment is geometry3k here",
}


def is_sft(program: PythonProgram | None) -> bool:
    """Return whether it is SkyRL's program for supervised fine-tuning, which has settings of its own."""
    return program is not None and _SFT.fullmatch(program.name) is not None


def is_custom(program: PythonProgram | None) -> bool:
    """Return whether it is neither SkyRL's own nor one of its examples whose code has a setting here."""
    if program is None or not program.name or program.last in _EXAMPLES:
        return False
    return not (_OWN.fullmatch(program.name) or is_sft(program))


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
    elif is_custom(program) and not _registers_only(program, conversion):
        message = (
            "a program of its own beside SkyRL's main_base: its code may replace environment, rewards, loss, generator or trainer; write what "
            "it does for hpcrl (docs/environments, docs/rewards.md, docs/algorithms.md)"
        )
        conversion.note("conflict", program.name, "", message)


def _registers_only(program: PythonProgram, conversion: Conversion) -> bool:
    """Write the environments that a program registers; return whether it otherwise trains as SkyRL's main_base does."""
    path = source_of(program, conversion.origin)
    if path is None:
        return False
    found = registered_in(path)
    if found.names:
        conversion.values["environment.names"] = found.names
        message = f"registered in {path}: {', '.join(found.names)}; python_path has to name the folder of their modules"
        conversion.note("translated", program.name, "environment.names", message)
    for line in found.unread:
        message = 'registers an environment otherwise than by id and entry_point="package.module:Class"; write it in environment.names'
        conversion.note("conflict", f"{path}:{line}", "", message)
    return bool(found.names) and found.trains_alike
