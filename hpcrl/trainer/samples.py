"""From the files of a batch's groups to the samples of a rank, packed: what rollout workers generated, and what scorers say of it."""

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
from hpcrl.trainer.batching import Limits, SampleRef, mini_batches, planned, trained_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, PackedSamples, Scores, pack, set_loss_weights
from hpcrl.types import Batch, GroupMeta, Row

_COLUMNS = {
    REFERENCE: {"logprobs": "ref_logprobs"},
    TEACHER: {"logprobs": "teacher_logprobs", "top_ids": "teacher_ids", "top_logprobs": "teacher_top"},
}
"""Role of a scorer -> what it says of a row -> where that is among the scores of packed samples."""


def load_mini_batches(
    run: Run, batch: Batch, trainer: TrainerConfig, limits: Limits, data: World, reduction: Reduction
) -> list[MiniBatch]:
    """Assign each mini-batch of the policy to the ranks, read and pack this rank's samples, and set their loss weights.

    Args:
        data: the ranks that samples are assigned to.

    Raises:
        DataError: a file of samples or scores is missing or damaged, or is no longer the one that the batch was composed of; or scorers failed
            at more samples than trainer.max_unscored_ratio.
    """
    algorithm = trainer.algorithm
    trained, minis, prompts = set(trained_groups(batch, algorithm)), [], trainer.distillation.learns_prompts
    own_tokens = trainer.distillation.self_teacher_model is not None and not trainer.distillation.top_k_from_teacher
    top_ids = trainer.distillation.top_k if own_tokens else 0
    observed = algorithm.observation_nll_coef is not None
    for refs in mini_batches(batch, trainer.policy_mini_batch_size, shared=limits[0].shared):
        plan = planned([ref for ref in refs if ref.group in trained], data.size, limits, pairs=trainer.pairwise)
        samples = load_samples(
            run, batch, plan.shares[data.rank], algorithm.min_filter_prefix_tokens, prompts=prompts, top_ids=top_ids,
            observed=observed, shared=limits[0].shared,
        )  # fmt: skip
        minis.append(MiniBatch(plan, samples, data.rank))
    set_loss_weights(minis, batch, data, reduction)
    unscored, all_samples = sum(mini.unscored for mini in minis), sum(mini.plan.samples for mini in minis)
    if unscored > trainer.max_unscored_ratio * all_samples:
        raise DataError(
            f"scorers failed at {unscored} of the {all_samples} samples of step {batch.step}, more than trainer.max_unscored_ratio = "
            f"{trainer.max_unscored_ratio:g}: their models give trained tokens no finite log-probability, or an engine refuses the rows and names the reason in its scorer's log"
        )
    return minis


def load_samples(
    run: Run,
    batch: Batch,
    refs: Sequence[SampleRef],
    least_prefix: int | None = None,
    *,
    prompts: bool = False,
    top_ids: int = 0,
    observed: bool = False,
    shared: bool = False,
) -> PackedSamples:
    """Read these samples and pack them in the order of `refs`; of a file no more is read than the samples wanted.

    Args:
        least_prefix: tokens of a prefix that is left out of the loss where responses of different reward share it
            (hpcrl/algorithms/prefixes.py), for which whole groups are read; None: all are trained.
        prompts: tokens that the policy did not choose are trained too; their rollout log-probabilities are NaN.
        top_ids: as many of the policy's most probable tokens are to be scored by a teacher, [P, K]; -1 where they are not known.
        observed: what the environment said is learned too.
        shared: as of MicroBatchLimit.

    Raises:
        DataError: a file of samples or scores is missing or damaged, or is no longer the one that the batch was composed of.
    """
    wanted: dict[int, list[int]] = defaultdict(list)
    for ref in refs:
        wanted[ref.group].append(ref.index)
    places = {path: run.inside(path) for path in {batch.groups[group].path for group in wanted}}
    samples: dict[tuple[int, int], Row] = {}
    left_out = 0
    for group, indices in wanted.items():
        meta = batch.groups[group]
        found = read_group(places[meta.path], indices if least_prefix is None else None, meta)
        found = [whole_trained(sample) for sample in found] if prompts else found
        if least_prefix is not None:
            masks = masks_without_prefixes(found, meta, least_prefix)
            left_out += sum(int((found[index].loss_mask - masks[index]).sum()) for index in indices)
            found = [replace(found[index], loss_mask=masks[index]) for index in indices]
        found = [with_model_reward(sample, meta, index) for index, sample in zip(indices, found, strict=True)]
        samples |= {(group, index): sample for index, sample in zip(indices, found, strict=True)}
    scores, unscored = load_scores(run, batch, refs)
    for ref in unscored:
        sample = samples[ref.group, ref.index]
        samples[ref.group, ref.index] = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    packed = pack([samples[ref.group, ref.index] for ref in refs], refs, left_out, batch.step - 1)
    packed.scores, packed.unscored = scores, len(unscored)
    if observed:
        packed.observations = observations([samples[ref.group, ref.index] for ref in refs])
    if shared:
        packed.share_prefixes()
    if top_ids:
        packed.scores.teacher_ids = joined_top_ids([samples[ref.group, ref.index] for ref in refs], top_ids)
    return packed


