"""Scores of samples by agent programs and services."""

from __future__ import annotations

import json
from typing import Any

from hpcrl.envs.base import Turn
from hpcrl.types import LARGEST, is_name

LONGEST_SCORE = 1 << 16
"""Bytes."""

_MOST_METRICS = 64  # each new name is a curve of the run

EXPECTED = f'JSON such as {{"reward": 1.0, "metrics": {{"turns": 3}}}}, with at most {_MOST_METRICS} metrics'


def read_score(content: bytes) -> Turn | None:
    """Return the end of a sample: its `reward`, and its `metrics` where there are some; None for anything else, or what is too long."""
    try:
        found = json.loads(content.decode()) if len(content) <= LONGEST_SCORE else None
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and _is_number(found.get("reward")) and _are_metrics(found.get("metrics", {})):
        return Turn([], float(found["reward"]), done=True, metrics=found.get("metrics", {}))
    return None


def _are_metrics(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > _MOST_METRICS:
        return False
    return all(is_name(name) and _is_number(one) for name, one in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
