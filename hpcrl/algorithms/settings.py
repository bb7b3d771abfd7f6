"""The settings of a loss or an estimator: its signature names them, hpcrl's own and a user's alike.

The first parameter has the function's data. Each other parameter gets the setting of its name. That is a field of the part of
`trainer.algorithm` with the function's name, such as `trainer.algorithm.dppo` for `policy_loss_type = "dppo"`, or else of
`trainer.algorithm` itself. For "package.module:function" the part is named `function`. A parameter named `algorithm` gets the whole
section. One with a default keeps it where there is no setting of its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeVar

from hpcrl.config.import_path import find
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.errors import ConfigError, similar

Result = TypeVar("Result")


def configured(
    setting: str, name: str, known: Mapping[str, Callable[..., Result]], algorithm: AlgorithmConfig
) -> partial[Result]:
    """Return the function of this name, one of `known` or a user's own, with its settings.

    Args:
        setting: field of trainer.algorithm that holds the name.

    Raises:
        ConfigError: nothing has the name, or the function has a parameter that is no setting.
    """
    path = f"trainer.algorithm.{setting}"
    function = find(path, name, known)
    return partial(function, **settings_of(f'{path}="{name}"', function, name.rpartition(":")[2], algorithm))


def settings_of(subject: str, function: Callable[..., Any], part: str, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return what `function` is called with, beside its first argument.

    Args:
        subject: what names the function, for errors.
        part: name of the part of the section that belongs to it, if there is one.

    Raises:
        ConfigError: a parameter without a default is no setting.
    """
    section = vars(algorithm)
    own = section.get(part)
    settings = {"algorithm": algorithm} | section | (vars(own) if is_dataclass(own) else {})
    found: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in settings:
            found[name] = settings[name]
        elif parameter.default is parameter.empty:
            near = similar(name, settings)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{subject}: its parameter {name!r} is no setting of trainer.algorithm; {hint}there are "
                f"{', '.join(sorted(settings))}; a setting of your own is a field of a subclass (docs/config/library.md)"
            )
    return found
