"""Reads a verl configuration, a YAML file, a script or the words of a command, to its settings with interpolations resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.errors import nearest
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.program import program_of
from hpcrl.convert.skyrl.source import UnreadableError, load_tree, merge, parse_override, resolve
from hpcrl.convert.verl.fields import DEFAULTS, MEGATRON_DEFAULTS, SECTIONS, TARGETS, field_of, present

_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.\-/@]*)=(.*)", re.DOTALL)
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_HYDRA = ("defaults", "hydra")
_CLASS = "_target_"

Tree = dict[str, Any]


@dataclass
class VerlSource:
    """A verl configuration.

    Attributes:
        given: settings that it names, in its order; where they lie in one that is a table, that table.
        names: setting to the name that the source uses.
        unread: settings whose value cannot be read, with the reason.
        program: the module or file that its command starts; empty where there is none.
        megatron: whether the defaults of verl's configuration for Megatron-core count.
    """

    given: Tree = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    program: str = ""
    megatron: bool = False

    def __getitem__(self, path: str) -> Any:
        """Return the value of a setting, verl's default where it is left out or could not be read."""
        if path in self.given:
            return self.given[path]
        return MEGATRON_DEFAULTS.get(path, DEFAULTS[path]) if self.megatron else DEFAULTS[path]

    def number(self, path: str) -> int:
        """Return a whole number, at least 1; 1 where the source has something else, which is reported elsewhere."""
        value = self[path]
        return max(1, value) if isinstance(value, int) else 1


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
    started = bool(program.name)
    for word in program.arguments:
        match = _OVERRIDE.fullmatch(word)
        if word.startswith("-"):
            _option(word, source, conversion)
        elif match is None or (_ENVIRONMENT.match(word) and not started):
            if started and word not in ("$@", "$*"):
                conversion.note("unknown", word, "", "expected name=value")
        else:
            started = True
            _take(match, word, tree, source, conversion)
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


def _take(match: re.Match[str], word: str, tree: Tree, source: VerlSource, conversion: Conversion) -> None:
    prefix, name, value = match.groups()
    if "~" in prefix:
        conversion.note("conflict", "~" + name, "", "deletes a setting; leave it out here, and its default counts")
    elif name == "model_engine":
        source.megatron = value == "megatron"
        known = value in ("dp", "megatron", "fsdp")
        message = "fsdp2 and megatron are the strategies here" if not known else ""
        conversion.note("mapped" if known else "conflict", name, "trainer.strategy" if known else "", message)
    elif "@" in name or "/" in name or name.startswith("hydra."):
        conversion.note("conflict", name, "", "chooses a file of verl's configuration; write what stands in it")
    else:
        merge(tree, parse_override(word, name, value, conversion.origin))


def _filled(tree: Tree, source: VerlSource, conversion: Conversion) -> VerlSource:
    from omegaconf import OmegaConf

    for name in _HYDRA:
        if tree.pop(name, None) is not None:
            message = "other files of verl's configuration, whose defaults are taken to be verl's own"
            conversion.note("translated", name, "", message)
    background: Tree = {}
    strategy = {path: value for path, _, value in _leaves(tree)}.get("actor_rollout_ref.actor.strategy")
    source.megatron = source.megatron or strategy == "megatron"
    defaults = DEFAULTS | (MEGATRON_DEFAULTS if source.megatron else {})
    for path, value in sorted(deepcopy(defaults).items()):  # tables are merged in place
        merge(background, _nested(path.split("."), value))
    merge(background, tree)
    resolved = OmegaConf.create(background)
    for path, keys, _ in _leaves(tree):
        if keys[-1] != _CLASS:
            _set(source, path, keys, resolved, conversion)
    return source


def _nested(keys: Sequence[str], value: Any) -> Tree:
    for key in reversed(keys):
        value = {key: value}
    return value


def _leaves(tree: Mapping[Any, Any], above: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield path, keys and value of each setting, and of each name that is none."""
    for key, value in tree.items():
        keys = (*above, key)
        path = ".".join(map(str, keys))
        below = any(name.startswith(path + ".") for name in (*SECTIONS, *TARGETS))
        if isinstance(value, dict) and (below or field_of(path) is None or present(path) in SECTIONS):
            yield from _leaves(value, keys)
        else:
            yield path, keys, value


def _set(source: VerlSource, path: str, keys: tuple[Any, ...], resolved: Any, conversion: Conversion) -> None:
    name = field_of(path)
    if name is None:
        near = nearest(present(path), [*TARGETS, *sorted(SECTIONS)])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        conversion.note("unknown", path, "", "no setting of verl's main_ppo that is known here" + hint)
        return
    try:
        value = resolve(resolved, keys)
    except UnreadableError as error:
        source.unread[name], source.names[name] = str(error), path
        return
    below = present(path).removeprefix(name).strip(".")
    if below:  # in a setting that is a table
        value = source.given.get(name, {}) | _nested(below.split("."), value)
    if name in source.given and source.given[name] != value and not below:
        conversion.note("conflict", path, "", f"differs from {source.names[name]}, another name of it; this one counts")
    source.given[name] = value
    source.names.setdefault(name, path)
