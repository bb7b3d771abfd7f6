"""A user's own class or function, which a setting names as "package.module:name"."""

from __future__ import annotations

import importlib
from typing import Any

from hpcrl.errors import ConfigError


def imported(subject: str, name: str) -> Any:
    """Return what "package.module:name" leads to; None where the module has nothing of that name.

    Args:
        subject: what names it, for errors.

    Raises:
        ConfigError: the module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{subject}: cannot import {module_name!r} ({error}). Install it, or name the folder that holds it in python_path"
        ) from error
    return getattr(module, attribute, None)
