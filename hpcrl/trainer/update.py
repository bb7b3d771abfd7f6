"""One batch becomes one or more optimizer steps: load, score, train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from hpcrl.algorithms.reductions import Counts, Reduction, sample_weight
from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.trainer import TrainerConfig
from hpcrl.run.fault import fault
from hpcrl.run.layout import Run
from hpcrl.trainer.advantages import trained_groups
from hpcrl.trainer.engine import Engine, MicroBatches, Objective, PolicyEngine, StepReport
from hpcrl.trainer.packing import Row, load_rows, pack, trained_tokens
from hpcrl.trainer.plan import Limit, Pick, cut, deal, mini_batches
from hpcrl.trainer.world import World
from hpcrl.types import Batch, MicroBatch

Between = Callable[[str], None]
"""Is called before each micro-batch with the name of the place; what it raises must be raised on all ranks."""

Pass = Callable[[MicroBatches], Iterator[torch.Tensor]]
"""Passes micro-batches through a model, and yields [P] values of each."""


@dataclass
class MiniBatch:
    """What one optimizer step trains, seen from one rank.

    Attributes:
        rows: this rank's samples, longest first.
        shares: of all ranks, the places of their samples.
        rank: this one.
        tokens: trained tokens of all ranks.
        left_out: tokens of all ranks that the policy chose but that are not trained, see Row.
    """

    rows: list[Row]
    shares: list[list[Pick]]
    rank: int
    tokens: int = 0
    left_out: int = 0

    def micro_batches(self, limit: Limit) -> list[list[Row]]:
        """Return what this rank passes through a model at a time; as many times as the other ranks, maybe nothing."""
        return [[self.rows[at] for at in part] for part in cut(self.shares, limit)[self.rank]]


def updates_per_batch(trainer: TrainerConfig) -> int:
    """Return the optimizer steps that one full batch makes."""
    return -(-trainer.train_batch_size // trainer.policy_mini_batch_size) * trainer.update_epochs_per_batch


@dataclass(frozen=True)
class Trained:
    """What one optimizer step did: metric sums (or extremes, see `merge`) over all ranks, and the step itself."""

    sums: dict[str, float]
    report: StepReport


def load_mini_batches(
    run: Run,
    batch: Batch,
    algorithm: AlgorithmConfig,
    groups_per_mini_batch: int,
    limit: Limit,
    data: World,
    reduction: Reduction,
) -> list[MiniBatch]:
    """Deal each mini-batch to the ranks, read this rank's samples and weigh them.

    Args:
        limit: of the micro-batches that are trained.
        data: the ranks that samples are dealt to.

    Raises:
        DataError: a sample file is missing or damaged.
    """
    trained = set(trained_groups(batch, algorithm))
    planned = mini_batches(batch, groups_per_mini_batch)
    shares = [deal([pick for pick in picks if pick.group in trained], data.size, limit) for picks in planned]
    picks = [pick for ranks in shares for pick in ranks[data.rank]]
    rows = iter(load_rows(run, batch, picks, algorithm.min_filter_prefix_tokens))
    minis = [MiniBatch(list(islice(rows, len(ranks[data.rank]))), ranks, data.rank) for ranks in shares]
    weigh(minis, batch, limit, data, reduction)
    return minis


def weigh(minis: Sequence[MiniBatch], batch: Batch, limit: Limit, data: World, reduction: Reduction) -> None:
    """Fill in the tokens of each mini-batch and the weights of its rows, from the counts of all ranks."""
    per_group, positive = [0] * len(batch.groups), [0] * len(minis)
    rewarded = [[group.rewards[sample] > 0 for sample in group.owners] for group in batch.groups]
    lengths = [[trained_tokens([row]) for row in mini.rows] for mini in minis]
    for number in range(len(minis)):
        for row, length in zip(minis[number].rows, lengths[number], strict=True):
            per_group[row.pick.group] += length
            positive[number] += length if rewarded[row.pick.group][row.pick.index] else 0
    left_out = [sum(row.left_out for row in mini.rows) for mini in minis]
    sums = iter([round(count) for count in data.sum([*per_group, *positive, *left_out])])
    per_group, positive, left_out = (list(islice(sums, len(own))) for own in (per_group, positive, left_out))
    for mini, own, likelihood, without in zip(minis, lengths, positive, left_out, strict=True):
        groups = {pick.group for share in mini.shares for pick in share}
        mini.tokens, mini.left_out = sum(per_group[group] for group in groups), without
        planned = cut(mini.shares, limit)
        used = sum(bool(part) for parts in planned for part in parts)
        for part in planned[mini.rank]:
            for at in part:
                row = mini.rows[at]
                counts = Counts(
                    length=own[at],
                    tokens=mini.tokens,
                    samples=sum(map(len, mini.shares)),
                    groups=len(groups),
                    group_tokens=per_group[row.pick.group],
                    micro_tokens=sum(own[other] for other in part),
                    micro_batches=used,
                )
                row.weight = sample_weight(reduction, counts)
                row.nll_weight = 1 / likelihood if own[at] and rewarded[row.pick.group][row.pick.index] else 0.0


def score(
    engine: PolicyEngine, mini: MiniBatch, limit: Limit, *, old: bool, reference: bool, between: Between = fault
) -> None:
    """Fill in old and reference log-probabilities."""
    passes: dict[str, Pass] = {}
    if old:
        passes["old_logprobs"] = engine.logprobs
    if reference:
        passes["ref_logprobs"] = partial(engine.logprobs, reference=True)
    fill_in(mini, limit, passes, between)


def fill_in(
    mini: MiniBatch,
    limit: Limit,
    passes: Mapping[str, Pass],
    between: Between = fault,
) -> None:
    """Give the rows what passes through models say about their tokens.

    Args:
        passes: name of an attribute of Row -> what gives it.
    """
    parts = mini.micro_batches(limit) if passes else []
    for name, values in passes.items():
        for rows, values_P in zip(parts, values(_Packed(parts, "score.micro_batch", between)), strict=True):
            if rows:  # an idle pass has values, but of no sample
                for row, values_T in zip(
                    rows, values_P.split([len(row.sample.token_ids) for row in rows]), strict=True
                ):
                    setattr(row, name, values_T)


def train(engine: Engine, mini: MiniBatch, limit: Limit, objective: Objective, between: Between = fault) -> Trained:
    """Make one optimizer step, but none where nothing is trained: momentum and weight decay alone would move the model."""
    batches = _Packed(mini.micro_batches(limit), "update.micro_batch", between)
    totals = engine.forward_backward(batches, objective)
    report = engine.step() if mini.tokens else engine.skip()
    return Trained(_over_ranks(totals, engine.data), report)


@dataclass(frozen=True)
class _Packed:
    """Micro-batches that are packed as they are taken."""

    parts: list[list[Row]]
    place: str
    between: Between

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        for rows in self.parts:
            self.between(self.place)
            yield pack(rows)


def _over_ranks(totals: Mapping[str, torch.Tensor], data: World) -> dict[str, float]:
    values = dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
    signs = {name: 1 if name.endswith("_max") else -1 for name in sorted(values) if name.endswith(("_max", "_min"))}
    summed = sorted(set(values) - set(signs))
    found = dict(zip(summed, data.sum([values[name] for name in summed]), strict=True))
    extremes = data.max([sign * values[name] for name, sign in signs.items()]) if signs else []
    return found | {name: sign * extreme for (name, sign), extreme in zip(signs.items(), extremes, strict=True)}
