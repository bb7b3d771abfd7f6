"""Reads a SkyRL configuration, a YAML file or the words of a command, to its settings with interpolations resolved.

Interpolations such as `${trainer.max_prompt_length}` and `${oc.env:HOME}` are OmegaConf's. One that points at a setting which the
source leaves out gets SkyRL's default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.errors import nearest
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.program import PythonProgram, program_of
from hpcrl.convert.skyrl.fields import OVERLONG, RL, SFT, Layout
from hpcrl.errors import ConfigError
from hpcrl.text import NotUtf8Error, utf8

_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.\-/@]*)=(.*)", re.DOTALL)
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SHELL_VARIABLE = re.compile(r"Interpolation key '([A-Z_][A-Z0-9_]*)' not found")
_TIGHT_COLON = re.compile(r"(?<=[\w'\"]):(?=[^\s/])")
_SLICE = re.compile(
    r"(?<=[\[,\s])(\w+\[-?\d*%?:-?\d*%?\])(?=[\],\s])"
)  # train[:100] in a list, which YAML wants quoted
_DEEPEST = 64

Keys = tuple[Any, ...]


@dataclass
class SkyrlSource:
    """A SkyRL configuration.

    Attributes:
        given: settings that it names, by their present paths, in its order.
        unread: settings whose value cannot be read, by their present paths, with the reason.
        names: present path, of both, to the path that the source uses.
        old: whether it is of the old layout, whose defaults count where it leaves a setting out.
        program: what its command starts; None where there is no command, or it names no program.
        overlong: what it sets of `fields.OVERLONG`.
        layout: the settings of its program.
    """

    given: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    old: bool = False
    program: PythonProgram | None = None
    overlong: dict[str, Any] = field(default_factory=dict)
    layout: Layout = RL

    def __getitem__(self, path: str) -> Any:
        """Return a setting by its present path, its default where it is left out or could not be read."""
        if path in self.given:
            return self.given[path]
        old = self.layout.old_defaults if self.old else {}
        return old[path] if path in old else self.layout.defaults.get(path)

    def number(self, path: str) -> int:
        """Return a whole number, or 1 where the source gives something else, which is reported elsewhere."""
        value = self[path]
        return value if isinstance(value, int) else 1


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
    layout = SFT if program.is_sft else RL
    source, started = SkyrlSource(program=program if program.name else None, layout=layout), bool(program.name)
    for word in program.arguments:
        match = _OVERRIDE.fullmatch(word)
        if match is None or (_ENVIRONMENT.match(word) and not started):
            if started and not word.startswith("-"):
                conversion.note("unknown", word, "", "expected name=value")
            continue
        started = True
        if _takes(match[1], match[2], layout, conversion):
            merge(tree, parse_override(word, match[2], match[3], conversion.origin))
    source.old = any(path in layout.refused for path, _, _ in _settings(tree, layout))
    _fill(source, tree, conversion)
    return source


def load_tree(text: str | bytes, origin: str) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = _with_home(utf8(text) if isinstance(text, bytes) else text)
        if problem := _unsafe(text):
            raise ConfigError(f"{origin}: {problem}")
        loaded: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except NotUtf8Error as error:
        raise ConfigError(f"{origin}:{error.line}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{origin}{place}: not valid YAML: {why}") from None
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{origin}{f': {key}' if key else ''}: not a configuration: {_first_line(error)}") from None
    return loaded


def _with_home(text: str) -> str:
    """Return a text in which the shell's ${HOME} is $HOME: OmegaConf would look for a setting of that name."""
    return text.replace("${HOME}", "$HOME")


def _unsafe(text: str) -> str | None:
    """Return why a document must not be loaded: OmegaConf bounds aliases, but not depth, and tags make its loader fail."""
    import yaml

    depth, first = 0, True
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            return f"{place}: nested more than {_DEEPEST} levels deep"
        if isinstance(event, yaml.NodeEvent):
            if tag := getattr(event, "tag", None):
                return f"{place}: has the tag {tag}, which no setting needs; remove it"
            if first and not isinstance(event, yaml.MappingStartEvent):
                return f"{place}: expected a table of settings (name: value)"
            first = False
    return "expected a table of settings (name: value), found an empty document" if first else None


def parse_override(word: str, name: str, value: str, origin: str) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def parse(text: str) -> Any:
        if problem := _unsafe(f"value: {text}"):
            raise ConfigError(f"{origin}: override {word!r}: {problem}")
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index,call-overload]

    try:
        value = _SLICE.sub(r'"\1"', _with_home(value))
        try:
            found: Any = parse(value)
            tight = isinstance(found, dict) and any(":" in str(key) and found[key] is None for key in found)
        except yaml.YAMLError:
            found, tight = None, True
        if tight:  # Hydra takes {a:1} for what YAML writes {a: 1}
            found = parse(_TIGHT_COLON.sub(": ", value))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: override {word!r}: not a value: {_first_line(error)}") from None
    for part in reversed(name.split(".")):
        found = {part: found}
    return found


def _takes(prefix: str, name: str, layout: Layout, conversion: Conversion) -> bool:
    """Return whether a word with such a prefix sets something, and note the prefix."""
    if "~" in prefix:
        conversion.note("conflict", "~" + name, "", "deletes a setting; leave it out here, and its default counts")
        return False
    if not prefix or any(name == path or name.startswith(path + ".") for path in layout.targets):
        if prefix:
            conversion.note("translated", prefix + name, name, "SkyRL has this setting; the + is left out")
        return True
    message = "not among the settings of SkyRL of August 2026; here declare it in a subclass of hpcrl.config.Config (config_class)"
    conversion.note("unknown", prefix + name, "", message)
    return False


def merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


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
        source.unread[present], source.names[present] = str(error), path
        return
    if present in source.given and source.given[present] != value:
        conversion.note(
            "conflict", path, "", f"differs from {source.names[present]}, another name of it; this one counts"
        )
    source.given[present], source.names[present] = value, path


class UnreadableError(Exception):
    """A value that cannot be read; the text is the reason."""


def resolve(resolved: Any, keys: Keys) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for key in keys:
            resolved = resolved[key]
        value = OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
    except (OmegaConfBaseException, RecursionError) as error:
        if variable := _SHELL_VARIABLE.match(why := _first_line(error)):
            raise UnreadableError(f"${variable[1]} is a variable of the shell; write its value out") from None
        raise UnreadableError(f"cannot be resolved: {why}; left out") from None
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a value that TOML can hold; keys become text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        if None in value:
            raise UnreadableError("a list with null in it has no counterpart; left out")
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UnreadableError(f"has no counterpart: {value!r:.60}; left out")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].replace("raised while resolving interpolation: ", "")
