"""A sweep: one configuration and the values to vary; each combination is one element of the job array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hpcrl.errors import ConfigError


def _split(values: str) -> list[str]:
    """Split at the commas that stand outside brackets and quotes."""
    parts, depth, quote, current = list[str](), 0, "", ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [*parts, current]


def _seeds(text: str) -> list[int]:
    try:
        if ":" in text:
            first, last = (int(part) for part in text.split(":"))
            seeds = list(range(first, last))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise ConfigError(
            f"--seeds {text!r}: expected a list such as 1,2,3 or a range such as 0:4 (the end is left out)"
        )
    return seeds


def elements(sweeps: Sequence[str], seeds: str | None) -> list[list[str]]:
    """Return the overrides of each element: the product of all `key=v1,v2,...` and of the seeds.

    Raises:
        ConfigError: a sweep without a value list, or seeds that are no numbers.
    """
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not key or not values:
            raise ConfigError(f"--sweep {sweep!r}: expected key=value1,value2,...")
        axes.append([f"{key}={value}" for value in _split(values)])
    if seeds is not None:
        axes.append([f"trainer.seed={seed}" for seed in _seeds(seeds)])
    return [list(combination) for combination in itertools.product(*axes)]
