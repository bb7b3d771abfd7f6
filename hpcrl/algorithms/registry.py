"""Finds an algorithm by the name that a configuration gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.errors import ConfigError


def resolve(kind: str, table: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """Return the function that `name` stands for: an entry of `table`, or a user's own as "package.module:function".

    Args:
        kind: what the table holds, in the words of a message to the user.

    Raises:
        ConfigError: there is no such function.
    """
    if name in table:
        return table[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"no {kind} {name!r}; choose one of {sorted(table)} or give your own as package.module:function"
        )
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be imported: {error}; is its package on PYTHONPATH?") from error
    if not callable(function):
        raise ConfigError(f"{kind} {name!r} is a {type(function).__name__}, not a function")
    return function
