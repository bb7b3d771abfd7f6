"""Reads the files of a batch's groups, and packs a rank's rows with the scores of scorers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hpcrl.algorithms.prefixes import shared_prefixes
from hpcrl.algorithms.reductions import Reduction
from hpcrl.config.scorers import REFERENCE, TEACHER, role_of
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.group_file import read_group
from hpcrl.data.score_file import RowScores, read_scores
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.batching import Limits, RowRef, mini_batches, planned, trained_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, PackedRows, Scores, pack, set_loss_weights
from hpcrl.types import Batch, GroupMeta, Row

_COLUMNS = {
    REFERENCE: {"logprobs": "ref_logprobs"},
    TEACHER: {"logprobs": "teacher_logprobs", "top_ids": "teacher_ids", "top_logprobs": "teacher_top"},
}
"""Role of a scorer -> its columns -> the field of Scores that they fill."""


def load_mini_batches(
    run: Run, batch: Batch, trainer: TrainerConfig, limits: Limits, data: World, reduction: Reduction
) -> list[MiniBatch]:
    """Assign each mini-batch of the policy to the ranks, read and pack this rank's rows, and set their loss weights.

    Args:
        data: the ranks that rows are assigned to.

    Raises:
        DataError: a file of rows or scores is missing or damaged, or is no longer the one that the batch was composed of; or scorers failed
            at more rows than trainer.max_unscored_ratio.
    """
    algorithm = trainer.algorithm
    trained, minis, prompts = set(trained_groups(batch, algorithm)), [], trainer.distillation.learns_prompts
    own_tokens = trainer.distillation.self_teacher_model is not None and not trainer.distillation.top_k_from_teacher
    top_ids = trainer.distillation.top_k if own_tokens else 0
    observed = algorithm.observation_nll_coef is not None
    for refs in mini_batches(batch, trainer.policy_mini_batch_size, shared=limits[0].shared):
        plan = planned([ref for ref in refs if ref.group in trained], data.size, limits, pairs=trainer.pairwise)
        rows = load_rows(
            run, batch, plan.shares[data.rank], algorithm.min_filter_prefix_tokens, prompts=prompts, top_ids=top_ids,
            observed=observed, shared=limits[0].shared,
        )  # fmt: skip
        minis.append(MiniBatch(plan, rows, data.rank))
    set_loss_weights(minis, batch, data, reduction)
    unscored, all_rows = sum(mini.unscored for mini in minis), sum(mini.plan.rows for mini in minis)
    if unscored > trainer.max_unscored_ratio * all_rows:
        raise DataError(
            f"scorers failed at {unscored} of the {all_rows} rows of step {batch.step}, more than trainer.max_unscored_ratio = "
            f"{trainer.max_unscored_ratio:g}. Their models give trained tokens no finite log-probability, "
            "or an engine refuses the rows and names the reason in its scorer's log"
        )
    return minis


def load_rows(
    run: Run,
    batch: Batch,
    refs: Sequence[RowRef],
    least_prefix: int | None = None,
    *,
    prompts: bool = False,
    top_ids: int = 0,
    observed: bool = False,
    shared: bool = False,
) -> PackedRows:
    """Read these rows and pack them in the order of `refs`; of a file no more is read than the rows wanted.

    Args:
        least_prefix: tokens of a prefix that is left out of the loss where responses of different reward share it
            (hpcrl/algorithms/prefixes.py), for which whole groups are read; None: all are trained.
        prompts: tokens that the policy did not choose are trained too; their rollout log-probabilities are NaN.
        top_ids: as many of the policy's most probable tokens are to be scored by a teacher, [P, K]; -1 where they are not known.
        observed: observations are learned too.
        shared: as of MicroBatchLimit.

    Raises:
        DataError: a file of rows or scores is missing or damaged, or is no longer the one that the batch was composed of.
    """
    wanted: dict[int, list[int]] = defaultdict(list)
    for ref in refs:
        wanted[ref.group].append(ref.index)
    places = {path: run.inside(path) for path in {batch.groups[group].path for group in wanted}}
    rows: dict[tuple[int, int], Row] = {}
    left_out = 0
    for group, indices in wanted.items():
        meta = batch.groups[group]
        found = read_group(places[meta.path], indices if least_prefix is None else None, meta)
        found = [whole_trained(row) for row in found] if prompts else found
        if least_prefix is not None:
            masks = masks_without_prefixes(found, meta, least_prefix)
            left_out += sum(int((found[index].loss_mask - masks[index]).sum()) for index in indices)
            found = [replace(found[index], loss_mask=masks[index]) for index in indices]
        found = [with_model_reward(row, meta, index) for index, row in zip(indices, found, strict=True)]
        rows |= {(group, index): row for index, row in zip(indices, found, strict=True)}
    scores, unscored = load_scores(run, batch, refs)
    for ref in unscored:
        row = rows[ref.group, ref.index]
        rows[ref.group, ref.index] = replace(row, loss_mask=np.zeros_like(row.loss_mask))
    packed = pack([rows[ref.group, ref.index] for ref in refs], refs, left_out, batch.step - 1)
    packed.scores, packed.unscored = scores, len(unscored)
    if observed:
        packed.observations = observations([rows[ref.group, ref.index] for ref in refs])
    if shared:
        packed.share_prefixes()
    if top_ids:
        packed.scores.teacher_ids = joined_top_ids([rows[ref.group, ref.index] for ref in refs], top_ids)
    return packed


def joined_top_ids(rows: Sequence[Row], count: int) -> torch.Tensor:
    """Return the policy's `count` most probable tokens in the place of each token, laid out as `pack` lays rows out, [P, K] int32."""
    parts = [np.zeros((0, count), np.int32)]
    for row in rows:
        ids_TK = np.full((len(row.token_ids), count), -1, np.int32)
        if row.top_ids is not None and row.top_ids.shape[1] >= count:
            ids_TK[:-1] = row.top_ids[1:, :count]
        parts.append(ids_TK)
    return torch.from_numpy(np.concatenate(parts))


