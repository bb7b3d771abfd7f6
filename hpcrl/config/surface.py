"""All settings of the configuration, found by walking the dataclasses: their dotted paths, types and defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hpcrl.config.location import LOCATION

_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "anything"}
_PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}


@dataclass(frozen=True)
class Setting:
    """One field of one section.

    Attributes:
        path: dotted path from the root.
        section: dataclass that declares it.
        type: its annotation, without `Annotated` and `None`.
        optional: whether it may be unset (None).
        location: whether its text is a `Location`.
        default: MISSING where it is required.
    """

    path: str
    section: type
    name: str
    type: Any
    optional: bool
    location: bool
    default: Any

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.type)

    @property
    def is_free(self) -> bool:
        """Whether it is a table whose keys are the user's."""
        return get_origin(self.type) is dict

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def expects(self, item: bool = False) -> str:
        """Say which values the setting takes, or one item of its list."""
        return _noun(get_args(self.type)[0] if item else self.type)


def _noun(kind: Any) -> str:
    if is_dataclass(kind) or get_origin(kind) is dict:
        return "a table"
    if get_origin(kind) is list:
        return f"a list of {_PLURALS[get_args(kind)[0]]}"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{name}"' for name in get_args(kind))
    return _NOUNS[kind]


def _bare(annotation: Any) -> tuple[Any, bool, bool]:
    """Return an annotation without its `Annotated` and `None` parts; whether it had a None; whether it is a location."""
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return kind, False, LOCATION in marks
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = (part for part in get_args(annotation) if part is not NoneType)
        kind, _, location = _bare(inner)
        return kind, True, location
    if get_origin(annotation) is list:
        kind, _, location = _bare(get_args(annotation)[0])
        return list[kind], False, location
    return annotation, False, False


def settings(section: type, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section and of all sections below it, in the order of their declaration."""
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        kind, optional, location = _bare(hints[field.name])
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        path = prefix + field.name
        yield Setting(path, section, field.name, kind, optional, location, default)
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from settings(kind, path + ".")
