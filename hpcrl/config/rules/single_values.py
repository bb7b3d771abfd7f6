"""Refuses values of single settings: out of range, or not implemented yet."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from hpcrl.config.errors import Problem, shown
from hpcrl.config.fields import Setting, leaves, values
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.setting import Unimplemented

_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")


def out_of_range(given: Iterable[tuple[Setting, Any]]) -> Iterator[Problem]:
    """Yield a problem for each setting of hpcrl's whose value, of the right type, is outside its range or fails its check."""
    for setting, value in given:
        if value is None or setting.path not in _own_settings():
            continue
        held = (
            [pair for name, one in value.items() for pair in values(one, f"{setting.path}.{name}.")]
            if setting.entry
            else []
        )
        for each, own in [(setting, value), *held]:
            if own is not None and (message := _wrong(each, own)):
                yield Problem(each.path, message)


def unimplemented_values(given: Iterable[tuple[Setting, Any]]) -> Iterator[Problem]:
    """Yield a problem for each setting of hpcrl's that is not implemented yet and has another value than one that works."""
    for found, value in given:
        setting = _own_settings().get(found.path)
        missing = setting.facts.unimplemented if setting else None
        if setting and missing and not setting.is_default(value) and value not in missing.works:
            yield Problem(
                setting.path, f"{shown(value)} is not implemented yet ({missing.feature}); {_instead(setting, missing)}"
            )


@cache
def _own_settings() -> dict[str, Setting]:
    """Return the settings of hpcrl's own; those that a user's subclass adds may have any value."""
    return {setting.path: setting for setting in leaves(ConfigTree)}


def _instead(setting: Setting, missing: Unimplemented) -> str:
    working = (setting.default, *missing.works)
    values = [shown(value) for value in working if value not in (None, [], "")]
    return f"supported: {', '.join(values)}" if values else "leave it out"


def _wrong(setting: Setting, value: Any) -> str | None:
    facts = setting.facts
    # an argument of a program may have any text
    if setting.location and setting.name != "command" and (message := _unexpanded(value)):
        return message
    if facts.check and (message := facts.check.error(value)):
        return message
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        bad = [item for item in items if isinstance(item, float) and not math.isfinite(item)]
        return f"expected finite numbers, found {bad[0]}" if bad else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if facts.range:
        return facts.range.error(value)
    return None if math.isfinite(value) else f"expected a finite number, found {value}"


def _unexpanded(value: Any) -> str | None:
    """Return the error for a path with a variable of the shell in it, or with a ~ that leads to no home directory, or None."""
    texts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if homeless := next((text for text in texts if os.path.expanduser(text).startswith("~")), None):
        return f"the ~ of {homeless} leads to no home directory here; write the path out, or set HOME"
    found = next((match[0] for text in texts if (match := _VARIABLE.search(text))), None)
    remedy = 'write "~" instead' if found in ("$HOME", "${HOME}") else f"write the value of {found} into the path"
    return f"{found} is not expanded here, ~ is; {remedy}" if found else None
