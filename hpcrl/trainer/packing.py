"""Samples laid end to end: from files on disk to the MicroBatch that an engine runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hpcrl.algorithms.prefixes import shared_prefixes
from hpcrl.data.samples import read_group
from hpcrl.run.layout import Run
from hpcrl.trainer.plan import Pick
from hpcrl.types import Batch, MicroBatch, Sample


@dataclass
class Row:
    """A sample, or with step-wise trajectories a turn of one, on its way through training.

    Attributes:
        pick: its place in the batch.
        penalties: [T] float64, subtracted from the reward of token t; None: nothing is.
        advantages: [T] float32, entry t of token t; None until estimated.
        old_logprobs, ref_logprobs: [T] float32, entry t speaks about token t + 1; None until computed.
        values: [T] float32, what the critic expected, entry t before token t + 1; None without one.
        returns: [T] float32, what it should have expected before token t; None without one.
        weight: of the loss of each trained token.
        nll_weight: of the negative log-likelihood of each trained token; 0 without a positive reward.
        left_out: tokens that the policy chose but that are not trained, because they begin several responses of the group.
    """

    sample: Sample
    pick: Pick
    advantages: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    weight: float = 0.0
    nll_weight: float = 0.0
    left_out: int = 0

    @property
    def trained(self) -> torch.Tensor:
        """[T] float64: the loss mask without the first token, which nothing predicts."""
        return torch.cat([torch.zeros(1), self.sample.loss_mask[1:]]).double()

    @property
    def rewards(self) -> torch.Tensor:
        """[T] float64: of each token, after penalties."""
        rewards_T = self.sample.rewards.double()
        return rewards_T if self.penalties is None else rewards_T - self.penalties


def load_rows(run: Run, batch: Batch, picks: Sequence[Pick], least_prefix: int | None = None) -> list[Row]:
    """Read the picked samples in the order of `picks`.

    Args:
        least_prefix: tokens of a prefix that is left out of the loss where responses of different reward share it
            (hpcrl/algorithms/prefixes.py); None: all are trained.

    Raises:
        DataError: a sample file is missing or damaged, or is no longer the one that the batch was composed of.
    """
    wanted: dict[int, list[int]] = defaultdict(list)
    for pick in picks:
        wanted[pick.group].append(pick.index)
    samples: dict[tuple[int, int], Sample] = {}
    left_out: dict[tuple[int, int], int] = defaultdict(int)
    for group, indices in wanted.items():
        meta = batch.groups[group]
        found = read_group(run.inside(meta.path), indices if least_prefix is None else None, meta.lengths)
        if least_prefix is not None:
            masks = masks_without_prefixes(found, meta.rewards, least_prefix)
            for index in indices:
                before, after = found[index].loss_mask, masks[index]
                left_out[group, index] = int((before - after).sum())
                found[index] = replace(found[index], loss_mask=after)
            found = [found[index] for index in indices]
        samples |= {(group, index): sample for index, sample in zip(indices, found, strict=True)}
    return [Row(samples[pick.group, pick.index], pick, left_out=left_out[pick.group, pick.index]) for pick in picks]


def masks_without_prefixes(samples: Sequence[Sample], rewards: Sequence[float], least: int) -> list[torch.Tensor]:
    """Return the loss mask [T] of each sample of a group, without the prefix that it shares with a response of different reward.

    A response begins with the first token that the policy chose. What comes back to the policy between its turns belongs to it.

    Args:
        rewards: of each sample.
        least: tokens that a prefix must have.
    """
    chosen = [(sample.versions >= 0).int() for sample in samples]
    starts = [int(chosen_T.argmax()) if chosen_T.any() else len(chosen_T) for chosen_T in chosen]
    responses = [sample.token_ids[start:].tolist() for sample, start in zip(samples, starts, strict=True)]
    masks = [sample.loss_mask.clone() for sample in samples]
    for mask_T, start, size in zip(masks, starts, shared_prefixes(responses, rewards, least), strict=True):
        mask_T[start : start + size] = 0
    return masks


def trained_tokens(rows: Sequence[Row]) -> int:
    """Return how many tokens of these rows enter the loss: those that the policy chose, but a sample's first one."""
    return int(sum(row.trained.sum().item() for row in rows))


def pack(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows end to end and shift labels once: entry p speaks about the token that position p predicts.

    No rows at all give one token that counts for nothing, so that a rank without work can join the others' collectives.
    """
    if not rows:
        return _idle()
    samples = [row.sample for row in rows]
    lengths = [len(sample.token_ids) for sample in samples]
    token_ids = torch.cat([sample.token_ids for sample in samples])
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    ends = starts + torch.tensor(lengths) - 1

    def shifted(values_P: torch.Tensor) -> torch.Tensor:
        return values_P.roll(-1).index_fill_(0, ends, 0)

    advantages, returns = _joined([row.advantages for row in rows]), _joined([row.returns for row in rows])

    def spread(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))

    loss_mask = shifted(torch.cat([sample.loss_mask for sample in samples]))
    return MicroBatch(
        token_ids=token_ids,
        positions=torch.arange(len(token_ids)) - starts.repeat_interleave(torch.tensor(lengths)),
        lengths=lengths,
        labels=shifted(token_ids),
        loss_mask=loss_mask,
        weights=loss_mask * spread([row.weight for row in rows]),
        nll_weights=loss_mask * spread([row.nll_weight for row in rows]),
        rollout_logprobs=shifted(torch.cat([sample.rollout_logprobs for sample in samples])),
        old_logprobs=_joined([row.old_logprobs for row in rows]),
        ref_logprobs=_joined([row.ref_logprobs for row in rows]),
        advantages=None if advantages is None else shifted(advantages),
        values=_joined([row.values for row in rows]),
        returns=None if returns is None else shifted(returns),
    )


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), "some rows of a micro-batch have been scored, others not"
    return torch.cat(present) if present else None


def _idle() -> MicroBatch:
    zero = torch.zeros(1)
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        lengths=[1],
        labels=torch.zeros(1, dtype=torch.int64),
        loss_mask=zero,
        weights=zero,
        nll_weights=zero,
        rollout_logprobs=zero,
        old_logprobs=zero,
        ref_logprobs=zero,
        advantages=zero,
        values=zero,
        returns=zero,
    )
