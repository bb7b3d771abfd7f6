"""Advantages of a batch: KL penalties are subtracted from rewards, and an estimator makes advantages of the rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch

from hpcrl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    is_per_token,
    is_per_turn,
    lambda_returns,
)
from hpcrl.algorithms.distillation import contrastive_advantages, drift_weights, modulations, teacher_advantages
from hpcrl.algorithms.filters import named_rewards
from hpcrl.algorithms.kl import KL_ESTIMATORS, adapted, k1
from hpcrl.algorithms.settings import configured
from hpcrl.algorithms.whitening import normalize
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.errors import ConfigError, DataError
from hpcrl.trainer.batching import trained_groups
from hpcrl.trainer.entries import Sum, entries_of
from hpcrl.trainer.packing import PackedRows
from hpcrl.types import Batch, GroupMeta

_COEFFICIENT, _START = "kl_coef", "kl_coef_start"


@dataclass(frozen=True)
class Advantages:
    """Metrics of the advantages of all ranks.

    Attributes:
        mean, mean_abs: over all trained tokens, as the estimator gave them: before advantage_batch_normalize and clipping.
        penalties: KL penalties of all samples together.
    """

    mean: float = 0.0
    mean_abs: float = 0.0
    penalties: float = 0.0


class KlRewardPenalty:
    """KL penalty on rewards: the divergence from the reference is subtracted from each token's reward (trainer.algorithm.use_kl_in_reward).

    Args:
        extra_state: numbers of the checkpoint that training continues from. Another kl_loss_coef than its run had starts afresh.

    Attributes:
        coefficient: reward subtracted per nat of divergence, which the adaptive controller changes after each batch.
    """

    def __init__(self, algorithm: AlgorithmConfig, extra_state: dict[str, float]) -> None:
        self._algorithm = algorithm
        self._adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
        self.coefficient = algorithm.kl_loss_coef
        if self._adaptive and extra_state.get(_START) == algorithm.kl_loss_coef:
            self.coefficient = extra_state[_COEFFICIENT]

    def extra_state(self) -> dict[str, float]:
        """Return the state that a checkpoint saves."""
        if not self._adaptive:
            return {}
        return {_COEFFICIENT: self.coefficient, _START: self._algorithm.kl_loss_coef}

    def apply_kl_penalty(self, minis: Sequence[PackedRows], over_ranks: Sum) -> dict[str, float]:
        """Fill in the penalties of this rank's samples, adapt the coefficient, and return loss/*; nothing if it is off.

        Every rank calls it, with samples that have old (or rollout) and reference log-probabilities.

        Returns:
            avg_kl: mean over samples of the mean over their trained tokens, in nats; avg_kl_max: mean over samples of the
            largest absolute value; kl_loss_coef: the coefficient that was applied.
        """
        if not self._algorithm.use_kl_in_reward:
            return {}
        mean = largest = 0.0
        for samples in minis:
            divergence_P = self._divergence(samples)
            samples.scores.penalties = self.coefficient * divergence_P
            for divergence_T, trained in zip(divergence_P.split(samples.lengths), samples.trained, strict=True):
                mean += divergence_T.sum().item() / max(trained, 1)
                largest += divergence_T.abs().max().item()
        mean, largest, count = over_ranks([mean, largest, float(sum(len(samples.lengths) for samples in minis))])
        applied, samples_or_one = self.coefficient, max(count, 1.0)
        self.adapt(mean / samples_or_one, count)
        return {
            "loss/avg_kl": mean / samples_or_one,
            "loss/avg_kl_max": largest / samples_or_one,
            "loss/kl_loss_coef": applied,
        }

    def adapt(self, divergence: float, samples: float) -> None:
        """Change the coefficient after a batch, if it is adaptive; arguments as in `adapted`."""
        if self._adaptive:
            control = self._algorithm.kl_ctrl
            self.coefficient = adapted(self.coefficient, divergence, samples, control.kl_target, control.horizon)

    def _divergence(self, samples: PackedRows) -> torch.Tensor:
        """Return [P] float64; 0 where nothing is trained."""
        if not samples.lengths:
            return torch.zeros(0, dtype=torch.float64)
        scores = samples.scores
        old_P = samples.rollout_logprobs if self._algorithm.use_rollout_logprobs_for_loss else scores.old_logprobs
        assert old_P is not None
        assert scores.ref_logprobs is not None
        estimate = KL_ESTIMATORS[self._algorithm.kl_estimator_type]
        return torch.where(samples.loss_mask > 0, estimate(old_P, scores.ref_logprobs, 1.0).double(), 0.0)


def estimate_advantages(
    batch: Batch,
    minis: Sequence[PackedRows],
    algorithm: AlgorithmConfig,
    over_ranks: Sum,
    carried: dict[str, float] | None = None,
) -> Advantages:
    """Fill in the advantages of this rank's samples, and the returns of a critic where they have values.

    Every rank calls it. An estimator with one number per sample gets every sample of the batch from the batch's metadata, the same on
    every rank. One that needs tokens gets this rank's, and sums over ranks. With generator.step_wise_trajectories, where the turns of a
    response are samples, a response counts once: with the outcome as its reward, less the penalties of all its turns. Each of them then
    gets what the response is worth. Where the policy has roles in a sample, or the estimator compares turns, entries are turns.

    Args:
        minis: this rank's samples; together, ranks have those of all trained groups.
        carried: as of AdvantageInputs; None: the estimator begins with none.

    Raises:
        ConfigError: a user's own estimator cannot be found, or the estimator needs all tokens of a response in one sample.
        DataError: a group lacks a greedy response that it is to be compared with, or a metric of filter_reward_metric or gdpo.rewards.
    """
    estimator = build_estimator(algorithm)

    def total(sums: torch.Tensor) -> torch.Tensor:
        return sums.new_tensor(over_ranks(sums.tolist()))

    inputs = _by_token(minis, total, _longest(batch, minis, over_ranks) if algorithm.needs_norms else None)
    mask_P, sizes = inputs.mask_P, [len(samples.token_ids) for samples in minis]
    if is_per_token(estimator.func):
        _require_one_row(batch)
        raw_P = estimator(inputs)
    else:
        raw_P = _by_entries(batch, minis, estimator, algorithm, over_ranks, {} if carried is None else carried)
    if inputs.values_P is not None:
        lambd = algorithm.lambd if algorithm.critic_lambd is None else algorithm.critic_lambd
        returns_P = lambda_returns(inputs, inputs.values_P, algorithm.gamma, lambd)
        for samples, own_P in zip(minis, returns_P.float().split(sizes), strict=True):
            samples.scores.returns = own_P
    assert raw_P.shape == mask_P.shape, (
        f"{algorithm.advantage_estimator}: {tuple(raw_P.shape)} for {len(mask_P)} tokens"
    )
    raw_P = torch.where(mask_P > 0, raw_P.double(), 0.0)
    penalties = sum(values.sum().item() for samples in minis if (values := samples.scores.penalties) is not None)
    summed, summed_abs, count, penalties = over_ranks(
        [raw_P.sum().item(), raw_P.abs().sum().item(), mask_P.sum().item(), penalties]
    )
    advantages_P = normalize(raw_P, mask_P, total) if algorithm.advantage_batch_normalize else raw_P
    low, high = algorithm.advantage_clip_low, algorithm.advantage_clip_high
    if low is not None or high is not None:
        advantages_P = advantages_P.clamp(low, high)
    for samples, own_P in zip(minis, advantages_P.float().split(sizes), strict=True):
        samples.scores.advantages = own_P
    count = max(count, 1.0)
    return Advantages(summed / count, summed_abs / count, penalties)


def carried_numbers(algorithm: AlgorithmConfig, extra_state: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that the advantage estimator has kept, of what a checkpoint saved; those of another estimator are none of its own."""
    prefix = _prefix(algorithm)
    return {name.removeprefix(prefix): value for name, value in extra_state.items() if name.startswith(prefix)}


