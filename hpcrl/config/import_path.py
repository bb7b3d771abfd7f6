"""Imports a user's class or function, named as "package.module:name", and packages that not every installation has."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from hpcrl.config.errors import Problem
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import ConfigError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
WRITTEN_WRONGLY = (SyntaxError, TypeError, ValueError, NameError, AttributeError)
"""What a module with a mistake raises while it is imported; anything else is shown with its traceback."""


def imported(subject: str, name: str) -> Any:
    """Import and return "package.module:name"; None where the module has nothing of that name.

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


def installed(group: str, what: str, kind: type[T]) -> list[T]:
    """Return the objects that entry points of other packages lead to, sorted by the points' names.

    Args:
        what: an object is, for errors.
        kind: its class.

    Raises:
        ConfigError: an entry point leads to no such object.
    """
    found = list[T]()
    for point in sorted(_entry_points().select(group=group), key=lambda point: point.name):
        subject = f"{what} {point.name} (entry point {point.value} of the group {group})"
        try:
            loaded: Any = point.load()
        except (ImportError, *WRITTEN_WRONGLY) as error:
            raise ConfigError(
                f"{subject} cannot be loaded: {type(error).__name__}: {error}; mend or uninstall its package"
            ) from error
        if not isinstance(loaded, kind):
            expected = f"{kind.__module__}.{kind.__name__}"
            raise ConfigError(f"{subject}: expected an object of a subclass of {expected}, found {loaded!r}")
        found.append(loaded)
    return found


@lru_cache(maxsize=1)
def _entry_points() -> Any:
    return entry_points()  # EntryPoints; Python 3.10 has another type here. It reads a file of each installed package


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


def missing_packages(trainer: TrainerConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of a trainer whose package this Python does not have."""
    needed = {
        "trainer.policy.low_precision.fp8": ("torchao", "'hpcrl[torchao]'", trainer.policy.low_precision.fp8),
        "trainer.policy.optimizer_config.moments": (
            "torchao",
            "'hpcrl[torchao]'",
            trainer.policy.optimizer_config.moments is not None,
        ),
        "trainer.critic.optimizer_config.moments": (
            "torchao",
            "'hpcrl[torchao]'",
            trainer.critic.optimizer_config.moments is not None,
        ),
        "trainer.policy.enable_liger_kernel": ("liger_kernel", "'hpcrl[liger]'", trainer.policy.enable_liger_kernel),
        "trainer.flash_attn_version": ("flash_attn_interface", "flash-attn-3", trainer.flash_attn_version == 3),
    }
    for setting, (module, install, wanted) in needed.items():
        if wanted and find_spec(module) is None:
            yield Problem(setting, f"needs {module}, which {sys.executable} does not have: pip install {install}")
