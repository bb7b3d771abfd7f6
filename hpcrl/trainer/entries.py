"""What estimators of advantages compare: the samples of a batch, or the turns of each role in them; alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from hpcrl.errors import ConfigError
from hpcrl.trainer.packing import PackedRows
from hpcrl.types import Batch, SampleMeta, TurnMeta

Sum = Callable[[Sequence[float]], list[float]]
"""Returns the element-wise sums over all ranks: World.sum, or `list` with one rank."""


@dataclass
class Entries:
    """Samples that are laid end to end, B of them with P entries, as of AdvantageInputs.

    Attributes:
        places: group, and number in it, of each sample in the batch.
        roles: of each sample; empty where it has none.
        groups: number of each sample's group, of which each role has one of its own.
        lengths: entries of each sample.
        rewards, anchors: of each entry.
        ends: group, and row in it, to the turns of the row: their ends, as of TurnMeta, and entries.
    """

    places: list[tuple[int, int]] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    ends: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    _numbers: dict[tuple[int, str, int | None], int] = field(default_factory=dict)

    def add(self, place: tuple[int, int], role: str, turns: Sequence[TurnMeta]) -> range:
        """Add a sample with its turns in a role, or as a whole, and return the numbers of its entries."""
        group, first = place[0], len(self.rewards)
        self.places.append(place)
        self.roles.append(role)
        self.groups.append(self._number(group, role, None))
        self.lengths.append(len(turns))
        self.rewards += [turn.reward for turn in turns]
        self.anchors += [self._number(group, role, turn.anchor) for turn in turns]
        return range(first, len(self.rewards))

    def _number(self, group: int, role: str, anchor: int | None) -> int:
        return self._numbers.setdefault((group, role, anchor), len(self._numbers))

    def of_tokens(self, samples: PackedRows) -> torch.Tensor:
        """Return the entry of each token of packed rows, [P] int64. What they say is about the next token, so that a turn ends one earlier."""
        entries, lengths = list[int](), list[int]()
        for ref, length in zip(samples.refs, samples.lengths, strict=True):
            turns = self.ends[ref.group, ref.index]
            bounds = [0, *(end - 1 for end, _ in turns[:-1]), length]
            entries += [entry for _, entry in turns]
            lengths += [end - start for start, end in pairwise(bounds)]
        return torch.tensor(entries, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))

    def sums(self, minis: Sequence[PackedRows], over_ranks: Sum) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the trained tokens and the penalties of each entry, over all ranks, [P] float64 each.

        Args:
            minis: this rank's samples.
        """
        sums_2P = torch.zeros(2, len(self.rewards), dtype=torch.float64)
        for samples in minis:
            entries = self.of_tokens(samples)
            sums_2P[0].index_add_(0, entries, samples.loss_mask.double())
            if samples.scores.penalties is not None:
                sums_2P[1].index_add_(0, entries, samples.scores.penalties)
        tokens_P, penalties_P = torch.tensor(over_ranks(sums_2P.flatten().tolist()), dtype=torch.float64).view(2, -1)
        return tokens_P, penalties_P


def entries_of(batch: Batch, groups: Sequence[int], *, turns: bool) -> Entries:
    """Return the samples of some groups of a batch, in their order.

    Args:
        turns: an entry is a turn, and each role in a sample is a sample; else it is a whole sample, whose reward is the outcome.

    Raises:
        ConfigError: samples of several rows have no turns.
    """
    entries = Entries()
    for at in groups:
        row = 0
        for index, sample in enumerate(batch.groups[at].samples):
            if turns:
                _add_turns(entries, (at, index), row, sample)
            else:
                (entry,) = entries.add((at, index), "", [TurnMeta(0, sample.reward, "", 0)])
                entries.ends |= {(at, row + own): [(length, entry)] for own, length in enumerate(sample.lengths)}
            row += len(sample.lengths)
    return entries


def _add_turns(entries: Entries, place: tuple[int, int], first: int, sample: SampleMeta) -> None:
    """Add the turns of a sample, whose first row has this number in its group."""
    rows = _turns_of(sample)
    flat = [turn for turns in rows for turn in turns]
    numbers = [0] * len(flat)
    for role in dict.fromkeys(turn.role for turn in flat):
        own = [at for at, turn in enumerate(flat) if turn.role == role]
        for at, entry in zip(own, entries.add(place, role, [flat[at] for at in own]), strict=True):
            numbers[at] = entry
    left = iter(numbers)
    for row, (turns, length) in enumerate(zip(rows, sample.lengths, strict=True), start=first):
        # nothing is trained in a row without a turn
        entries.ends[place[0], row] = [(turn.end, next(left)) for turn in turns] or [(length, numbers[0])]


def _turns_of(sample: SampleMeta) -> Sequence[Sequence[TurnMeta]]:
    """Return the turns of each row; where they are not known, or there is none, the last row is one."""
    if any(sample.turns):
        return sample.turns
    if not sample.turns and len(sample.lengths) > 1:
        raise ConfigError(
            "trainer.algorithm.advantage_estimator compares turns, and nothing says where those of these samples end; "
            "choose one that compares samples, such as grpo"
        )
    return [*([()] * (len(sample.lengths) - 1)), [TurnMeta(sample.lengths[-1], sample.reward, "", 0)]]