def named_numbers(algorithm: AlgorithmConfig, carried: Mapping[str, float]) -> dict[str, float]:
    """Return the same as a checkpoint saves them."""
    return {_prefix(algorithm) + name: value for name, value in carried.items()}


def _prefix(algorithm: AlgorithmConfig) -> str:
    return f"{algorithm.advantage_estimator}/"


def no_advantages(minis: Sequence[PackedRows]) -> Advantages:
    """Set every advantage to 0."""
    for samples in minis:
        samples.scores.advantages = torch.zeros_like(samples.loss_mask)
    return Advantages()


def subtract_divergence(
    minis: Sequence[PackedRows], distillation: DistillationConfig, algorithm: AlgorithmConfig, over_ranks: Sum
) -> dict[str, float]:
    """Subtract the divergence from the teacher from the advantages of this rank's samples, and return distillation/*.

    Every rank calls it, with samples that have advantages, and old (or rollout) and the teacher's log-probabilities. A contrast of hints,
    where there is one, modulates the advantages instead.

    Returns:
        reverse_kl: mean over trained tokens of the log-probability of the policy less that of the teacher, in nats; penalty: mean over
        trained tokens of what was subtracted. modulated: share of trained tokens that a contrast of hints modulates.
    """
    divergence = penalty = tokens = modulated = 0.0
    for samples in minis:
        if not samples.lengths:
            continue
        scores, mask_P = samples.scores, samples.loss_mask
        policy_P = samples.rollout_logprobs if algorithm.use_rollout_logprobs_for_loss else scores.old_logprobs
        assert policy_P is not None
        assert scores.teacher_logprobs is not None
        assert scores.advantages is not None
        divergence_P = k1(policy_P, scores.teacher_logprobs)
        before_P, lengths_B = scores.advantages, torch.tensor(samples.lengths)
        if scores.contrasts is not None:
            contrast = distillation.self_teacher.contrast
            added_P = modulations(
                scores.contrasts, mask_P, scale=contrast.scale, width=contrast.width, threshold=contrast.threshold
            )  # fmt: skip
            scores.advantages = contrastive_advantages(before_P, added_P, mask_P, lengths_B, weight=contrast.weight)
            modulated += (added_P != 0).sum().item()
        elif not distillation.top_k:  # a divergence over several tokens is part of the loss
            weighted_P = divergence_P * drift_weights(divergence_P, mask_P, lengths_B, distillation.iw_opd_gamma)
            scores.advantages = teacher_advantages(
                before_P, weighted_P, mask_P, samples.lengths,
                kl_penalty_coef=distillation.kl_penalty_coef, kl_discount_factor=distillation.kl_discount_factor,
            )  # fmt: skip
        divergence += torch.where(mask_P > 0, divergence_P, 0.0).sum().item()
        penalty += (before_P - scores.advantages).sum().item()
        tokens += mask_P.sum().item()
    divergence, penalty, modulated, tokens = over_ranks([divergence, penalty, modulated, tokens])
    found = {"reverse_kl": divergence, "penalty": penalty}
    if distillation.self_teacher.wrong_hints:
        found["modulated"] = modulated
    return {f"distillation/{name}": total / max(tokens, 1.0) for name, total in found.items()}


