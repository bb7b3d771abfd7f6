"""One batch becomes one or more optimizer steps: load, score, train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcrl.algorithms.advantages import ADVANTAGES
from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.trainer import TrainerConfig
from hpcrl.run.layout import Run
from hpcrl.trainer.engine import Engine, Objective, StepReport
from hpcrl.trainer.packing import Row, load_samples, pack, trained_tokens
from hpcrl.trainer.plan import Pick, cut, deal, mini_batches, passes
from hpcrl.trainer.world import World
from hpcrl.types import Batch


@dataclass
class MiniBatch:
    """What one optimizer step trains, seen from one rank.

    Attributes:
        rows: this rank's samples, longest first.
        largest: samples of the rank that has the most.
        tokens: trained tokens of all ranks.
    """

    rows: list[Row]
    largest: int
    tokens: int


def updates_per_batch(trainer: TrainerConfig) -> int:
    """Return the optimizer steps that one full batch makes."""
    return -(-trainer.train_batch_size // trainer.policy_mini_batch_size) * trainer.update_epochs_per_batch


@dataclass(frozen=True)
class Trained:
    """What one optimizer step did: metric sums over all ranks, the tokens they are over, and the step itself."""

    sums: dict[str, float]
    report: StepReport


def group_advantages(batch: Batch, algorithm: AlgorithmConfig) -> list[torch.Tensor]:
    """Return the advantages of each group's samples, [n] each, from the rewards in the batch's metadata."""
    estimate = ADVANTAGES[algorithm.advantage_estimator]
    return [
        estimate(torch.tensor(group.rewards, dtype=torch.float64), norm_by_std=algorithm.grpo_norm_by_std)
        for group in batch.groups
    ]


def load_mini_batches(
    run: Run, batch: Batch, advantages: Sequence[torch.Tensor], groups_per_mini_batch: int, world: World
) -> list[MiniBatch]:
    """Deal each mini-batch to the ranks and read this rank's samples.

    Raises:
        DataError: a sample file is missing or damaged.
    """
    shares = [deal(picks, world.size) for picks in mini_batches(batch, groups_per_mini_batch)]
    rows = [_load_rows(run, batch, ranks[world.rank], advantages) for ranks in shares]
    tokens = world.sum([trained_tokens(mine) for mine in rows])
    return [
        MiniBatch(mine, passes(ranks, 1), round(count)) for mine, ranks, count in zip(rows, shares, tokens, strict=True)
    ]


def _load_rows(run: Run, batch: Batch, picks: Sequence[Pick], advantages: Sequence[torch.Tensor]) -> list[Row]:
    samples = load_samples(run, batch, picks)
    return [
        Row(sample, advantages[pick.group][pick.index].expand(len(sample.token_ids)))
        for sample, pick in zip(samples, picks, strict=True)
    ]


def score(engine: Engine, mini: MiniBatch, size: int, *, old: bool, reference: bool) -> None:
    """Fill in old and reference log-probabilities, `size` samples per forward pass."""
    for rows in cut(mini.rows, size, -(-mini.largest // size)):
        batch = pack(rows)
        wanted = [("old_logprobs", False)] * old + [("ref_logprobs", True)] * reference
        for name, of_reference in wanted:
            parts = engine.logprobs(batch, reference=of_reference).split(batch.lengths)
            for row, logprobs_T in zip(rows, parts, strict=False):  # an idle pass has a part but no row
                setattr(row, name, logprobs_T)


def train(engine: Engine, mini: MiniBatch, size: int, objective: Objective, world: World) -> Trained:
    """Make one optimizer step, `size` samples per forward and backward pass."""
    totals: dict[str, torch.Tensor] = {}
    for rows in cut(mini.rows, size, -(-mini.largest // size)):
        for name, value in engine.forward_backward(pack(rows), objective, max(mini.tokens, 1)).items():
            totals[name] = totals[name] + value.double() if name in totals else value.double()
    report = engine.step()
    names = sorted(totals)
    sums = world.sum(torch.stack([totals[name] for name in names]).tolist())
    return Trained(dict(zip(names, sums, strict=True)), report)
