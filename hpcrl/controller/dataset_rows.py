"""Rows of datasets as groups, a pair as one of two samples, ready as soon as a step may take them. No worker makes them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import floor

from hpcrl.controller.prompt_stream import PromptStream, group_id
from hpcrl.data.tokenize import Rows
from hpcrl.rundir.layout import Run
from hpcrl.types import GroupMeta, SampleMeta

DATASET = "dataset"
"""Name of the worker of dataset rows."""


@dataclass(frozen=True)
class Mixture:
    """Rows of several datasets in an epoch.

    Attributes:
        sizes: rows of each.
        weights: how often an epoch has each of them. Of the share of a weight behind the point, each epoch draws other rows.
        seed: of those.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    @property
    def counts(self) -> list[int]:
        """Rows of each dataset in an epoch."""
        return [round(weight * size) for weight, size in zip(self.weights, self.sizes, strict=True)]

    def __len__(self) -> int:
        return sum(self.counts)

    def row(self, epoch: int, position: int) -> int:
        """Return the row at a position of an epoch, counted through all datasets; arguments as of `place`."""
        dataset, at = self.place(epoch, position)
        return sum(self.sizes[:dataset]) + at

    def place(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the dataset, and the row in it, at a position of an epoch before that is shuffled."""
        ends = list(accumulate(self.counts))
        dataset = bisect_right(ends, position)
        copy, at = divmod(position - (ends[dataset - 1] if dataset else 0), self.sizes[dataset])
        if copy < floor(self.weights[dataset]):
            return dataset, at
        return dataset, _drawn(self.sizes[dataset], self.seed, dataset, epoch)[at]


@lru_cache(maxsize=8)
def _drawn(size: int, seed: int, dataset: int, epoch: int) -> list[int]:
    rows = list(range(size))
    random.Random(f"rows-{seed}-{dataset}-{epoch}").shuffle(rows)
    return rows


class DatasetRows:
    """The rows that a run trains.

    Args:
        rows: of each dataset.
        weights: as of `Mixture`; none: once each.
        seed: of what is drawn.
    """

    def __init__(self, run: Run, rows: Sequence[Rows], weights: Sequence[float], seed: int) -> None:
        self._rows = list(rows)
        self._paths = [str(part.file.path.relative_to(run.path)) for part in rows]
        sizes = tuple(len(part.places) for part in rows)
        self._mixture = Mixture(sizes, tuple(weights) or (1.0,) * len(sizes), seed)

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        return len(self._mixture)

    def in_order(self, stream: PromptStream) -> Callable[[int, int], GroupMeta]:
        """Return a function that makes finished group `index` at the newest `version`."""
        return lambda index, version: self._group(index, version, stream)

    def _group(self, index: int, version: int, stream: PromptStream) -> GroupMeta:
        dataset, at = self._mixture.place(stream.epoch(index), stream.row(index))
        file, row = self._rows[dataset].file, self._rows[dataset].places[at]
        return GroupMeta(
            group_id=group_id(index),
            kind="train",
            replica=0,
            path=self._paths[dataset],
            samples=[
                SampleMeta(reward, (length,), trained, "stop", {}, reward)
                for reward, length, trained in zip(file.rewards(row), file.lengths(row), file.trained(row), strict=True)
            ],
            oldest_version=version,
            newest_version=version,
            data_source=file.name,
            seconds=0.0,
            digest=file.digest(row),
            row=row,
        )
