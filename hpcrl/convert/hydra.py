"""Reads YAML documents and `name=value` overrides of a command as Hydra and OmegaConf do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.program import PythonProgram
from hpcrl.errors import ConfigError
from hpcrl.text import NotUtf8Error, utf8

_OVERRIDE = re.compile(r"([+~]*)([A-Za-z_][\w.\-/@]*)=(.*)", re.DOTALL)
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SHELL_VARIABLE = re.compile(r"Interpolation key '([A-Z_][A-Z0-9_]*)' not found")
_TIGHT_COLON = re.compile(r"(?<=[\w'\"]):(?=[^\s/])")
_SLICE = re.compile(
    r"(?<=[\[,\s])(\w+\[-?\d*%?:-?\d*%?\])(?=[\],\s])"
)  # train[:100] in a list, which YAML wants quoted
_ALL_ARGUMENTS = ("$@", "$*")
_DEEPEST = 64


class UnreadableError(Exception):
    """A value that cannot be read; the text is the reason."""


def load_tree(text: str | bytes, origin: str) -> dict[str, Any]:
    """Return the nested tables of a YAML document, interpolations as they are.

    Raises:
        ConfigError: it is not UTF-8, not YAML, no table, or nested too deep; names the place.
    """
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


def overrides(program: PythonProgram, conversion: Conversion) -> Iterator[tuple[str, str, str]]:
    """Yield prefix, name and value of each override of a command that sets something; options (-x) are left out.

    A word that is neither, and a deletion (~name=value), is noted in `conversion`.
    """
    started = bool(program.name)
    for word in program.arguments:
        match = _OVERRIDE.fullmatch(word)
        if match is None or (_ENVIRONMENT.match(word) and not started):
            if started and not word.startswith("-") and word not in _ALL_ARGUMENTS:
                conversion.note("unknown", word, "", "expected name=value")
            continue
        started = True
        if "~" in match[1]:
            conversion.note(
                "conflict", "~" + match[2], "", "deletes a setting; leave it out here, and its default counts"
            )
        else:
            yield match[1], match[2], match[3]


def parse_override(name: str, value: str, origin: str) -> dict[str, Any]:
    """Return the value of one override as nested tables.

    Raises:
        ConfigError: it is not YAML; names the override.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    word = f"{name}={value}"

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


def merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Write nested tables over others; what they do not name stays."""
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def resolve(resolved: Any, keys: tuple[Any, ...]) -> Any:
    """Return the value at some keys of OmegaConf's tables, with its interpolations resolved.

    Raises:
        UnreadableError: one of them points nowhere, or the value has no counterpart in TOML.
    """
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
