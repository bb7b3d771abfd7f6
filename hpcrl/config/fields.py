"""All settings of the configuration, found by walking the dataclasses: their dotted paths, types, defaults and meanings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hpcrl.config.setting import Facts, facts_of
from hpcrl.errors import ConfigError

_LOCATION = "location"

Location = Annotated[str, _LOCATION]
"""The type of a setting that names a file, a directory or something on a hub; load.py resolves its text."""

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
        facts: what its section declares of it beside these.
    """

    path: str
    section: type
    name: str
    annotation: Any
    types: tuple[Any, ...]
    optional: bool
    location: bool
    default: Any
    facts: Facts = Facts()

    @cached_property  # asked for thousands of times when a configuration is checked
    def subsection(self) -> type | None:
        """The dataclass below it, where it is a section."""
        (kind, *others) = self.types
        return kind if not others and isinstance(kind, type) and is_dataclass(kind) else None

    @property
    def is_free(self) -> bool:
        """Return whether this is a table whose keys are the user's."""
        return any(get_origin(kind) is dict for kind in self.types)

    @property
    def entry(self) -> type | None:
        """The dataclass of each value, where it is a table of sections whose keys are the user's."""
        return next(
            (get_args(kind)[1] for kind in self.types if get_origin(kind) is dict and is_dataclass(get_args(kind)[1])),
            None,
        )

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
        text = next((text for cls in self.section.__mro__ if (text := _meanings(cls).get(self.name))), "")
        names = "; ".join(f"{name}: {one.summary}" for name, one in self.facts.named.items())
        return text.replace("{names}", names) if names else text

    def expects(self) -> str:
        """Return which values the setting takes, in words."""
        return " or ".join(map(noun, self.types))

    def is_default(self, value: Any) -> bool:
        return value == self.default and isinstance(value, bool) == isinstance(self.default, bool)


def noun(kind: Any) -> str:
    """Return which values a type, without `Annotated` and `None`, takes, in words."""
    if get_origin(kind) is list:
        items = alternatives(get_args(kind)[0])
        return f"a list of {_PLURALS.get(items[0], 'values') if len(items) == 1 else 'values'}"
    if get_origin(kind) is dict:
        value = get_args(kind)[1]
        held = "tables" if is_dataclass(value) else _PLURALS.get(value, "values")
        return "a table" if value is Any else f"a table of {held}"
    if get_origin(kind) is Literal:
        names = ", ".join(f'"{name}"' if isinstance(name, str) else str(name) for name in get_args(kind))
        return f"one of {names}" if len(get_args(kind)) > 1 else names
    return _NOUNS.get(kind, "a table")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation admits, without `Annotated`; `None` is among them where it may be unset."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for part in get_args(annotation) for kind in alternatives(part))
    return (annotation,)


def _is_location(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _LOCATION in annotation.__metadata__
    return get_origin(annotation) in (Union, UnionType, list, dict) and any(map(_is_location, get_args(annotation)))


def _fits_toml(annotation: Any) -> bool:
    kinds = [kind for kind in alternatives(annotation) if kind is not NoneType]
    return bool(kinds) and all(
        kind in _NOUNS
        or get_origin(kind) is Literal
        or (get_origin(kind) is list and _fits_toml(get_args(kind)[0]))
        or (get_origin(kind) is dict and get_args(kind)[0] is str and _fits_toml(get_args(kind)[1]))
        or (isinstance(kind, type) and is_dataclass(kind) and len(kinds) == 1)
        for kind in kinds
    )


@cache
def _annotations(section: type) -> dict[str, Any]:
    name = f"{section.__module__}.{section.__qualname__}"
    if (
        not is_dataclass(section)
        or not vars(section).get("__annotations__", {}).keys() <= section.__dataclass_fields__.keys()
    ):
        raise ConfigError(
            f"{name}: its settings are not declared; put @dataclass(frozen=True, kw_only=True) above the class"
        )
    try:
        hints = get_type_hints(section, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise ConfigError(
            f"{name}: a type in it cannot be resolved: {error}; import it at the top of the module"
        ) from None
    found = {field.name: hints[field.name] for field in fields(section)}
    derived = {key for base in section.__mro__ for key, value in vars(base).items() if isinstance(value, property)}
    if taken := sorted(derived & found.keys()):
        raise ConfigError(f"{name}.{taken[0]}: a property of this section has the name; give the setting another one")
    for field_name, annotation in found.items():
        if not _fits_toml(annotation):
            raise ConfigError(
                f"{name}.{field_name}: TOML cannot hold a value of type {annotation}. Declare it as str, int, float, bool, Literal, "
                "a list or a dict[str, ...] of those, any of these or None, or a dataclass"
            )
    return found


@cache
def section_settings(section: type, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings that a section holds itself, in the order of their declaration.

    Raises:
        ConfigError: somebody's own class cannot be a section.
    """
    annotations = _annotations(section)
    found = []
    for field in fields(section):
        annotation = annotations[field.name]
        kinds = alternatives(annotation)
        types = tuple(kind for kind in kinds if kind is not NoneType)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        optional, location = len(types) < len(kinds), _is_location(annotation)
        facts = facts_of(section, field.name)
        setting = Setting(
            prefix + field.name, section, field.name, annotation, types, optional, location, default, facts
        )
        if (
            setting.subsection
            and not setting.required
            and default is not None
            and field.default_factory is not types[0]
        ):
            raise ConfigError(  # else its defaults would change as soon as a file sets one setting in it
                f"{section.__module__}.{section.__qualname__}.{field.name}: expected field(default_factory={types[0].__name__}); "
                f"put other defaults into a subclass of {types[0].__name__}, and name that as the type"
            )
        if optional and not setting.subsection and default is not None and default is not MISSING:
            raise ConfigError(
                f"{section.__module__}.{section.__qualname__}.{field.name}: TOML has no None, so that what may be None must be None "
                "by default; leave one of them out"
            )
        found.append(setting)
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


def values(section: Any, prefix: str = "") -> Iterator[tuple[Setting, Any]]:
    """Yield the leaves of a section that is a dataclass's instance, each with its value; of one that is unset there are none."""
    for setting in section_settings(type(section), prefix):
        value = getattr(section, setting.name)
        if not setting.subsection:
            yield setting, value
        elif value is not None:
            yield from values(value, setting.path + ".")


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
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found
