"""Adds another framework's name of a setting to errors of a configuration. The configuration itself imports no converter."""

from __future__ import annotations

import re
from dataclasses import replace

from hpcrl.errors import ConfigError

_LINE = re.compile(r":\d+$")


def with_names_elsewhere(error: ConfigError) -> ConfigError:
    """Return the error with the setting of hpcrl for each name that is one of another framework; for a file of another framework one sentence."""
    if not error.unknown:
        return error
    from hpcrl.convert.correspondence import elsewhere, framework_of

    if framework := framework_of(error.unknown):
        sources = [
            _LINE.sub("", one.source) for one in error.problems if one.path in ("train", "orchestrator") and one.source
        ]
        name = next(iter(sources), "FILE")
        text = (
            f"this is a file of {framework}; hpcrl config convert {name} -o experiment.toml makes TOML of hpcrl of it"
        )
        where = f"{name}: " if sources else ""
        return ConfigError(
            where + text, error.unknown, [replace(error.problems[0], path="", message=text, source=name)]
        )
    text, problems = str(error), list(error.problems)
    for path, message in error.unknown.items():
        if theirs := elsewhere(path):
            new = f"unknown setting, but {theirs}"
            text = text.replace(f"{path}: {message}", f"{path}: {new}")
            problems = [replace(one, message=new) if one.path == path else one for one in problems]
    return ConfigError(text, error.unknown, problems)
