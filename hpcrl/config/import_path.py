"""A user's own class or function, which a setting names as "package.module:name"."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

from hpcrl.config.errors import Problem
from hpcrl.errors import ConfigError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
WRITTEN_WRONGLY = (SyntaxError, TypeError, ValueError, NameError, AttributeError)
"""What a module with a mistake raises while it is imported; anything else is shown with its traceback."""


def imported(subject: str, name: str) -> Any:
    """Return what "package.module:name" leads to; None where the module has nothing of that name.

    Args:
        subject: what names it, for errors.

    Raises:
        ConfigError: the module cannot be imported. Its cause is a ModuleNotFoundError only where another module is missing that
            this one imports.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        itself = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        raise ConfigError(
            f"{subject}: cannot import {module_name!r} ({error}). Install it, or name the folder that holds it in python_path"
        ) from (None if itself else error)
    except WRITTEN_WRONGLY as error:
        raise ConfigError(f"{subject}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    return getattr(module, attribute, None)


def misnamed(path: str, name: str, known: Collection[str], expected: str, kind: str = "function") -> Iterator[Problem]:
    """Yield a problem if a setting names neither a known function nor, by its form, a user's own.

    Args:
        expected: how the message begins, such as "one of".
        kind: what a user's own is, function or Class.
    """
    if name not in known and not IMPORT_PATH.fullmatch(name):
        yield Problem(
            path,
            f'expected {expected} {", ".join(known)}, or your own as "package.module:{kind}", found "{name}"{did_you_mean(name, known)}',
        )


def find(setting: str, name: str, known: Mapping[str, Function]) -> Function:
    """Return the function that is known by this name, or that "package.module:function" leads to.

    Args:
        setting: dotted path of the setting, for errors.

    Raises:
        ConfigError: nothing has this name.
    """
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        hint = did_you_mean(name, known) or f"; known: {', '.join(known)},"
        raise ConfigError(f'{setting}: nothing is called {name!r}{hint} or your own as "package.module:function"')
    function = imported(f"{setting}={name!r}", name)
    if not callable(function):
        raise ConfigError(f"{setting}={name!r}: module {module_name!r} has no function {function_name!r}")
    return cast(Function, function)
