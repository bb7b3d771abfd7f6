"""Reads a SkyRL configuration, a YAML file or the words of a command, to its settings with interpolations resolved.

Interpolations such as `${trainer.max_prompt_length}` and `${oc.env:HOME}` are OmegaConf's. One that points at a setting which the
source leaves out gets SkyRL's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.errors import nearest
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.hydra import UnreadableError, load_tree, merge, overrides, parse_override, resolve
from hpcrl.convert.program import PythonProgram, program_of
from hpcrl.convert.skyrl.fields import OVERLONG, RL, SFT, Layout
from hpcrl.convert.skyrl.program import is_sft
from hpcrl.convert.source import SourceConfig
from hpcrl.errors import ConfigError

Keys = tuple[Any, ...]


@dataclass
class SkyrlSource(SourceConfig):
    """A SkyRL configuration.

    Attributes:
        old: whether it is of the old layout, whose defaults count where it leaves a setting out.
        program: what its command starts; None where there is no command, or it names no program.
        overlong: what it sets of `fields.OVERLONG`.
        layout: the settings of its program.
    """

    old: bool = False
    program: PythonProgram | None = None
    overlong: dict[str, Any] = field(default_factory=dict)
    layout: Layout = RL

    def __getitem__(self, path: str) -> Any:
        if path in self.given:
            return self.given[path]
        old = self.layout.old_defaults if self.old else {}
        return old[path] if path in old else self.layout.defaults.get(path)


def read_yaml(text: str | bytes, conversion: Conversion) -> SkyrlSource:
    """Return the settings of a YAML document; what it has beside them is noted in `conversion`.

    Raises:
        ConfigError: it is not UTF-8, not YAML, no table, or grows beyond all measure; names the place.
    """
    tree = load_tree(text, conversion.origin)
    found = [path for path, _, _ in _settings(tree, RL)]
    known = [path for path in found if path in RL.targets]
    if len(found) > 2 and 2 * len(known) <= len(found):
        raise ConfigError(
            f"{conversion.origin}: {len(known)} of its {len(found)} settings are SkyRL's, so that it is no configuration of SkyRL; expected the "
            f"sections data, trainer, generator and environment, found {', '.join(map(str, list(tree)[:5]))}"
        )
    source = SkyrlSource(old=any(path in RL.only_old for path in found))
    _fill(source, tree, conversion)
    return source


def read_overrides(words: Sequence[str], conversion: Conversion) -> SkyrlSource:
    """Return the settings of a command's `key=value` words; others are noted in `conversion`, options of the program left out.

    Raises:
        ConfigError: a value is not YAML; names the word.
    """
    tree: dict[str, Any] = {}
    program = program_of(words)
    layout = SFT if is_sft(program) else RL
    source = SkyrlSource(program=program if program.name else None, layout=layout)
    for prefix, name, value in overrides(program, conversion):
        if not prefix or _adds(prefix + name, name, layout, conversion):
            merge(tree, parse_override(name, value, conversion.origin))
    source.old = any(path in layout.refused for path, _, _ in _settings(tree, layout))
    _fill(source, tree, conversion)
    return source


def _adds(word: str, name: str, layout: Layout, conversion: Conversion) -> bool:
    """Return whether +name sets one of SkyRL's own settings, and note it."""
    if any(name == path or name.startswith(path + ".") for path in layout.targets):
        conversion.note("translated", word, name, "SkyRL has this setting; the + is left out")
        return True
    message = "not among the settings of SkyRL of August 2026; here declare it in a subclass of hpcrl.config.Config (config_class)"
    conversion.note("unknown", word, "", message)
    return False


def _settings(tree: Mapping[Any, Any], layout: Layout, above: Keys = ()) -> Iterator[tuple[str, Keys, Any]]:
    """Yield path, keys and value of each setting, and of each name that is none."""
    for key, value in tree.items():
        keys = (*above, key)
        path = ".".join(map(str, keys))
        if path in layout.sections and isinstance(value, dict):
            yield from _settings(value, layout, keys)
        else:
            yield path, keys, value


def _fill(source: SkyrlSource, tree: dict[str, Any], conversion: Conversion) -> None:
    from omegaconf import OmegaConf

    background = _background(tree, source.old, source.layout)
    resolved = OmegaConf.create(background)
    for path, keys, value in _settings(tree, source.layout):
        if path in source.layout.sections:
            _fill_section(source, path, keys, value, resolved, conversion)
        else:
            _fill_setting(source, path, keys, resolved, conversion)


def _background(tree: dict[str, Any], old: bool, layout: Layout) -> dict[Any, Any]:
    """Return the tree over SkyRL's defaults, each setting under both of its names, for interpolations to point at."""
    defaults = {**layout.defaults, **(layout.old_defaults if old else {})}
    previous = {new: old_name for old_name, new in layout.renamed.items()}
    found: dict[Any, Any] = {}
    for path, value in defaults.items():
        for name in (path, previous.get(path, path)):
            _put(found, name.split("."), value)
    for path, _, value in _settings(tree, layout):
        if other := layout.renamed.get(path) or previous.get(path):
            _put(found, other.split("."), value)
    for path, keys, value in _settings(tree, layout):
        if path not in layout.sections or value is not None:
            _put(found, keys, value)
    return found


def _put(tree: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    *above, last = keys
    for key in above:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[last] = value


def _fill_section(
    source: SkyrlSource, path: str, keys: Keys, value: Any, resolved: Any, conversion: Conversion
) -> None:
    """Take a section that is no table: null, or an interpolation of another section."""
    if value is None:
        conversion.note("mapped", path, "", "null: its defaults")
        return
    try:
        found = resolve(resolved, keys)
    except UnreadableError as error:
        conversion.note("conflict", path, "", str(error))
        return
    if not isinstance(found, dict):
        conversion.note("conflict", path, "", f"expected a table, found {found!r:.60}; left out")
        return
    for inner, below, _ in _settings(found, source.layout, keys):
        _fill_setting(source, inner, below, resolved, conversion)


def _fill_setting(source: SkyrlSource, path: str, keys: Keys, resolved: Any, conversion: Conversion) -> None:
    if path in OVERLONG:
        source.overlong[path] = resolve(resolved, keys)
        return
    layout = source.layout
    if path not in layout.targets:
        near = nearest(path, [*layout.targets, *sorted(layout.sections)])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        conversion.note("unknown", path, "", "not among the settings of SkyRL of August 2026" + hint)
        return
    present = layout.renamed.get(path, path)
    try:
        value = resolve(resolved, keys)
    except UnreadableError as error:
        source.lack(present, path, str(error))
        return
    if present in source.given and source.given[present] != value:
        conversion.note(
            "conflict", path, "", f"differs from {source.names[present]}, another name of it; this one counts"
        )
    source.given[present], source.names[present] = value, path
