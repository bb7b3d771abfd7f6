"""Reduces the groups of a run for a report: distributions of rewards and lengths over the steps, and dropped groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.errors import DataError
from hpcrl.observe.report.curves import rounded
from hpcrl.rundir.layout import Run
from hpcrl.types import Batch

_BINS = 24
_MOST_STEPS = 300  # of which batches are read: they have a line per group
_MOST_DROPPED = 200


def groups_of(run: Run) -> dict[str, Any] | None:
    """Return statistics of a run's groups; None where it has no batches with rewards.

    Of a long run some of the steps are read, evenly spaced; a batch that is damaged is passed over.

    Returns:
        steps: steps that were read. reward, length: `low`, `high` and `counts` of samples, a row of bins for each step. alike: the share of
        each step's groups whose samples all have the same reward, among groups with a sample that did not fail; None without such a group.
        stops: by reason, the share of each step's samples.
        dropped: by step the groups that dynamic sampling dropped, and why; given_up: by step, the surplus groups that were not waited for.
    """
    batches = _batches(run)
    if not batches or batches[0].groups[0].row is not None:
        return None
    rewards = [[sample.reward for group in batch.groups for sample in group.scored_samples] for batch in batches]
    lengths = [[float(length) for group in batch.groups for length in group.response_lengths] for batch in batches]
    reasons = [Counter(reason for group in batch.groups for reason in group.stop_reasons) for batch in batches]
    names = sorted({reason for counts in reasons for reason in counts})
    dropped = [
        {
            "step": batch.step,
            "group": group,
            "why": "all its samples failed" if worth is None else f"all its samples are worth {worth:g}",
        }
        for batch in batches
        for group, worth in batch.dropped.items()
    ]
    return {
        "steps": [batch.step for batch in batches],
        "reward": _histogram(rewards),
        "length": _histogram(lengths),
        "alike": [
            rounded(fmean(kinds))
            if (
                kinds := [
                    len({sample.reward for sample in own}) == 1
                    for group in batch.groups
                    if (own := group.scored_samples)
                ]
            )
            else None
            for batch in batches
        ],
        "stops": {name: [rounded(counts[name] / counts.total()) for counts in reasons] for name in names},
        "dropped": {
            "counts": [len(batch.dropped) for batch in batches],
            "some": dropped[-_MOST_DROPPED:],
        },
        "given_up": [len(batch.given_up) for batch in batches],
    }


def _batches(run: Run) -> list[Batch]:
    steps = batch_steps(run)
    every = max(1, -(-len(steps) // _MOST_STEPS))
    found = list[Batch]()
    for step in steps[::-1][::every][::-1]:  # the newest among them
        with suppress(DataError):
            if (file := read_batch(run.batch(step))) is not None and file.batch.groups:
                found.append(file.batch)
    return found


def _histogram(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    values = [value for row in rows for value in row]
    low, high = min(values, default=0.0), max(values, default=0.0)
    width = (high - low) / _BINS or 1.0
    counts = []
    for row in rows:
        places = Counter(min(_BINS - 1, int((value - low) / width)) for value in row)
        counts.append([places[at] for at in range(_BINS)])
    return {"low": rounded(low), "high": rounded(high), "counts": counts}
