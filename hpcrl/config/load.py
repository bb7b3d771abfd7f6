"""Merges TOML files and overrides into one tree of plain values, with the source of each.

Tables merge, key by key; every other value replaces the one before it. Files count from left to right, overrides last.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli

from hpcrl.config.errors import Problem, raise_together
from hpcrl.config.fields import Setting, settings
from hpcrl.config.lines import NAME, line_of, parts
from hpcrl.errors import ConfigError
from hpcrl.text import NotUtf8Error, utf8

_OPENING = ("[", "{", '"', "'")
_BARE_LIST = re.compile(r"\[([^\[\]{}\"']*)\]")
_DEEPEST = 64
_NOTHING_NEW = "new settings cannot be added from outside; declare them in a subclass of hpcrl.config.Config and choose it by config_class"


@dataclass
class Merged:
    """The values of all files and overrides.

    Attributes:
        tree: nested tables.
        sources: dotted path to the file or override that set it last.
        texts: files to what they contain.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def source_of(self, path: str) -> str | None:
        """Return the file or override that set a path or an item of its list, with the line; None for defaults."""
        name = path.partition("[")[0]
        source = self.sources.get(name)
        line = line_of(self.texts[source], name) if source in self.texts else None
        return f"{source}:{line}" if line else source

    def merge(self, tree: Mapping[str, Any], source: str) -> None:
        self._merge(self.tree, tree, source, "")

    def _merge(self, into: dict[str, Any], tree: Mapping[str, Any], source: str, prefix: str) -> None:
        for key, value in tree.items():
            path = prefix + str(key)
            self.sources[path] = source
            if isinstance(value, Mapping):
                table = into.get(key)
                into[key] = table if isinstance(table, dict) else {}
                self._merge(into[key], value, source, path + ".")
            else:
                into[key] = value

    def unset(self, names: Sequence[str]) -> None:
        *parents, name = names
        path = ".".join(names)
        table: Any = self.tree
        for parent in parents:
            table = table.get(parent) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table.pop(name, None)
            self.sources = {one: source for one, source in self.sources.items() if not f"{one}.".startswith(f"{path}.")}


def read(
    paths: Sequence[Path | str],
    overrides: Sequence[str],
    cls: type,
    base: Mapping[str, Any] = MappingProxyType({}),
) -> Merged:
    """Return the merged values of TOML files and of overrides `a.b.c=value`.

    Args:
        overrides: a value is TOML; a bare word is text; `default` goes back to the default, of texts and keys of tables no value at all.
        cls: the configuration; its settings that are locations are resolved against the file that sets them.
        base: tables that files and overrides change; keys may be dotted, relative locations are resolved against the working directory.

    Raises:
        ConfigError: names every file that cannot be read and every override that is malformed.
    """
    problems, known = list[Problem](), settings(cls)
    merged = Merged(_located(nested(base), Path.cwd(), known))
    for path in map(Path, paths):
        try:
            text, tree = _parse(path, known)
        except _Unreadable as error:
            problems.append(Problem("", str(error), f"{path}:{error.line}" if error.line else str(path)))
        else:
            merged.texts[str(path)] = text
            merged.merge(_located(tree, path.absolute().parent, known), str(path))
    for override in overrides:
        try:
            _apply(merged, override, known)
        except _Unreadable as error:
            problems.append(Problem("", str(error), f"override {override!r}"))
    raise_together(problems, lambda _: None)
    return merged


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a table whose keys are dotted paths; what lies below them is taken as it is.

    Raises:
        ConfigError: a key is no text, or begins with "+", or the tree is too deep.
    """
    merged, problems = Merged(), []
    for key, value in flat.items():
        tree: Any = value
        for part in reversed(str(key).split(".")):
            tree = {part: tree}
        if not isinstance(key, str):
            problems.append(Problem(repr(key), "expected a name that is text"))
        elif key.startswith("+"):
            problems.append(Problem(key, _NOTHING_NEW))
        elif _depth(tree) > _DEEPEST:
            problems.append(Problem(key, f"nested more than {_DEEPEST} levels deep"))
        else:
            merged.merge(tree, "")
    raise_together(problems, lambda _: None)
    return merged.tree


def parse(text: str, origin: str) -> dict[str, Any]:
    """Return the tables of TOML text.

    Args:
        origin: where it comes from, for errors.

    Raises:
        ConfigError: it is no TOML, or too deep.
    """
    try:
        return _toml(text)
    except tomli.TOMLDecodeError as error:
        found = _no_toml(text, error, origin)
        raise ConfigError(f"{origin}:{found.line}: {found}") from None
    except _Unreadable as error:
        raise ConfigError(f"{origin}: {error}") from None


class _Unreadable(Exception):
    """A file or an override that gives no values.

    Attributes:
        line: of the file, counted from 1; None where no line is to blame.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def _parse(path: Path, known: Sequence[Setting]) -> tuple[str, dict[str, Any]]:
    text = ""
    try:
        text = utf8(path.read_bytes())
        return text, _toml(text)
    except FileNotFoundError:
        if any(str(path) == setting.path for setting in known):
            raise _Unreadable(f"no such file; to set it, write {path}=VALUE") from None
        raise _Unreadable(f"no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror}") from None
    except NotUtf8Error as error:
        raise _Unreadable(str(error), error.line) from None
    except tomli.TOMLDecodeError as error:
        raise _no_toml(text, error, str(path)) from None
    except ValueError as error:
        raise _Unreadable(f"no file can have this name: {error}") from None


