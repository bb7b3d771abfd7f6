"""Nested values that should be the same: numbers within a tolerance, everything else exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tests.golden.case import NOT_FINITE

RELATIVE = 1e-5
ABSOLUTE = 1e-6


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each place where `found` is not what was expected.

    Args:
        expected: from JSON; the texts of NOT_FINITE stand for numbers, 0 and 1 also for the entries of a mask.
        found: arrays and tensors count as lists.
    """
    found = found.tolist() if hasattr(found, "tolist") else found
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for name in sorted({*expected, *found}):
            place = f"{path}.{name}" if path else str(name)
            if name not in found:
                yield f"{place}: missing, expected {_shown(expected[name])}"
            elif name not in expected:
                yield f"{place}: not expected, found {_shown(found[name])}"
            else:
                yield from differences(expected[name], found[name], place)
    elif isinstance(expected, list) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield f"{path}: expected {len(expected)} items, found {len(found)}"
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif not _same(expected, found):
        yield f"{path}: expected {_shown(expected)}, found {_shown(found)}"


def _same(expected: Any, found: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, str):
        expected = NOT_FINITE.get(expected, expected)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not isinstance(found, int | float):
        return type(expected) is type(found) and expected == found
    if math.isfinite(expected) and math.isfinite(found):
        return abs(found - expected) <= ABSOLUTE + RELATIVE * abs(expected)
    return expected == found or (math.isnan(expected) and math.isnan(found))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