def joined_top_ids(samples: Sequence[Row], count: int) -> torch.Tensor:
    """Return the policy's `count` most probable tokens in the place of each token, laid out as `pack` lays samples out, [P, K] int32."""
    parts = [np.zeros((0, count), np.int32)]
    for sample in samples:
        ids_TK = np.full((len(sample.token_ids), count), -1, np.int32)
        if sample.top_ids is not None and sample.top_ids.shape[1] >= count:
            ids_TK[:-1] = sample.top_ids[1:, :count]
        parts.append(ids_TK)
    return torch.from_numpy(np.concatenate(parts))


def observations(samples: Sequence[Row]) -> torch.Tensor:
    """Return 1 in the place of each token of the environment, laid out and shifted as `pack` does, [P] float32.

    Those are the tokens that no policy chose after the first one that it did, what the chat template puts between turns included. A
    sample of which nothing is trained has none.
    """
    parts = [np.zeros(0, np.float32)]
    for sample in samples:
        chosen_T = sample.versions >= 0
        observed_T = (chosen_T.cumsum(0) > 0) & ~chosen_T & (sample.loss_mask > 0).any()
        parts += [observed_T[1:], np.zeros(1)]
    return torch.from_numpy(np.concatenate(parts, dtype=np.float32))


def load_scores(run: Run, batch: Batch, refs: Sequence[SampleRef]) -> tuple[Scores, list[SampleRef]]:
    """Return what scorers say of the tokens of these samples, laid out as `pack` lays them out, and the samples at which one of them failed.

    Raises:
        DataError: a file is missing or damaged, or is about other samples.
    """
    found: dict[tuple[int, str], list[RowScores]] = {}
    for at in sorted({ref.group for ref in refs}):
        for name in (name for name in batch.groups[at].scores if role_of(name) in _COLUMNS):
            found[at, role_of(name)] = read_scores(run, name, batch.groups[at])
    columns, failed = dict[str, torch.Tensor](), set[SampleRef]()
    for role in {role for _, role in found}:
        rows = [found[ref.group, role][ref.index] for ref in refs]
        failed |= {ref for ref, row in zip(refs, rows, strict=True) if np.isnan(row.logprobs).any()}
        for name, column in _COLUMNS[role].items():
            parts = [part for row in rows if (part := getattr(row, name)) is not None]
            if parts:
                columns[column] = torch.from_numpy(np.concatenate(parts)).nan_to_num_(0.0)
    failed |= {ref for ref in refs if None in of_owner(batch.groups[ref.group], ref.index)}
    return Scores(**columns), [ref for ref in refs if ref in failed]


def of_owner(group: GroupMeta, row: int) -> list[float | None]:
    """Return what a reward model adds to the reward of the sample that a row is of, None where it failed; empty: there is none."""
    return [group.model_rewards[group.owners[row]]] if group.model_rewards else []


def with_model_reward(sample: Row, group: GroupMeta, row: int) -> Row:
    """Return a row with what a reward model has added to the reward of its sample when the group was finished, at the sample's last token."""
    if not group.model_rewards or (owners := group.owners)[row] in owners[row + 1 :]:
        return sample
    rewards_T = sample.rewards.copy()
    rewards_T[-1] += group.rewards[owners[row]] - rewards_T.sum()
    return replace(sample, rewards=rewards_T)


def whole_trained(sample: Row) -> Row:
    """Return a sample with all its tokens trained but the first, which nothing predicts; one of which nothing is trained stays so."""
    if not sample.loss_mask.any():
        return sample
    mask_T = np.ones_like(sample.loss_mask)
    mask_T[0] = 0
    unknown_T = np.where(sample.versions < 0, np.float32(np.nan), sample.rollout_logprobs)
    return replace(sample, loss_mask=mask_T, rollout_logprobs=unknown_T)


def masks_without_prefixes(samples: Sequence[Row], group: GroupMeta, least: int) -> list[np.ndarray]:
    """Return the loss mask [T] of each sample of a group, without the prefix that it shares with a response of different reward.

    A response begins with the first token that the policy chose. What comes back to the policy between its turns belongs to it. A sample
    without a reward differs from none.

    Args:
        least: tokens that a prefix must have.
    """
    masks = [sample.loss_mask.copy() for sample in samples]
    scored = [at for at, one in enumerate(group.scored) if one]
    samples, rewards = [samples[at] for at in scored], group.own_rewards
    chosen = [sample.versions >= 0 for sample in samples]
    starts = [int(chosen_T.argmax()) if chosen_T.any() else len(chosen_T) for chosen_T in chosen]
    responses = [sample.token_ids[start:].tolist() for sample, start in zip(samples, starts, strict=True)]
    for at, start, size in zip(scored, starts, shared_prefixes(responses, rewards, least), strict=True):
        masks[at][start : start + size] = 0
    return masks