def _no_toml(text: str, error: tomli.TOMLDecodeError, origin: str) -> _Unreadable:
    from hpcrl.config.syntax import explained  # not on the way of a file that can be read

    line, message = explained(text, str(error), origin)
    return _Unreadable(message, line)


def _toml(text: str) -> dict[str, Any]:
    try:
        tree = tomli.loads(text)
    except tomli.TOMLDecodeError:
        raise
    except RecursionError:
        raise _Unreadable("nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits, a day that does not exist
        raise _Unreadable(f"holds a value that cannot be used: {error}") from None
    if _depth(tree) > _DEEPEST:
        raise _Unreadable(f"nested more than {_DEEPEST} levels deep")
    return tree


def _depth(tree: Any) -> int:
    depth, level = 0, [tree]
    while level and depth <= _DEEPEST:
        depth += 1
        level = [
            item
            for value in level
            if isinstance(value, Mapping | list | tuple)
            for item in (value.values() if isinstance(value, Mapping) else value)
        ]
    return depth


def _apply(merged: Merged, override: str, known: Sequence[Setting]) -> None:
    name, equals, text = override.partition("=")
    quoted = re.fullmatch(NAME, name.strip())
    names = parts(name) if quoted else name.strip().split(".")
    path = ".".join(names)
    if not equals or not all(names) or (not quoted and {'"', "'"} & set(name)):
        raise _Unreadable("expected name=value with a dotted name, such as trainer.epochs=2")
    if path.startswith("+"):
        raise _Unreadable(_NOTHING_NEW)
    if len(names) > _DEEPEST:
        raise _Unreadable(f"nested more than {_DEEPEST} levels deep")
    setting = next((one for one in known if one.path == path), None)
    by_nothing = emptiable(path, known)
    if setting is not None and not text.strip() and not by_nothing:
        raise _Unreadable(
            f"expected {setting.expects()}, found nothing, as of a variable that the shell does not know; {path}=default goes back to the default"
        )
    if (by_nothing and not text.strip()) or (setting is not None and not by_nothing and text.strip() == "default"):
        merged.unset(names)
        return
    if text.strip() == "null":
        _check_null(path, known)
        merged.unset(names)
        return
    tree: Any = _value(text) if text.strip() else ""  # of an unknown setting, which is refused by its name
    for part in reversed(names):
        tree = {part: tree}
    merged.merge(_located(tree, Path.cwd(), known), "override")


def emptiable(path: str, known: Sequence[Setting]) -> bool:
    """Return whether an override without a value goes back to the default: that of a text, or of a key of a table whose keys are the user's."""
    return any(
        (path == one.path and (str in one.types or "default" in one.choices))
        or (one.is_free and path.startswith(f"{one.path}."))
        for one in known
    )


def _check_null(path: str, known: Sequence[Setting]) -> None:
    """Refuse SkyRL's null where a setting cannot be unset; elsewhere it means unset."""
    default = next((setting.default for setting in known if setting.path == path and not setting.subsection), None)
    if default not in (None, [], {}):
        shown = f"{default!r}" if not isinstance(default, str) else f'"{default}"'
        raise _Unreadable(f"null has no meaning here; {path}=default goes back to the default, {shown}")


def _value(text: str) -> Any:
    """Return the value of an override: TOML, a list of bare words as SkyRL takes it, or the text itself where it is none."""
    try:
        parsed = _toml(f"value = {text.strip()}")
    except tomli.TOMLDecodeError as error:
        if bare := _BARE_LIST.fullmatch(text.strip()):
            return [_value(item) for item in map(str.strip, bare[1].split(",")) if item]
        if text.strip().startswith(_OPENING):
            raise _Unreadable(f"not a TOML value: {error}; quote the whole argument for the shell") from None
        return text
    if set(parsed) != {"value"} or isinstance(parsed["value"], datetime.date | datetime.time):
        return text
    return parsed["value"]


def _located(tree: dict[str, Any], base: Path, known: Sequence[Setting]) -> dict[str, Any]:
    for setting in known:
        if not setting.location:
            continue
        *parents, name = setting.path.split(".")
        table: Any = tree
        for parent in parents:
            table = table.get(parent) if isinstance(table, dict) else None
        value = table.get(name) if isinstance(table, dict) else None
        if isinstance(value, str) and value != setting.default:  # a default that is written out stays the same
            table[name] = _locate(value, base)
        elif isinstance(value, list):
            table[name] = [_locate(item, base) if isinstance(item, str) else item for item in value]
        elif isinstance(value, dict):
            table[name] = {key: _locate(item, base) if isinstance(item, str) else item for key, item in value.items()}
    return tree


def _locate(text: str, base: Path) -> str:
    """Return `text` with `~` expanded and a leading `./` or `../` resolved against the directory `base`.

    Any other text becomes absolute if a file of that name exists in the working directory, because a job may run elsewhere. If not, it
    stays as it is: a model's id on a hub, or a missing path that its reader reports. So does text that is no valid file name.
    """
    try:
        if text.startswith("~"):
            return os.path.expanduser(text)
        if text in (".", "..") or text.startswith(("./", "../")):
            return os.path.realpath(base / text)
        return os.path.abspath(text) if text and os.path.exists(text) else text
    except ValueError:  # a zero byte, half of a surrogate pair
        return text
