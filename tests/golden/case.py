"""Golden cases: what another framework answered to given inputs, read from a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ERROR = re.compile(r"[A-Z]\w*(?:Error|Exception)(?=:|$)")
NOT_FINITE = {
    **dict.fromkeys(("nan", "NaN"), math.nan),
    **dict.fromkeys(("inf", "Infinity"), math.inf),
    **dict.fromkeys(("-inf", "-Infinity"), -math.inf),
}
"""Texts that stand for numbers which JSON does not have."""

_REFUSING = ("raises", "error", "result", "reward")


@dataclass(frozen=True)
class Case:
    """One call of one function of another framework.

    Attributes:
        inputs: numbers in arrays that are not finite are such numbers; masks are 0 and 1, or false and true.
        outputs: numbers that are not finite are the texts of NOT_FINITE.
    """

    id: str
    fn: str
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """The class of the exception that the other framework answered with; None where it gave values."""
        named = (self.outputs.get(name) for name in _REFUSING)
        found = (_ERROR.match(value) for value in named if isinstance(value, str))
        return next((match[0] for match in found if match), None)


def load(path: Path) -> list[Case]:
    """Return the cases of a file `{"meta": …, "cases": [{"id", "fn", "params", "inputs", "outputs", …}]}`.

    Raises:
        ValueError: the file has another layout.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["cases"]
        return [
            Case(str(case["id"]), case["fn"], case["params"], _numbers(_plain(case["inputs"])), _plain(case["outputs"]))
            for case in listed
        ]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f'{path}: expected {{"cases": [{{"id", "fn", "params", "inputs", "outputs"}}]}}: {error!r}'
        ) from None


def _plain(value: Any) -> Any:
    """Return nested values with lists in the place of arrays that are written as {"dtype", "shape", "data"}."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return value["data"] if value.keys() == {"dtype", "shape", "data"} else {k: _plain(v) for k, v in value.items()}


def _numbers(value: Any) -> Any:
    """Return nested values in which the texts of NOT_FINITE that stand among the numbers of a list are numbers."""
    if isinstance(value, dict):
        return {name: _numbers(entry) for name, entry in value.items()}
    if not isinstance(value, list):
        return value
    if all(
        isinstance(entry, int | float) or entry in NOT_FINITE for entry in value if not isinstance(entry, list | dict)
    ):
        return [NOT_FINITE[entry] if isinstance(entry, str) else _numbers(entry) for entry in value]
    return [_numbers(entry) for entry in value]
