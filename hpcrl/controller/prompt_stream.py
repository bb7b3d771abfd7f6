"""The prompt stream: one endless, global order of prompts that no restart and no number of workers changes.

Group i of a run trains row `stream.row(i)`. An epoch is a permutation of the dataset that depends on (order seed, epoch) alone, or the
dataset as it is. Rows that do not fill a last batch are left out of that epoch, or fill it together with the first rows of the next.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hpcrl.config.sections.trainer import steps_per_epoch

TRAIN_GROUP = r"g(\d{8}|[1-9]\d{8,14})"
"""What ids of training groups look like: each index has one."""
_GROUP = re.compile(TRAIN_GROUP, re.ASCII)


def group_id(index: int) -> str:
    return f"g{index:08d}"


def group_index(name: str) -> int | None:
    match = _GROUP.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=2)
def _permutation(n_prompts: int, seed: int, epoch: int) -> list[int]:
    rows = list(range(n_prompts))
    random.Random(f"prompts-{seed}-{epoch}").shuffle(rows)
    return rows


@dataclass(frozen=True)
class PromptStream:
    """Order in which prompts are trained.

    Attributes:
        n_prompts: rows of the dataset.
        batch_size: prompts per step.
        seed: from which those of samples are made.
        order_seed: of the order in each epoch; None keeps the dataset's own.
        drop_last: whether an epoch leaves out what does not fill its last batch; otherwise the next epoch begins in that batch.

    Raises:
        DataError: the dataset does not fill one batch, which may not have several epochs.
    """

    n_prompts: int
    batch_size: int
    seed: int
    order_seed: int | None
    drop_last: bool = True

    def __post_init__(self) -> None:
        steps_per_epoch(self.n_prompts, self.batch_size, self.drop_last)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.n_prompts, self.batch_size, self.drop_last)

    @property
    def _of_epoch(self) -> int:
        return self.steps_per_epoch * self.batch_size if self.drop_last else self.n_prompts

    def epoch(self, index: int) -> int:
        """Return the epoch that group `index` belongs to; the first is 0."""
        return index // self._of_epoch

    def last_epoch(self, names: Iterable[str]) -> int:
        """Return the epoch of the last of some training groups."""
        return self.epoch(max(index for name in names if (index := group_index(name)) is not None))

    def row(self, index: int) -> int:
        """Return the dataset row that group `index` trains."""
        epoch, position = divmod(index, self._of_epoch)
        return position if self.order_seed is None else _permutation(self.n_prompts, self.order_seed, epoch)[position]

    def sampling_seed(self, index: int) -> int:
        """Return the base of the sampling seeds of group `index`, the same for each worker and attempt."""
        return random.Random(f"samples-{self.seed}-{index}").getrandbits(31)