def build_estimator(algorithm: AlgorithmConfig) -> partial[torch.Tensor]:
    """Return the advantage estimator of the configuration with its settings."""
    return configured("advantage_estimator", algorithm.advantage_estimator, ESTIMATORS, algorithm)


def _require_one_row(batch: Batch) -> None:
    if any(group.roles for group in batch.groups):
        raise ConfigError(
            "this environment has several roles in a sample, and estimators that are marked per_token, such as gae, follow rewards from "
            "token to token through all of them. Choose an advantage_estimator such as grpo or rae"
        )
    if any(len(sample.lengths) != 1 for group in batch.groups for sample in group.samples):
        raise ConfigError(
            "generator.step_wise_trajectories or enable_http_endpoint: estimators that are marked per_token, such as gae, "
            "follow rewards from token to token, and a sample has several rows. Choose an advantage_estimator such as grpo or rloo"
        )


def _longest(batch: Batch, minis: Sequence[PackedRows], over_ranks: Sum) -> list[int]:
    """Return of each group the most trained tokens that one of its rows has, on any rank."""
    rows = [sum(len(sample.lengths) for sample in group.samples) for group in batch.groups]
    firsts = [0, *accumulate(rows)]
    trained = [0.0] * firsts[-1]
    for samples in minis:
        for ref, tokens in zip(samples.refs, samples.trained, strict=True):
            trained[firsts[ref.group] + ref.index] = float(tokens)
    trained = over_ranks(trained)
    return [round(max(trained[start:end], default=0.0)) for start, end in pairwise(firsts)]


def _of_tokens(minis: Sequence[PackedRows], name: str) -> torch.Tensor | None:
    """Return a column of scores of all samples, [P] float64; None where none has it."""
    found = [getattr(samples.scores, name) for samples in minis if samples.lengths]
    present = [values_P.double() for values_P in found if values_P is not None]
    assert len(present) in (0, len(found)), f"some samples have {name}, others not"
    # a rank without samples has none either, whether others have or not
    return _joined(present) if len(present) == len(found) else None


