"""verl's configurations, YAML and command lines of main_ppo, to hpcrl's.

What counts is what the source's run did: a setting that it leaves out has verl's default, which is written where hpcrl's is another.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.rules import Rule, convert_fields
from hpcrl.convert.script import command_of, note_command
from hpcrl.convert.verl.algorithm import ALGORITHM
from hpcrl.convert.verl.conditions import without_effect
from hpcrl.convert.verl.fields import TARGETS, VERL
from hpcrl.convert.verl.models import MODELS
from hpcrl.convert.verl.source import VerlSource, read_words, read_yaml
from hpcrl.convert.verl.training import TRAINING

__all__ = ["TARGETS", "convert_script", "convert_words", "convert_yaml"]

RULES: dict[str, Rule[VerlSource]] = ALGORITHM | MODELS | TRAINING
_NAMES = ("trainer.project_name", "trainer.experiment_name")
_PROGRAMS = ("main_ppo", "main_ppo_sync", "main_dapo")


def convert_yaml(text: str, origin: str) -> Conversion:
    """Return the conversion of a YAML document of verl.

    Args:
        origin: where it comes from, for errors and the first line of the TOML.

    Raises:
        ConfigError: it is not YAML, or no table of settings; names the place.
    """
    conversion = Conversion(origin)
    return _converted(read_yaml(text, conversion), conversion)


def convert_words(words: Sequence[str], origin: str) -> Conversion:
    """Return the conversion of a verl command, whose words are split and unquoted as the shell does it.

    Raises:
        ConfigError: a value is not YAML; names the word.
    """
    conversion = Conversion(origin)
    return _converted(read_words(words, conversion), conversion)


def convert_script(text: str, origin: str) -> Conversion:
    """Return the conversion of the verl command in a shell script.

    Raises:
        ConfigError: there is none, or a value of it is not YAML.
    """
    command, conversion = command_of(text, origin, environment={"DEVICE": "gpu"}), Conversion(origin)
    if "${DEVICE:-" in text:
        conversion.note("translated", "$DEVICE", "", "gpu: only NVIDIA GPUs train here")
    source = read_words(command.words, conversion)
    note_command(command, source, conversion, VERL.field_of, _NAMES)
    return _converted(source, conversion, command.batch)


def is_verl(text: str) -> bool:
    """Return whether a script or a YAML document is verl's, by what stands in it."""
    return "actor_rollout_ref" in text or "verl.trainer." in text


def _converted(source: VerlSource, conversion: Conversion, batch: str = "") -> Conversion:
    _note_program(source, conversion)
    return convert_fields(source, conversion, RULES, without_effect, batch)


def _note_program(source: VerlSource, conversion: Conversion) -> None:
    last = source.program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if last and last not in _PROGRAMS:
        message = "a program of its own beside verl's main_ppo, whose code may do something else; write what it does for hpcrl"
        if "async" in last:
            message = "verl's asynchronous trainer, whose placement is its own; set trainer.fully_async.max_staleness_steps and trainer.placement"
        conversion.note("conflict", source.program, "", message)
