"""verl's configurations, YAML and command lines of main_ppo, to hpcrl's.

What counts is what the source's run did: a setting that it leaves out has verl's default, which is written where hpcrl's is another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import get_origin

from hpcrl.convert.conversion import Conversion, known
from hpcrl.convert.mapping import Dropped, To
from hpcrl.convert.sbatch import convert_sbatch
from hpcrl.convert.script import command_of, note_command
from hpcrl.convert.skyrl.translate import location
from hpcrl.convert.verl.algorithm import ALGORITHM
from hpcrl.convert.verl.conditions import without_effect
from hpcrl.convert.verl.fields import LOST, TARGETS, field_of
from hpcrl.convert.verl.models import MODELS
from hpcrl.convert.verl.put import Rule, put
from hpcrl.convert.verl.source import VerlSource, read_words, read_yaml
from hpcrl.convert.verl.training import TRAINING

__all__ = ["TARGETS", "convert_script", "convert_words", "convert_yaml"]

RULES: dict[str, Rule] = ALGORITHM | MODELS | TRAINING
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
    command, conversion = command_of(text, origin), Conversion(origin)
    source = read_words(command.words, conversion)
    note_command(command, source, conversion, field_of, _NAMES)
    return _converted(source, conversion, command.batch)


def is_verl(text: str) -> bool:
    """Return whether a script or a YAML document is verl's, by what stands in it."""
    return "actor_rollout_ref" in text or "verl.trainer." in text


def _converted(source: VerlSource, conversion: Conversion, batch: str = "") -> Conversion:
    _note_program(source, conversion)
    for path, target in TARGETS.items():
        if isinstance(target, Dropped) and path not in RULES:
            _note_dropped(source, conversion, path, target)
        elif path in source.unread:
            conversion.note("conflict", source.names[path], "", source.unread[path])
        elif isinstance(target, To) and path not in RULES:
            _map(source, conversion, path, target)
        else:
            RULES[path](source, conversion, path)
    convert_sbatch(batch, conversion)
    order = {name: index for index, name in enumerate(source.names.values())}
    conversion.entries.sort(key=lambda entry: order.get(entry.source, len(order)))
    left_out = set(TARGETS) - set(source.names.values())
    conversion.finish()
    conversion.entries = [one for one in conversion.entries if one.kind != "dropped" or one.source not in left_out]
    return conversion


def _note_program(source: VerlSource, conversion: Conversion) -> None:
    last = source.program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if last and last not in _PROGRAMS:
        message = "a program of its own beside verl's main_ppo, whose code may do something else; write what it does for hpcrl"
        if "async" in last:
            message = "verl's asynchronous trainer, whose placement is its own; set trainer.fully_async.max_staleness_steps and trainer.placement"
        conversion.note("conflict", source.program, "", message)


def _note_dropped(source: VerlSource, conversion: Conversion, path: str, target: Dropped) -> None:
    if path not in source.names:
        return
    lost = path in LOST and (path in source.unread or not _is_default(source, path))
    conversion.note("conflict" if lost else "dropped", source.names[path], "", target.reason)


def _is_default(source: VerlSource, path: str) -> bool:
    """Return whether a setting without a place here has the value with which nothing is lost: verl's default, or nothing at all."""
    value = source.given[path]
    default = VerlSource(megatron=source.megatron)[path]
    off = isinstance(value, dict) and not value.get("enable", value.get("enabled", bool(value)))
    return value == default or value in (None, "", [], "null") or off


def _map(source: VerlSource, conversion: Conversion, path: str, target: To) -> None:
    value, setting = source[path], known().get(target.path)
    if isinstance(value, Hashable):
        value = target.values.get(value, value)
    if setting and setting.location:
        value = location(value)
    if isinstance(value, str) and setting and all(get_origin(kind) is list for kind in setting.types):
        value = [value]
    if value is None and setting and not setting.optional:
        if path in source.names:
            conversion.note("dropped", source.names[path], "", "null: the default here")
        return
    if not (reason := without_effect(source, path)):
        put(source, conversion, path, target.path, value)
    elif path in source.names:
        conversion.note("dropped", source.names[path], "", reason)
