"""Finds the function that a setting names: hpcrl's own, or a user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from hpcrl.config.own import imported
from hpcrl.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


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
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f'{setting}: nothing is called {name!r}; {hint}, or your own as "package.module:function"')
    function = imported(f"{setting}={name!r}", name)
    if not callable(function):
        raise ConfigError(f"{setting}={name!r}: module {module_name!r} has no function {function_name!r}")
    return cast(Function, function)