def _by_token(
    minis: Sequence[PackedRows], total: Callable[[torch.Tensor], torch.Tensor], longest: Sequence[int] | None
) -> AdvantageInputs:
    groups = [ref.group for samples in minis for ref in samples.refs]
    return AdvantageInputs(
        rewards_P=_joined([_rewards(samples) for samples in minis]),
        mask_P=_joined([samples.loss_mask.double() for samples in minis]),
        lengths=[length for samples in minis for length in samples.lengths],
        groups_B=torch.tensor(groups, dtype=torch.int64),
        values_P=_of_tokens(minis, "values"),
        norms_P=None if longest is None else _of_tokens(minis, "squared_norms"),
        longest=longest,
        total=total,
    )


def _rewards(samples: PackedRows) -> torch.Tensor:
    rewards_P, penalties_P = samples.rewards.double(), samples.scores.penalties
    return rewards_P if penalties_P is None else rewards_P - penalties_P


def _by_entries(
    batch: Batch,
    minis: Sequence[PackedRows],
    estimator: partial[torch.Tensor],
    algorithm: AlgorithmConfig,
    over_ranks: Sum,
    carried: dict[str, float],
) -> torch.Tensor:
    """Return the advantage of each token of this rank's samples, by those of samples or turns of all ranks, [P]."""
    groups = trained_groups(batch, algorithm)
    by_role = any(batch.groups[at].roles for at in groups)
    if by_role:
        (critics,) = over_ranks([float(any(samples.scores.values is not None for samples in minis))])
        _check_roles(algorithm, critic=critics > 0)
    entries = entries_of(batch, groups, turns=by_role or is_per_turn(estimator.func))
    tokens_P, penalties_P = entries.sums(minis, over_ranks)
    places = [(batch.groups[at], index) for at, index in entries.places]
    earned_P = torch.tensor(entries.rewards, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards_P=earned_P - penalties_P,
        mask_P=tokens_P,
        lengths=entries.lengths,
        groups_B=torch.tensor(entries.groups, dtype=torch.int64),
        scored_B=torch.tensor([group.scored[index] for group, index in places], dtype=torch.float64),
        baselines_B=_baselines(places, algorithm) if algorithm.needs_baselines else None,
        named_B=_named_rewards(places, algorithm),
        anchors_P=torch.tensor(entries.anchors, dtype=torch.int64),
        earned_P=earned_P,
        kinds_B=[
            f"{group.data_source}/{role}" if role else group.data_source
            for (group, _), role in zip(places, entries.roles, strict=True)
        ],
        carried=carried,
    )
    advantages_P = estimator(inputs)
    return _joined([advantages_P[entries.of_tokens(samples)] for samples in minis])


def _check_roles(algorithm: AlgorithmConfig, *, critic: bool) -> None:
    """Refuse what knows one reward of a sample, where the policy has roles in it."""
    refused = {
        "trainer.algorithm.advantage_estimator=remax": algorithm.needs_baselines,
        "trainer.algorithm.positive_nll_coef": algorithm.positive_nll_coef is not None,
        "trainer.critic.model.path": critic,
    }
    for name, found in refused.items():
        if found:
            raise ConfigError(
                f"{name} needs one reward of a sample, and this environment has several roles, each with rewards of its own. "
                "Unset it, or choose an advantage_estimator such as grpo or rae"
            )


def _baselines(places: Sequence[tuple[GroupMeta, int]], algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return the reward of the greedy response to each sample's prompt, [B]."""
    for group, _ in places:
        if group.baseline is None:
            raise DataError(
                f"group {group.group_id} was generated without a greedy response, which "
                f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} compares with; resume the run, and the "
                "group is generated again"
            )
    return torch.tensor([group.baseline for group, _ in places], dtype=torch.float64)


def _named_rewards(
    places: Sequence[tuple[GroupMeta, int]], algorithm: AlgorithmConfig
) -> dict[str, torch.Tensor] | None:
    """Return the named rewards of each sample; each role in a sample has those of the sample."""
    found = dict[str, torch.Tensor]()
    for name in algorithm.gdpo.rewards:
        of_groups = {group.group_id: named_rewards(group, name) for group, _ in places}
        values = [of_groups[group.group_id][index] for group, index in places]
        found[name] = torch.tensor(values, dtype=torch.float64)
    return found or None


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
