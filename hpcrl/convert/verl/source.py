"""Reads a verl configuration, a YAML file, a script or the words of a command, to its settings with interpolations resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.config.load import nested
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.field_table import FieldTable, TableSource
from hpcrl.convert.hydra import UnreadableError, load_tree, merge, overrides, parse_override, resolve
from hpcrl.convert.program import program_of
from hpcrl.convert.verl.fields import DEFAULTS, MEGATRON_DEFAULTS, TARGETS, VERL

_HYDRA = ("defaults", "hydra")
_CLASS = "_target_"

Tree = dict[str, Any]


@dataclass
class VerlSource(TableSource):
    """A verl configuration.

    Attributes:
        megatron: whether the defaults of verl's configuration for Megatron-core count.
    """

    table: ClassVar[FieldTable] = VERL

    megatron: bool = False

    def default(self, path: str) -> Any:
        return MEGATRON_DEFAULTS.get(path, DEFAULTS[path]) if self.megatron else DEFAULTS[path]


def read_yaml(text: str, conversion: Conversion) -> VerlSource:
    """Return the settings of a YAML document.

    Raises:
        ConfigError: it is not YAML, or no table; names the place.
    """
    return _filled(load_tree(text, conversion.origin), VerlSource(), conversion)


def read_words(words: Sequence[str], conversion: Conversion) -> VerlSource:
    """Return the settings of a command's words.

    Raises:
        ConfigError: a value is not YAML; names the word.
    """
    program = program_of(words)
    source, tree = VerlSource(program=program.name), {}
    for word in program.arguments:
        if word.startswith("-"):
            _option(word, source, conversion)
    for _, name, value in overrides(program, conversion):
        _take(name, value, tree, source, conversion)
    return _filled(tree, source, conversion)


def _option(word: str, source: VerlSource, conversion: Conversion) -> None:
    name, _, value = word.partition("=")
    if name == "--config-name" and value.removesuffix(".yaml") in ("ppo_trainer", "ppo_megatron_trainer"):
        source.megatron = "megatron" in value
        conversion.note("mapped", word, "", "verl's own configuration")
    elif name == "--config-path" and value in ("config", "./config"):
        conversion.note("mapped", word, "", "verl's own folder")
    elif name in ("--config-name", "--config-path", "--config-dir"):
        message = "a configuration of its own, whose settings count too; convert that file, and set there what the command changes"
        conversion.note("conflict", word, "", message)


def _take(name: str, value: str, tree: Tree, source: VerlSource, conversion: Conversion) -> None:
    if name == "model_engine":
        source.megatron = value == "megatron"
        known = value in ("dp", "megatron", "fsdp")
        message = "fsdp2 and megatron are the strategies here" if not known else ""
        conversion.note("mapped" if known else "conflict", name, "trainer.strategy" if known else "", message)
    elif "@" in name or "/" in name or name.startswith("hydra."):
        conversion.note("conflict", name, "", "chooses a file of verl's configuration; write what stands in it")
    else:
        merge(tree, parse_override(name, value, conversion.origin))


def _filled(tree: Tree, source: VerlSource, conversion: Conversion) -> VerlSource:
    from omegaconf import OmegaConf

    for name in _HYDRA:
        if tree.pop(name, None) is not None:
            message = "other files of verl's configuration, whose defaults are taken to be verl's own"
            conversion.note("translated", name, "", message)
    background: Tree = {}
    strategy = {path: value for path, _, value in _leaves(tree)}.get("actor_rollout_ref.actor.strategy")
    source.megatron = source.megatron or strategy == "megatron"
    defaults = {**DEFAULTS, **(MEGATRON_DEFAULTS if source.megatron else {})}
    for path, value in sorted(deepcopy(defaults).items()):  # tables are merged in place
        merge(background, nested({path: value}))
    merge(background, tree)
    resolved = OmegaConf.create(background)
    for path, keys, _ in _leaves(tree):
        if keys[-1] != _CLASS:
            _set(source, path, keys, resolved, conversion)
    return source


def _leaves(tree: Mapping[Any, Any], above: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield path, keys and value of each setting, and of each name that is none."""
    for key, value in tree.items():
        keys = (*above, key)
        path = ".".join(map(str, keys))
        below = any(name.startswith(path + ".") for name in (*VERL.sections, *TARGETS))
        if isinstance(value, dict) and (below or VERL.field_of(path) is None or VERL.present(path) in VERL.sections):
            yield from _leaves(value, keys)
        else:
            yield path, keys, value


def _set(source: VerlSource, path: str, keys: tuple[Any, ...], resolved: Any, conversion: Conversion) -> None:
    if (name := source.field(path, conversion)) is None:
        return
    try:
        source.take(name, path, resolve(resolved, keys), conversion)
    except UnreadableError as error:
        source.lack(name, path, str(error))
