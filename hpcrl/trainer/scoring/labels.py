"""Labels of single answers, and what KTO compares their log-ratios with, computed by trainer ranks in the scoring pass.

That is the mean log-ratio of the mini-batch's answers behind prompts that they do not answer, by the policy that the batch begins with. The
prompt is that of the dataset's next row with another one, so that it does not depend on packing, micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hpcrl.algorithms.losses import masked_sum
from hpcrl.config.sections.dpo import DPOConfig
from hpcrl.data.token_file import open_tokens
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.batching import Limits
from hpcrl.trainer.offline.unpaired import by_row
from hpcrl.trainer.packing import MiniBatch, PackedRows
from hpcrl.trainer.scoring.hints import with_hints
from hpcrl.types import Batch, Hint


def fill_labels(
    run: Run,
    batch: Batch,
    minis: Sequence[MiniBatch],
    policy: PolicyEngine,
    dpo: DPOConfig,
    longest: int | None,
    limits: Limits,
    before: Callable[[], None],
) -> None:
    """Fill in which answers are desirable, and what their log-ratios are compared with; all ranks call it.

    Args:
        longest: tokens of a row at most, trainer.max_length.
        limits: of micro-batches.
        before: called before each forward pass.

    Raises:
        DataError: a dataset's file is damaged, all its rows have one prompt, or rows show images, which no other prompt can take over.
    """
    for mini in minis:
        rows, shift = mini.rows, 0.0
        if "kto" in dpo.loss_type:
            rows.hints = [_other_prompt(run, batch, rows, at, longest) for at in range(len(rows.refs))]
            shift = _mismatched_ratio(with_hints(mini, policy.data, limits), policy, before)
        rows.scores.desirable = by_row(rows, [batch.groups[ref.group].samples[ref.index].reward for ref in rows.refs])
        rows.scores.shifts = torch.full_like(rows.scores.desirable, shift)


def _mismatched_ratio(shown: MiniBatch, policy: PolicyEngine, before: Callable[[], None]) -> float:
    """Return the mean over the mini-batch of log π - log π_ref of answers behind other prompts, at least 0 (KTO, section 4.1)."""
    policy_P = shown.scored(policy.logprobs, before)
    reference_P = shown.scored(partial(policy.logprobs, reference=True), before)
    total = masked_sum(policy_P.double() - reference_P.double(), shown.rows.loss_mask)
    ratios, answers = policy.data.sum([total.item(), float(len(shown.rows.refs))])
    return max(0.0, ratios / max(answers, 1.0))


def _other_prompt(run: Run, batch: Batch, rows: PackedRows, at: int, longest: int | None) -> Hint[torch.Tensor]:
    """Return the next prompt of the dataset that is not this row's own, to stand in its place; of a long one its end."""
    group, tokens = batch.groups[rows.refs[at].group], rows.tokens_of(range(at, at + 1))
    assert group.row is not None
    assert longest is not None
    file, begin = open_tokens(run.inside(group.path)), int(rows.loss_mask[tokens].argmax()) + 1
    own, room = rows.token_ids[tokens][:begin].tolist(), max(1, longest - (rows.lengths[at] - begin))
    for number in range(group.row + 1, group.row + len(file)):  # answers to one prompt often lie side by side
        other = file.read(number % len(file))[0]
        if other.tensors or rows.tensors[at]:
            raise DataError(
                'trainer.dpo.loss_type = ["kto"] puts answers behind other prompts, which rows with images do not allow; use "apo_zero_unpaired"'
            )
        prompt = other.token_ids[: max(1, int(other.loss_mask.argmax()))]
        if prompt.tolist() != own:
            return Hint(torch.as_tensor(prompt[-room:]), begin)
    raise DataError(
        f'trainer.dpo.loss_type = ["kto"] puts answers behind other prompts, and all rows of {group.data_source} have one prompt; '
        'add rows to data.train_data, or use "apo_zero_unpaired"'
    )
