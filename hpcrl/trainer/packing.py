"""Rows laid end to end: from files on disk to the micro-batches that an engine runs.

A rank's rows of a mini-batch are packed once, in the order of their micro-batches, so that a micro-batch is a slice. What is
computed about them, log-probabilities, values and advantages, is written beside them in the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise

import numpy as np
import torch

from hpcrl.algorithms.prefixes import common_prefix
from hpcrl.algorithms.reductions import Reduction, TokenCounts, row_weight
from hpcrl.trainer.batching import (
    Limits,
    MiniBatchPlan,
    RowRef,
    plan_shares,
)
from hpcrl.trainer.distributed import World
from hpcrl.types import Batch, Hint, MicroBatch, Row, SamplingMask, SharedPrefixes


@dataclass
class Scores:
    """What was computed about the tokens of packed rows, [P] each; None until then, or where nothing needs it.

    Attributes:
        old_logprobs, ref_logprobs: float32, of the policy before the update and of the reference.
        entropies: float32, of the policy before the update, where it is dumped or selects tokens.
        squared_norms: float32, of the gradient of the token's log-probability over the logits, by the policy before the update, where the
            advantage estimator weighs by it.
        staleness: float32, as of PackedRows, where old log-probabilities are estimated by it.
        values: float32, what the critic expected before the token.
        penalties: float64, subtracted from the token's reward.
        advantages: float32.
        returns: float32, what the critic should have expected before the token.
        selected: float32, as of MicroBatch.
        margins: float32, the margin of a pair at the end of its chosen answer.
        desirable, shifts: float32, as of MicroBatch.
        teacher_logprobs: float32, of the teacher that the policy is compared with.
        teacher_ids, teacher_top: [P, K] int32 and float32, as of MicroBatch.
        contrasts: float32, as of `hint_contrasts` (hpcrl/algorithms/distillation.py).
    """

    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    squared_norms: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None
    contrasts: torch.Tensor | None = None
    staleness: torch.Tensor | None = None
    values: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    margins: torch.Tensor | None = None
    desirable: torch.Tensor | None = None
    shifts: torch.Tensor | None = None

    def present(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class PackedRows:
    """The rows of one rank in one optimizer step, laid end to end: B rows of P tokens in all, whose slices are micro-batches.

    Entry p of every [P] tensor but `token_ids` is about the token that position p predicts, the next one of the row: labels
    are shifted once, by `pack`. Nothing predicts the first token, so that what it was rewarded with belongs to no entry.

    Attributes:
        refs: places of the rows in the batch.
        lengths: tokens of each row; they sum to P.
        token_ids, labels: [P] int64; the label of a row's last position is 0.
        loss_mask: [P] float32, 1 where the token is trained; 0 at a row's last position, as the following two.
        rollout_logprobs, rewards: [P] float32; a rollout log-probability of NaN is not known, see `complete_rollout`.
        weights: of the loss of each trained token, by row (hpcrl/algorithms/reductions.py).
        nll_weights: of the negative log-likelihood of each trained token, by row; 0 without a positive reward.
        left_out: tokens that the policy chose but that are not trained, because they begin several responses of a group.
        unscored: rows that are not trained because a scorer failed at them.
        staleness: [P] float32, age of the version that sampled the token, in versions before the step's first; -1: not known.
        sampling_mask: whose counts are [P]; None where all tokens were sampled among the whole vocabulary.
        hints: of each row; None where it has none.
        observations: [P] float32, 1 where the token is one of the environment that is learned; None: none is.
        observation_weight: of each of them in the loss.
        tensors: of each row, as of Row.
        common: with how many tokens each row begins as the one before it does; empty: what they have in common is computed for each.
    """

    refs: list[RowRef]
    lengths: list[int]
    token_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    rewards: torch.Tensor
    staleness: torch.Tensor
    sampling_mask: SamplingMask[torch.Tensor] | None = None
    hints: list[Hint[torch.Tensor] | None] = field(default_factory=list)
    common: list[int] = field(default_factory=list)
    left_out: int = 0
    unscored: int = 0
    scores: Scores = field(default_factory=Scores)
    weights: list[float] = field(default_factory=list)
    nll_weights: list[float] = field(default_factory=list)
    observations: torch.Tensor | None = None
    observation_weight: float = 0.0
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._offsets = [0, *accumulate(self.lengths)]
        self.weights = self.weights or [0.0] * len(self.lengths)
        self.nll_weights = self.nll_weights or [0.0] * len(self.lengths)
        self.tensors = self.tensors or [{} for _ in self.lengths]

    @property
    def trained(self) -> list[int]:
        """Trained tokens of each row."""
        sums = [0.0, *self.loss_mask.double().cumsum(0).tolist()]
        return [round(sums[end] - sums[start]) for start, end in pairwise(self._offsets)]

    def share_prefixes(self) -> None:
        """Let micro-batches compute once what their rows begin with alike."""
        self.common = common_prefixes(self.token_ids, self.lengths)

    def tokens_of(self, part: range) -> slice:
        """Return where the tokens of consecutive rows are."""
        return slice(self._offsets[part.start], self._offsets[part.stop])

    def micro_batch(self, part: range) -> MicroBatch:
        """Return consecutive rows for one forward and backward; its tensors are views of this one's where they can be.

        No rows at all give one token that counts for nothing, so that a rank without work can join the others' collectives.
        """
        if not part:
            return idle_micro_batch()
        tokens, lengths = self.tokens_of(part), self.lengths[part.start : part.stop]
        lengths_B = torch.tensor(lengths)
        starts_B = lengths_B.cumsum(0) - lengths_B
        mask_P, scores = self.loss_mask[tokens], self.scores

        def weighted(weights_B: list[float]) -> torch.Tensor:
            weights = torch.tensor(weights_B[part.start : part.stop], dtype=torch.float32)
            return mask_P * weights.repeat_interleave(lengths_B)

        def slice_of(column_P: torch.Tensor | None) -> torch.Tensor | None:
            return None if column_P is None else column_P[tokens]

        observed_P = slice_of(self.observations)
        return MicroBatch(
            token_ids=self.token_ids[tokens],
            positions=torch.arange(len(mask_P)) - starts_B.repeat_interleave(lengths_B),
            lengths=lengths,
            labels=self.labels[tokens],
            loss_mask=mask_P,
            weights=weighted(self.weights),
            nll_weights=weighted(self.nll_weights),
            rollout_logprobs=self.rollout_logprobs[tokens],
            old_logprobs=slice_of(scores.old_logprobs),
            ref_logprobs=slice_of(scores.ref_logprobs),
            advantages=slice_of(scores.advantages),
            values=slice_of(scores.values),
            returns=slice_of(scores.returns),
            selected=slice_of(scores.selected),
            margins=slice_of(scores.margins),
            desirable=slice_of(scores.desirable),
            shifts=slice_of(scores.shifts),
            teacher_ids=slice_of(scores.teacher_ids),
            teacher_top=slice_of(scores.teacher_top),
            current=mask_P * (self.staleness[tokens] == 0),
            staleness=slice_of(scores.staleness),
            observation_weights=None if observed_P is None else self.observation_weight * observed_P,
            sampling_mask=None if self.sampling_mask is None else padded_mask(self.sampling_mask, tokens),
            prefixes=shared_prefixes(lengths, self.common[part.start : part.stop]) if self.common else None,
            tensors=self.tensors[part.start : part.stop],
        )

    def complete_rollout(self) -> None:
        """Let old log-probabilities take the place of rollout log-probabilities that are not known: no engine chose these tokens."""
        if self.scores.old_logprobs is not None:
            unknown_P = self.rollout_logprobs.isnan()
            self.rollout_logprobs = torch.where(unknown_P, self.scores.old_logprobs, self.rollout_logprobs)

    def whole(self) -> MicroBatch:
        """Return all rows as one micro-batch."""
        return self.micro_batch(range(len(self.lengths)))


def padded_mask(mask: SamplingMask[torch.Tensor], places: slice) -> torch.Tensor:
    """Return the token ids of consecutive places as [P, K] int32, K the most that one has (at least 1), padded with -1."""
    first = int(mask.counts[: places.start].sum())
    counts_P = mask.counts[places]
    width = max(1, int(counts_P.max()))
    ids_PK = torch.full((len(counts_P), width), -1, dtype=torch.int32)
    ids_PK[torch.arange(width) < counts_P[:, None]] = mask.token_ids[first : first + int(counts_P.sum())]
    return ids_PK


def pack(
    rows: Sequence[Row] | Sequence[Row[torch.Tensor]],
    refs: Sequence[RowRef] | None = None,
    left_out: int = 0,
    version: int | None = None,
) -> PackedRows:
    """Lay rows end to end and shift columns of tokens once: entry p is about the token that position p predicts.

    Args:
        refs: places of the rows in the batch; None: those of a group of its own.
        left_out: as of PackedRows.
        version: that the step begins with; None: no token is of that.
    """
    lengths = [len(row.token_ids) for row in rows]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1

    def joined(name: str, dtype: type[np.generic] = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *(getattr(one, name) for one in rows)]))

    def shifted(values_P: torch.Tensor) -> torch.Tensor:
        return values_P.roll(-1).index_fill_(0, ends, 0)

    token_ids, loss_mask = joined("token_ids", np.int64), shifted(joined("loss_mask"))
    versions = shifted(joined("versions", np.int32))
    return PackedRows(
        refs=list(refs) if refs is not None else [RowRef(0, at, length) for at, length in enumerate(lengths)],
        lengths=lengths,
        token_ids=token_ids,
        labels=shifted(token_ids),
        loss_mask=loss_mask,
        rollout_logprobs=shifted(joined("rollout_logprobs")),
        rewards=shifted(joined("rewards")),
        staleness=torch.full_like(loss_mask, -1) if version is None else (version - versions).float(),
        sampling_mask=_joined_mask(rows),
        hints=[_hint(row.hint) for row in rows],
        tensors=[{name: torch.as_tensor(own) for name, own in row.tensors.items()} for row in rows],
        left_out=left_out,
    )


def _hint(hint: Hint | Hint[torch.Tensor] | None) -> Hint[torch.Tensor] | None:
    if hint is None:
        return None
    return Hint(torch.as_tensor(hint.token_ids), hint.replaces, tuple(map(torch.as_tensor, hint.wrong)))


def _joined_mask(rows: Sequence[Row] | Sequence[Row[torch.Tensor]]) -> SamplingMask[torch.Tensor] | None:
    if not (found := [row.sampling_mask for row in rows if row.sampling_mask is not None]):
        return None
    counts = [mask.counts if (mask := s.sampling_mask) else np.zeros(len(s.versions), np.int32) for s in rows]
    # nothing predicts a row's first token, and no policy chose it, so that the ids keep their order
    assert not any(count_T[:1].any() for count_T in counts)
    ids, counts_P = np.concatenate([mask.token_ids for mask in found]), np.concatenate([np.roll(c, -1) for c in counts])
    return SamplingMask(torch.from_numpy(ids), torch.from_numpy(counts_P))


def idle_micro_batch() -> MicroBatch:
    """Return one token that counts for nothing."""
    return untrained_micro_batch([0])


def untrained_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """Return one row of which nothing is trained; log-probabilities of all its tokens are computed."""
    ids, zeros = torch.tensor(token_ids), torch.zeros(len(token_ids))
    return MicroBatch(
        token_ids=ids,
        positions=torch.arange(len(ids)),
        lengths=[len(ids)],
        labels=ids.roll(-1).index_fill_(0, torch.tensor(len(ids) - 1), 0),
        loss_mask=zeros,
        weights=zeros,
        nll_weights=zeros,
        rollout_logprobs=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=zeros,
        values=zeros,
        returns=zeros,
        margins=zeros,
        desirable=zeros,
        shifts=zeros,
        current=zeros,
        staleness=zeros,
        observation_weights=zeros,
        head_rows=torch.arange(len(ids)),
    )


Before = Callable[[], None]
"""Is called before each micro-batch; what it raises must be raised on all ranks."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class MicroBatchStream:
    """Micro-batches that are made as they are taken.

    Args:
        top_k, share: as of MicroBatch.
    """

    rows: PackedRows
    parts: Sequence[range]
    before: Before
    top_k: int = 0
    share: float = 0.0

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        for part in self.parts:
            self.before()
            yield replace(self.rows.micro_batch(part), top_k=self.top_k, share=self.share if part else 0.0)


