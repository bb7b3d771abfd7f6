"""All settings of the configuration, found by walking the dataclasses: their dotted paths, types, defaults and meanings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hpcrl.config.location import LOCATION

_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "anything"}
_PLURALS = {str: "texts", int: "whole numbers", float: "numbers", bool: "true or false"}


@dataclass(frozen=True)
class Setting:
    """One field of one section.

    Attributes:
        path: dotted path from the root.
        section: dataclass that holds it.
        annotation: its declared type, whole.
        types: its type, or the several it may have, without `Annotated` and `None`.
        optional: whether it may be unset (None).
        location: whether its text is a `Location`.
        default: MISSING where it is required.
    """

    path: str
    section: type
    name: str
    annotation: Any
    types: tuple[Any, ...]
    optional: bool
    location: bool
    default: Any

    @property
    def subsection(self) -> type | None:
        """The dataclass below it, where it is a section."""
        (kind, *others) = self.types
        return kind if not others and isinstance(kind, type) and is_dataclass(kind) else None

    @property
    def is_free(self) -> bool:
        """Whether it is a table whose keys are the user's."""
        return any(get_origin(kind) is dict for kind in self.types)

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that a setting of fixed choices takes, else nothing."""
        return tuple(choice for kind in self.types if get_origin(kind) is Literal for choice in get_args(kind))

    @property
    def meaning(self) -> str:
        """The text below the field in its section's source; empty where there is none."""
        return next((text for cls in self.section.__mro__ if (text := _meanings(cls).get(self.name))), "")

    def expects(self) -> str:
        """Say which values the setting takes."""
        return " or ".join(_noun(kind) for kind in self.types)


def _noun(kind: Any) -> str:
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return f"a list of {_PLURALS.get(item, 'values')}"
    if get_origin(kind) is dict:
        value = get_args(kind)[1]
        return "a table" if value is Any else f"a table of {_PLURALS.get(value, 'values')}"
    if get_origin(kind) is Literal:
        names = ", ".join(f'"{name}"' if isinstance(name, str) else str(name) for name in get_args(kind))
        return f"one of {names}" if len(get_args(kind)) > 1 else names
    if is_dataclass(kind):
        return "a table"
    return _NOUNS.get(kind) or str(getattr(kind, "__name__", kind))


def _bare(annotation: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the types that an annotation admits, None among them, and whether one of them is a location."""
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return (kind,), LOCATION in marks
    if get_origin(annotation) in (Union, UnionType):
        parts = [_bare(part) for part in get_args(annotation)]
        return tuple(kind for kinds, _ in parts for kind in kinds), any(location for _, location in parts)
    if get_origin(annotation) is list:
        (item,), location = _bare(get_args(annotation)[0])
        return (list[item],), location
    return (annotation,), False


@cache
def section_settings(section: type, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings that a section holds itself, in the order of their declaration."""
    hints = get_type_hints(section, include_extras=True)
    found = []
    for field in fields(section):
        kinds, location = _bare(hints[field.name])
        types = tuple(kind for kind in kinds if kind is not NoneType)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        optional = len(types) < len(kinds)
        found.append(
            Setting(
                prefix + field.name, section, field.name, hints[field.name], types, optional, location, default
            )
        )
    return tuple(found)


@cache
def settings(section: type, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings of a section and of all sections below it, each section before what it holds."""
    return tuple(_walk(section, prefix))


def _walk(section: type, prefix: str) -> Iterator[Setting]:
    for setting in section_settings(section, prefix):
        yield setting
        if setting.subsection:
            yield from _walk(setting.subsection, setting.path + ".")


def leaves(section: type) -> list[Setting]:
    """Return the settings that have values: all but the sections."""
    return [setting for setting in settings(section) if not setting.subsection]


@cache
def _meanings(section: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except (OSError, TypeError, SyntaxError):  # a class that was made without a file, or is built in
        return {}
    if not isinstance(definition, ast.ClassDef):
        return {}
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = str(below.value.value)
    return found
