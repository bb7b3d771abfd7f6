"""Scores of a teacher with another tokenizer: it reads the texts of rows in its own tokens, and its log-probabilities go to the policy's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from hpcrl.algorithms.distillation import spread_over_spans
from hpcrl.data.alignment import TokenAligner
from hpcrl.errors import DataError
from hpcrl.trainer.batching import Limits, RowRef, plan_shares
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import Before, MicroBatchStream, PackedRows, pack
from hpcrl.types import Row

log = logging.getLogger(__name__)

Passes = Callable[[MicroBatchStream], Iterable[tuple[torch.Tensor, ...]]]
Spans = tuple[torch.Tensor, torch.Tensor]


def outputs(parts: Sequence[range], passes: Iterable[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Return a model's outputs for all samples of this rank, on the CPU; empty where it has no samples."""
    found = [of_batch for part, of_batch in zip(parts, passes, strict=True) if part]  # an idle pass is of no sample
    return [torch.cat(column).cpu() for column in zip(*found, strict=True)]


def aligned_scores(
    passes: Passes, aligner: TokenAligner, samples: PackedRows, limits: Limits, data: World, before: Before
) -> list[torch.Tensor]:
    """Return the teacher's log-probabilities of the policy's tokens, one column [P]; none where this rank has no samples.

    Every rank calls it. A row whose text cannot be aligned has NaN, by which its sample counts as failed.

    Args:
        passes: the teacher's forward passes.
        limits: of micro-batches, which are cut again, as rows have other lengths in the teacher's tokens.
        data: the ranks that samples were assigned to; samples stay where they are.
        before: called before each forward pass, and whenever a row is aligned.
    """
    rows = list[tuple[Row, Spans | None]]()

    def own() -> list[list[int]]:
        for at in range(len(samples.refs)):
            rows.append(_aligned(aligner, samples, at))
            before()
        return [[ref.group, ref.index, len(row.token_ids)] for ref, (row, _) in zip(samples.refs, rows, strict=True)]

    plan = plan_shares([[RowRef(*ref) for ref in share] for share in data.all_gather(own)], limits)
    refs, places = plan.shares[data.rank], {(ref.group, ref.index): at for at, ref in enumerate(samples.refs)}
    order = [places[ref.group, ref.index] for ref in refs]
    shown = pack([rows[at][0] for at in order], refs)
    if limits[0].shared:
        shown.share_prefixes()
    stream = MicroBatchStream(shown, plan.score[data.rank], before)
    columns, found_P = outputs(stream.parts, passes(stream)), torch.full_like(samples.rollout_logprobs, torch.nan)
    if not columns:
        return []
    for number, at in enumerate(order):
        spans = rows[at][1]
        if spans is not None:
            tokens, teacher_U = (
                samples.tokens_of(range(at, at + 1)),
                columns[0][shown.tokens_of(range(number, number + 1))],
            )
            found_P[tokens] = spread_over_spans(samples.rollout_logprobs[tokens], teacher_U, *spans)
    return [found_P]


def in_teacher_tokens(aligner: TokenAligner, token_ids: np.ndarray, mask_T: np.ndarray) -> tuple[Row, Spans]:
    """Return a row of T tokens in the teacher's U tokens, and the spans that `spread_over_spans` takes.

    Args:
        token_ids, mask_T: [T] of the policy's tokens; the mask is above 0 where they are trained.

    Returns:
        The row, whose loss mask has the tokens of spans. Spans are [T] and [U], shifted as packing shifts: entry t is of token t + 1.

    Raises:
        DataError: the teacher's tokens write another text.
    """
    found = aligner.align(token_ids.tolist(), mask_T.tolist())
    spans = torch.from_numpy(found.spans_T).roll(-1), torch.from_numpy(found.spans_U).roll(-1)
    return _row(found.token_ids, (found.spans_U >= 0).astype(np.float32)), spans


def _aligned(aligner: TokenAligner, samples: PackedRows, at: int) -> tuple[Row, Spans | None]:
    """Return a packed row in the teacher's tokens, and its spans; None: it cannot be aligned."""
    tokens = samples.tokens_of(range(at, at + 1))
    mask_T = samples.loss_mask[tokens].roll(1)
    try:
        return in_teacher_tokens(aligner, samples.token_ids[tokens].numpy(), mask_T.numpy())
    except DataError as error:
        log.warning("a row of %d tokens has no scores: %s", len(mask_T), error)
        return _row(np.zeros(1, np.int64), np.zeros(1, np.float32)), None


def _row(token_ids: np.ndarray, loss_mask: np.ndarray) -> Row:
    zeros = np.zeros_like(loss_mask)
    return Row(token_ids, loss_mask, zeros, zeros.astype(np.int32), zeros, stop_reason="stop")