@dataclass
class MiniBatch:
    """What one optimizer step trains, seen from one rank.

    Attributes:
        rows: this rank's.
        rank: this one, among those that rows are assigned to.
        tokens: trained tokens of all ranks.
        left_out, unscored: tokens, and rows, of all ranks that are not trained, see PackedRows.
    """

    plan: MiniBatchPlan
    rows: PackedRows
    rank: int
    tokens: int = 0
    left_out: int = 0
    unscored: int = 0

    def micro_batches(self, before: Before = _nothing) -> MicroBatchStream:
        """Return this rank's micro-batches for training; as many as the other ranks have, maybe some with no row."""
        return MicroBatchStream(self.rows, self.plan.train[self.rank], before, share=1 / max(self.plan.rows, 1))

    def scored_top(
        self,
        forward: Callable[[MicroBatchStream], Iterator[tuple[torch.Tensor, ...]]],
        top_k: int,
        before: Before = _nothing,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return [P], and ids and log-probabilities [P, K], on the CPU: what `PolicyEngine.top_logprobs` gives for this rank's rows."""
        parts = self.plan.score[self.rank]
        passes = zip(parts, forward(MicroBatchStream(self.rows, parts, before, top_k)), strict=True)
        found = [outputs for part, outputs in passes if part]
        if not found:
            none = torch.zeros(0, top_k)
            return torch.zeros(0), none.int(), none
        logprobs_P, ids_PK, top_PK = (torch.cat(column).cpu() for column in zip(*found, strict=True))
        return logprobs_P, ids_PK.int(), top_PK

    def scored_both(
        self,
        forward: Callable[[MicroBatchStream], Iterator[tuple[torch.Tensor, torch.Tensor]]],
        before: Before = _nothing,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two columns [P] float32 on the CPU, as `scored` returns one."""
        parts = self.plan.score[self.rank]
        passes = zip(parts, forward(MicroBatchStream(self.rows, parts, before)), strict=True)
        found = [outputs for part, outputs in passes if part]
        if not found:
            return torch.zeros(0), torch.zeros(0)
        first_P, second_P = (torch.cat(column).cpu() for column in zip(*found, strict=True))
        return first_P, second_P

    def scored(
        self, forward: Callable[[MicroBatchStream], Iterator[torch.Tensor]], before: Before = _nothing
    ) -> torch.Tensor:
        """Return [P] float32 on the CPU: what a forward pass over micro-batches, which yields [P] of each, gives for this rank's rows."""
        parts = self.plan.score[self.rank]
        passes = zip(parts, forward(MicroBatchStream(self.rows, parts, before)), strict=True)
        found = [values_P for part, values_P in passes if part]  # an idle pass has values, but of no row
        return torch.cat(found).cpu() if found else torch.zeros(0)  # one copy: each waits for the device


def regrouped(
    minis: Sequence[MiniBatch], batch: Batch, size: int, limits: Limits, data: World, reduction: Reduction
) -> list[MiniBatch]:
    """Return the same rows as the critic's mini-batches, with weights of their own: rows stay on the rank that read them.

    Args:
        minis: the policy's, scored.
        size: groups of a mini-batch of the critic.
        data: the ranks that rows were assigned to.
    """
    found = []
    for start in range(0, len(batch.groups), size):
        chosen = range(start, start + size)
        shares = [
            [ref for mini in minis for ref in mini.plan.shares[rank] if ref.group in chosen]
            for rank in range(data.size)
        ]
        plan = plan_shares(shares, limits)
        rows = _gathered(minis, plan.shares[data.rank])
        if limits[0].shared:
            rows.share_prefixes()
        found.append(MiniBatch(plan, rows, data.rank))
    set_loss_weights(found, batch, data, reduction)
    return found


def _gathered(minis: Sequence[MiniBatch], refs: Sequence[RowRef]) -> PackedRows:
    places = {ref: (mini.rows, at) for mini in minis for at, ref in enumerate(mini.rows.refs)}
    parts = [(rows, rows.tokens_of(range(at, at + 1))) for rows, at in (places[ref] for ref in refs)]
    if not parts:
        return pack([])

    def joined(column: Callable[[PackedRows], torch.Tensor]) -> torch.Tensor:
        return torch.cat([column(rows)[tokens] for rows, tokens in parts])

    def optional(column: Callable[[PackedRows], torch.Tensor | None]) -> torch.Tensor | None:
        found = [values[tokens] for rows, tokens in parts if (values := column(rows)) is not None]
        return torch.cat(found) if len(found) == len(parts) else None

    return PackedRows(
        refs=list(refs),
        lengths=[tokens.stop - tokens.start for _, tokens in parts],
        token_ids=joined(lambda rows: rows.token_ids),
        labels=joined(lambda rows: rows.labels),
        loss_mask=joined(lambda rows: rows.loss_mask),
        rollout_logprobs=joined(lambda rows: rows.rollout_logprobs),
        rewards=joined(lambda rows: rows.rewards),
        staleness=joined(lambda rows: rows.staleness),
        scores=Scores(
            values=optional(lambda rows: rows.scores.values),
            returns=optional(lambda rows: rows.scores.returns),
        ),
        tensors=[rows.tensors[at] for rows, at in (places[ref] for ref in refs)],
    )


def set_loss_weights(minis: Sequence[MiniBatch], batch: Batch, data: World, reduction: Reduction) -> None:
    """Set the tokens of each mini-batch and the loss weights of its rows, from the counts of all ranks."""
    per_group, positive = [0] * len(batch.groups), [0] * len(minis)
    rewarded = [[sample.reward > 0 for sample in group.samples for _ in sample.lengths] for group in batch.groups]
    lengths = [mini.rows.trained for mini in minis]
    for number, mini in enumerate(minis):
        for ref, length in zip(mini.rows.refs, lengths[number], strict=True):
            per_group[ref.group] += length
            positive[number] += length if rewarded[ref.group][ref.index] else 0
    others = [count for mini in minis for count in _other_counts(mini.rows)]
    sums = iter([round(count) for count in data.sum([*per_group, *positive, *others])])
    per_group, positive, others = (list(islice(sums, len(own))) for own in (per_group, positive, others))
    for number, (mini, own, likelihood) in enumerate(zip(minis, lengths, positive, strict=True)):
        groups = mini.plan.groups
        mini.tokens = sum(per_group[group] for group in groups)
        mini.left_out, mini.unscored, observed = others[3 * number : 3 * number + 3]
        mini.rows.observation_weight = 1 / max(observed, 1)
        used = sum(bool(part) for parts in mini.plan.train for part in parts)
        for part in mini.plan.train[mini.rank]:
            micro_tokens = sum(own[at] for at in part)
            for at in part:
                ref = mini.rows.refs[at]
                counts = TokenCounts(
                    length=own[at],
                    tokens=mini.tokens,
                    rows=mini.plan.rows,
                    groups=len(groups),
                    group_tokens=per_group[ref.group],
                    micro_tokens=micro_tokens,
                    micro_batches=used,
                )
                mini.rows.weights[at] = row_weight(reduction, counts)
                positive_row = own[at] and rewarded[ref.group][ref.index]
                mini.rows.nll_weights[at] = 1 / likelihood if positive_row else 0.0


def _other_counts(rows: PackedRows) -> tuple[int, int, int]:
    observed = 0 if rows.observations is None else int(rows.observations.sum())
    return rows.left_out, rows.unscored, observed


def common_prefixes(token_ids: torch.Tensor, lengths: Sequence[int]) -> list[int]:
    """Return with how many tokens each packed row begins as the row before it does; 0 for the first.

    Args:
        token_ids: [P], on the CPU.
    """
    rows = [ids.numpy() for ids in token_ids.split(list(lengths))]
    return [0, *(common_prefix(one, other) for one, other in pairwise(rows))][: len(rows)]


def shared_prefixes(lengths: Sequence[int], common: Sequence[int]) -> SharedPrefixes | None:
    """Return the computed tokens of packed rows; None: all.

    The last token of a row always is, so that none is without a token of its own.

    Args:
        lengths: tokens of each row.
        common: as `common_prefixes` gives it; that of the first does not count.
    """
    skipped = [0, *(min(size, length - 1) for size, length in zip(common[1:], lengths[1:], strict=True))]
    if not any(skipped):
        return None
    own = [length - size for length, size in zip(lengths, skipped, strict=True)]
    places, made = list[torch.Tensor](), 0
    for size, count in zip(skipped, own, strict=True):
        before = places[-1][:size] if size else torch.zeros(0, dtype=torch.int64)
        places.append(torch.cat([before, torch.arange(made, made + count)]))
        made += count
    starts = accumulate(lengths, initial=0)
    kept = [torch.arange(at + size, at + length) for at, size, length in zip(starts, skipped, lengths, strict=False)]
    cu_lengths = torch.tensor([0, *accumulate(own)], dtype=torch.int32)
    return SharedPrefixes(own, cu_lengths, torch.cat(kept), torch.cat(places))