def observations(rows: Sequence[Row]) -> torch.Tensor:
    """Return 1 in the place of each token of the environment, laid out and shifted as `pack` does, [P] float32.

    Those are the tokens that no policy chose after the first one that it did, what the chat template puts between turns included. A
    row of which nothing is trained has none.
    """
    parts = [np.zeros(0, np.float32)]
    for row in rows:
        chosen_T = row.versions >= 0
        observed_T = (chosen_T.cumsum(0) > 0) & ~chosen_T & (row.loss_mask > 0).any()
        parts += [observed_T[1:], np.zeros(1)]
    return torch.from_numpy(np.concatenate(parts, dtype=np.float32))


def load_scores(run: Run, batch: Batch, refs: Sequence[RowRef]) -> tuple[Scores, list[RowRef]]:
    """Return the scores of these rows, laid out as `pack` lays them out, and the rows at which a scorer failed."""
    found: dict[tuple[int, str], list[RowScores]] = {}
    for at in sorted({ref.group for ref in refs}):
        for name in (name for name in batch.groups[at].scores if role_of(name) in _COLUMNS):
            found[at, role_of(name)] = read_scores(run, name, batch.groups[at])
    columns, failed = dict[str, torch.Tensor](), set[RowRef]()
    for role in {role for _, role in found}:
        rows = [found[ref.group, role][ref.index] for ref in refs]
        failed |= {ref for ref, row in zip(refs, rows, strict=True) if np.isnan(row.logprobs).any()}
        for name, column in _COLUMNS[role].items():
            parts = [part for row in rows if (part := getattr(row, name)) is not None]
            if parts:
                columns[column] = torch.from_numpy(np.concatenate(parts)).nan_to_num_(0.0)
    failed |= {ref for ref in refs if lacks_model_reward(batch.groups[ref.group], ref.index)}
    return Scores(**columns), [ref for ref in refs if ref in failed]


def lacks_model_reward(group: GroupMeta, at: int) -> bool:
    """Return whether a reward model failed at the sample that row `at` of the group is of."""
    return group.judged and group.samples[group.owners[at]].model_reward is None


def with_model_reward(row: Row, group: GroupMeta, at: int) -> Row:
    """Return row `at` of a group; the last row of a sample has, at its last token, the reward that a reward model added to the sample's."""
    if not group.judged or (owners := group.owners)[at] in owners[at + 1 :]:
        return row
    rewards_T = row.rewards.copy()
    rewards_T[-1] += group.samples[owners[at]].reward - rewards_T.sum()
    return replace(row, rewards=rewards_T)


def whole_trained(row: Row) -> Row:
    """Return a row with all its tokens trained but the first, which nothing predicts; one of which nothing is trained stays so."""
    if not row.loss_mask.any():
        return row
    mask_T = np.ones_like(row.loss_mask)
    mask_T[0] = 0
    unknown_T = np.where(row.versions < 0, np.float32(np.nan), row.rollout_logprobs)
    return replace(row, loss_mask=mask_T, rollout_logprobs=unknown_T)


def masks_without_prefixes(rows: Sequence[Row], group: GroupMeta, least: int) -> list[np.ndarray]:
    """Return the loss mask [T] of each row of a group, without the prefix that it shares with a response of different reward.

    A response begins with the first token that the policy chose. What comes back to the policy between its turns belongs to it. A row
    without a reward differs from none.

    Args:
        least: tokens that a prefix must have.
    """
    masks = [row.loss_mask.copy() for row in rows]
    scored = [at for at, one in enumerate(group.scored) if one]
    rows, rewards = [rows[at] for at in scored], [group.samples[at].reward for at in scored]
    chosen = [row.versions >= 0 for row in rows]
    starts = [int(chosen_T.argmax()) if chosen_T.any() else len(chosen_T) for chosen_T in chosen]
    responses = [row.token_ids[start:].tolist() for row, start in zip(rows, starts, strict=True)]
    for at, start, size in zip(scored, starts, shared_prefixes(responses, rewards, least), strict=True):
        masks[at][start : start + size] = 0
    return masks
