"""Self-distillation: log-probabilities of samples under the hinted prompt, computed by trainer ranks in the scoring pass.

The answer's tokens are the sample's own. Another prompt stands before them, so that positions differ, and micro-batches are cut again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from hpcrl.algorithms.distillation import hint_contrasts
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.batching import Limits, RowRef, plan_shares
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import Before, MicroBatchStream, MiniBatch, PackedRows, pack
from hpcrl.types import Hint, Row, SamplingMask


def score_by_hints(
    minis: Sequence[MiniBatch],
    policy: PolicyEngine,
    distillation: DistillationConfig,
    limits: Limits,
    before: Before,
    *,
    rollout: bool = False,
) -> dict[str, float]:
    """Fill in log-probabilities of the samples under hinted prompts, as of a teacher, and return distillation/hinted.

    Every rank calls it, with samples that have old log-probabilities. A sample without a hint gets these, so that it does not diverge from its
    teacher, and ids of -1. With wrong hints it gets the contrast with these too, from one more forward pass for each.

    Args:
        limits: of micro-batches.
        before: called before each forward pass.
        rollout: old log-probabilities are those of the rollout.

    Returns:
        hinted: share of samples that have a hint.
    """
    reference = distillation.self_teacher_model != "policy"
    top_k = min(distillation.top_k, policy.vocabulary)
    hinted = samples = 0
    for mini in minis:
        own, scores = mini.rows, mini.rows.scores
        old_P = own.rollout_logprobs if rollout else scores.old_logprobs
        assert old_P is not None or not own.lengths
        scores.teacher_logprobs = torch.zeros(0) if old_P is None else old_P.clone()
        shown, targets = with_hints(mini, policy.data, limits), [scores.teacher_logprobs]
        if top_k:
            tokens, shown.rows.scores.teacher_ids = (
                len(own.token_ids),
                _moved(own, shown.rows, scores.teacher_ids),
            )
            columns = shown.scored_top(partial(policy.top_logprobs, reference=reference), top_k, before)
            scores.teacher_ids = torch.full((tokens, top_k), -1, dtype=torch.int32)
            scores.teacher_top = torch.zeros(tokens, top_k)
            targets += [scores.teacher_ids, scores.teacher_top]
        else:
            columns = (shown.scored(partial(policy.logprobs, reference=reference), before),)
        for here, there in _places(own, shown.rows):
            for target, column in zip(targets, columns, strict=True):
                target[here] = column[there]
        if distillation.self_teacher.wrong_hints:
            forward = partial(policy.logprobs, reference=reference)
            wrong = distillation.self_teacher.wrong_hints
            scores.contrasts = _contrasts(mini, wrong, policy.data, forward, limits, before)
        hinted, samples = hinted + len(shown.rows.refs), samples + len(own.refs)
    shares = policy.data.sum([float(hinted), float(samples)])
    return {"distillation/hinted": shares[0] / max(shares[1], 1.0)}


def _contrasts(
    mini: MiniBatch,
    wrong_hints: int,
    data: World,
    forward: Callable[[MicroBatchStream], Iterator[torch.Tensor]],
    limits: Limits,
    before: Before,
) -> torch.Tensor:
    """Return `hint_contrasts` of the samples, [P].

    All ranks call it, after teacher_logprobs are filled in, and make one pass for each wrong hint, whatever their samples have.
    """
    right_P = mini.rows.scores.teacher_logprobs
    assert right_P is not None
    wrong_KP = right_P.new_full((wrong_hints, len(right_P)), -torch.inf)
    for number, wrong_P in enumerate(wrong_KP):
        own = replace(mini.rows, hints=[_wrong(hint, number) for hint in mini.rows.hints])
        shown = with_hints(replace(mini, rows=own), data, limits)
        column = shown.scored(forward, before)
        for here, there in _places(own, shown.rows):
            wrong_P[here] = column[there]
    return hint_contrasts(right_P, wrong_KP)


def _wrong(hint: Hint[torch.Tensor] | None, number: int) -> Hint[torch.Tensor] | None:
    return None if hint is None or number >= len(hint.wrong) else Hint(hint.wrong[number], hint.replaces)


def with_hints(mini: MiniBatch, data: World, limits: Limits) -> MiniBatch:
    """Return the samples with a hint in place of their prompt, in micro-batches of their own; all ranks call it.

    Args:
        data: the ranks that samples were assigned to; samples stay where they are.
    """
    samples = mini.rows
    hinted = {(ref.group, ref.index): at for at, ref in enumerate(samples.refs) if samples.hints[at] is not None}

    def own() -> list[list[int]]:
        lengths = {place: _length(samples.hints[at], samples.lengths[at]) for place, at in hinted.items()}
        return [[*place, length] for place, length in lengths.items()]

    plan = plan_shares([[RowRef(*ref) for ref in share] for share in data.all_gather(own)], limits)
    refs = plan.shares[data.rank]
    found = [_hinted(samples, hinted[ref.group, ref.index]) for ref in refs]
    packed = pack(found, refs)
    if limits[0].shared:
        packed.share_prefixes()
    return MiniBatch(plan, packed, data.rank)


def _length(hint: Hint[torch.Tensor] | None, length: int) -> int:
    assert hint is not None
    return len(hint.token_ids) - hint.replaces + length


def _hinted(samples: PackedRows, at: int) -> Row[torch.Tensor]:
    """Return a packed sample with its hint, laid out as a sample is: entry t is about token t."""
    hint, tokens = samples.hints[at], samples.tokens_of(range(at, at + 1))
    assert hint is not None
    kept, size = slice(tokens.start + hint.replaces, tokens.stop), len(hint.token_ids)
    about = slice(kept.start - 1, kept.stop - 1)  # of the kept tokens, shifted as packing shifts
    token_ids = torch.cat([hint.token_ids, samples.token_ids[kept]])
    zeros = torch.zeros(len(token_ids))
    mask = samples.sampling_mask
    if mask is not None:
        first, count = int(mask.counts[: about.start].sum()), int(mask.counts[about].sum())
        counts_T = torch.cat([mask.counts.new_zeros(size), mask.counts[about]])
        mask = SamplingMask(mask.token_ids[first : first + count], counts_T)
    return Row(
        token_ids=token_ids,
        loss_mask=torch.cat([torch.zeros(size), samples.loss_mask[about]]),
        rollout_logprobs=zeros,
        versions=zeros.int(),
        rewards=zeros,
        stop_reason="stop",
        sampling_mask=mask,
    )


def _places(own: PackedRows, shown: PackedRows) -> Iterator[tuple[slice, slice]]:
    """Yield the entries of each answer's tokens, and their positions behind its hint."""
    numbers = {(ref.group, ref.index): at for at, ref in enumerate(own.refs)}
    for number, ref in enumerate(shown.refs):
        at = numbers[ref.group, ref.index]
        hint, here, there = (
            own.hints[at],
            own.tokens_of(range(at, at + 1)),
            shown.tokens_of(range(number, number + 1)),
        )
        assert hint is not None
        begin, end = here.start + hint.replaces - 1, there.start + len(hint.token_ids) - 1
        yield slice(begin, here.stop), slice(end, there.stop)


def _moved(own: PackedRows, shown: PackedRows, ids_PK: torch.Tensor | None) -> torch.Tensor | None:
    if ids_PK is None:
        return None
    found_PK = ids_PK.new_full((len(shown.token_ids), ids_PK.shape[1]), -1)
    for here, there in _places(own, shown):
        found_PK[there] = ids_PK[here]
    return found_PK
