"""Finds the environment that a prompt names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.config.own import imported
from hpcrl.envs.environment import Environment
from hpcrl.envs.sort_letters import SortLetters
from hpcrl.errors import ConfigError

EnvironmentClass = Callable[[Mapping[str, Any]], Environment]

ENVIRONMENTS: dict[str, EnvironmentClass] = {
    "sort_letters": SortLetters,
}


def make_environment(name: str, extras: Mapping[str, Any]) -> Environment:
    """Return a new environment for one sample.

    Args:
        name: a name in `ENVIRONMENTS`, or "package.module:Class" for a user's own.
        extras: the columns of the prompt's row that are not hpcrl's own.

    Raises:
        ConfigError: nothing has this name.
        DataError: the extras lack what the environment needs.
    """
    return environment_class(name)(extras)


def environment_class(name: str) -> EnvironmentClass:
    """Return what makes the environments of a name.

    Raises:
        ConfigError: nothing has this name.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(ENVIRONMENTS))}."
        raise ConfigError(f"unknown environment {name!r}. {hint} Your own is written as package.module:Class.")
    found = imported(f"environment {name!r}", name)
    if not isinstance(found, type):
        raise ConfigError(f"environment {name!r}: module {module_name!r} has no class {class_name!r}")
    return found
