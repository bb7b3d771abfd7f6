"""Reduces the curves of a run for a report: few enough points to draw, of few enough processes to compare."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcrl.observe.metrics import Record, read_metrics
from hpcrl.rundir.layout import Run

_MOST_POINTS = 1000
_DIGITS = 5


def rounded(value: float | None) -> float | None:
    """Return a number with as many digits as a chart shows, and None for what JSON does not know."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def curves_of(run: Run, started: float) -> dict[str, Any]:
    """Return the metrics of a run by step.

    Of metrics that several replicas report alike there are mean, least and greatest (`x`, `x/min`, `x/max`) in place of each one's.

    Args:
        started: Unix time from which seconds are counted.

    Returns:
        `steps`, `seconds`: when each step was reported. `metrics`: by name, a value or None for each of the steps. `each`: number of steps
        in the mean of a point; 1 except in long runs. `finite`: whether all values are numbers.
    """
    records = read_metrics(run)
    by_name = _by_name(records)
    steps = sorted({record.step for record in records})
    times: dict[int, float] = {}
    for record in records:
        times[record.step] = max(record.time, times.get(record.step, 0.0))
    each = max(1, math.ceil(len(steps) / _MOST_POINTS))
    parts = [steps[at : at + each] for at in range(0, len(steps), each)]
    return {
        "steps": [part[-1] for part in parts],
        "seconds": [round(times[part[-1]] - started, 1) for part in parts],
        "metrics": {name: [_mean(values, part) for part in parts] for name, values in sorted(by_name.items())},
        "each": each,
        "finite": all(math.isfinite(value) for values in by_name.values() for value in values.values()),
    }


def _by_name(records: Iterable[Record]) -> dict[str, dict[int, float]]:
    alone: dict[str, dict[int, float]] = defaultdict(dict)
    alike: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        own = f"/{record.process}"
        for name, value in record.metrics.items():
            if name.endswith(own):
                alike[name.removesuffix(own)][record.process][record.step] = value
            else:
                alone[name][record.step] = value
    for name, processes in alike.items():
        if len(processes) == 1:
            alone[name] = next(iter(processes.values()))
            continue
        together: dict[int, list[float]] = defaultdict(list)
        for values in processes.values():
            for step, value in values.items():
                together[step].append(value)
        for step, values in together.items():
            alone[name][step] = math.fsum(values) / len(values)
            alone[f"{name}/min"][step], alone[f"{name}/max"][step] = min(values), max(values)
    return alone


def _mean(values: Mapping[int, float], steps: Sequence[int]) -> float | None:
    found = [values[step] for step in steps if step in values]
    return rounded(math.fsum(found) / len(found)) if found else None
