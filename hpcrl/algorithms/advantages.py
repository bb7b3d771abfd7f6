"""How rewards become advantages.

An estimator sees samples laid end to end, as `AdvantageInputs`, and returns one number per entry. Its other parameters are its settings
(hpcrl/algorithms/settings.py). A user's own has the same signature. `ESTIMATORS` gives them names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import comb
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from hpcrl.algorithms.token_baseline import token_baselines
from hpcrl.algorithms.whitening import all_here, whiten
from hpcrl.config.setting import NotNegative, Several, Share

_EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageInputs:
    """Results of samples that are laid end to end, B of them with P entries in all.

    An entry is a token for estimators that are marked `per_token`; these see the samples of one rank. The others see every sample
    of the batch. For those that are marked `per_turn` an entry is a turn, for the others the whole sample; it stands for all of its tokens.
    A sample in which the policy has roles is one for each role here, with the turns of that role, and its group is of the same role.

    Attributes:
        rewards_P: [P] float64. A sample's reward is the sum over its entries.
        mask_P: [P] float64, trained tokens that the entry stands for: 0 or 1 for a token.
        lengths: entries of each sample; they sum to P.
        groups_B: [B] int64, the number of each sample's group.
        values_P: [P] float64, what a critic expected before each token; None without one.
        baselines_B: [B] float64, the reward of the greedy response to each sample's prompt; None without these.
        named_B: [B] float64 each, the rewards that trainer.algorithm.gdpo.rewards names, unweighted; None without these, and for estimators
            that are marked `per_token`.
        scored_B: [B] float64, 1 for a sample with a reward of its own, 0 for a failed one. A failed one's reward is the mean of the others
            in its group, and it counts in no statistic. None: all have one.
        anchors_P: [P] int64, the number of the state in which each turn was taken; other groups have other numbers. None without turns.
        earned_P: [P] float64, the rewards before use_kl_in_reward subtracted its penalties; None where entries are tokens.
        kinds_B: each sample's data source, and its role behind a slash where it has one; empty where entries are tokens.
        norms_P: [P] float64, the squared norm of the gradient of each token's log-probability over the logits; None but for
            optimal_token_baseline.
        longest: of each group of the batch, the most trained tokens that a sample of it has on any rank; None as norms_P.
        carried: numbers that the estimator keeps from batch to batch, under names of its own: it changes them in place, alike on every rank,
            and checkpoints have them.
        total: gives the sum over all ranks of a tensor; the tensor itself where every sample is here.
    """

    rewards_P: torch.Tensor
    mask_P: torch.Tensor
    lengths: Sequence[int]
    groups_B: torch.Tensor
    values_P: torch.Tensor | None = None
    baselines_B: torch.Tensor | None = None
    named_B: Mapping[str, torch.Tensor] | None = None
    scored_B: torch.Tensor | None = None
    anchors_P: torch.Tensor | None = None
    earned_P: torch.Tensor | None = None
    kinds_B: Sequence[str] = ()
    norms_P: torch.Tensor | None = None
    longest: Sequence[int] | None = None
    carried: dict[str, float] = field(default_factory=dict)
    total: Callable[[torch.Tensor], torch.Tensor] = all_here

    def __post_init__(self) -> None:
        shapes = [tensor.shape for tensor in self._of_entries if tensor is not None]
        assert all(shape == (sum(self.lengths),) for shape in shapes), f"{shapes} for {sum(self.lengths)} entries"
        assert self.groups_B.shape == (len(self.lengths),), (
            f"{len(self.groups_B)} groups for {len(self.lengths)} samples"
        )
        assert self.scored_B is None or self.scored_B.shape == self.groups_B.shape, (
            f"{len(self.scored_B)} scored for {len(self.lengths)} samples"
        )
        assert self.baselines_B is None or self.baselines_B.shape == self.groups_B.shape, (
            f"{len(self.baselines_B)} baselines for {len(self.lengths)} samples"
        )
        for name, rewards_B in (self.named_B or {}).items():
            assert rewards_B.shape == self.groups_B.shape, f"{len(rewards_B)} of {name} for {len(self.lengths)} samples"

    @property
    def samples(self) -> torch.Tensor:
        """The sample of each entry, [P] int64."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))

    @property
    def _of_entries(self) -> tuple[torch.Tensor | None, ...]:
        return self.rewards_P, self.mask_P, self.values_P, self.anchors_P, self.earned_P, self.norms_P

    def by_sample(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sample's entries, [B]."""
        return values_P.new_zeros(len(self.lengths)).index_add_(0, self.samples, values_P)

    def by_group(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return for each sample the sum over its whole group, [B]."""
        return _by(self.groups_B, values_B)

    def to_entries(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return [P]: each entry has its sample's value, and 0 where nothing is trained."""
        return torch.where(self.mask_P > 0, values_B[self.samples], 0.0)


def _by(keys_N: torch.Tensor, values_N: torch.Tensor) -> torch.Tensor:
    """Return for each value the sum over all that have its key, [N]."""
    if not len(values_N):
        return values_N
    return values_N.new_zeros(int(keys_N.max()) + 1).index_add_(0, keys_N, values_N)[keys_N]


Estimator = Callable[..., torch.Tensor]
"""(inputs, its settings by keyword) -> advantages [P]; what they are where the mask is 0 does not matter."""

Function = TypeVar("Function", bound=Callable[..., Any])


def per_token(estimator: Function) -> Function:
    """Mark an estimator that needs every token."""
    vars(estimator)["per_token"] = True
    return estimator


def is_per_token(estimator: Estimator) -> bool:
    return getattr(estimator, "per_token", False)


def per_turn(estimator: Function) -> Function:
    """Mark an estimator that needs the reward of every turn."""
    vars(estimator)["per_turn"] = True
    return estimator


def is_per_turn(estimator: Estimator) -> bool:
    return getattr(estimator, "per_turn", False)


@dataclass(frozen=True)
class _Groups:
    """Each sample's reward, and the statistics of its group over the samples that have one, [B] each; or the same of turns.

    Attributes:
        alone_B: whether the group is of one sample, so that there is no other to compare with: its mean is 0.
        counts_B: how many samples of the group have a reward.
        means_B: their mean.
        centered_B: the reward less that mean, 0 for a sample without a reward.
        deviations_B: their unbiased standard deviation + 1e-6, that of a group of one 1 + 1e-6.
    """

    rewards_B: torch.Tensor
    alone_B: torch.Tensor
    counts_B: torch.Tensor
    means_B: torch.Tensor
    centered_B: torch.Tensor
    deviations_B: torch.Tensor

    def advantages(self, by_std: bool) -> torch.Tensor:
        """Return (r - mean) / (std + 1e-6), or r - mean, [B]."""
        return self.centered_B / self.deviations_B if by_std else self.centered_B


def _groups(inputs: AdvantageInputs, rewards_B: torch.Tensor | None = None) -> _Groups:
    rewards_B = inputs.by_sample(inputs.rewards_P) if rewards_B is None else rewards_B
    alone_B = inputs.by_group(torch.ones_like(rewards_B)) == 1
    return _compared(rewards_B, inputs.groups_B, _scored(inputs), alone_B)


def _scored(inputs: AdvantageInputs) -> torch.Tensor:
    return torch.ones(len(inputs.lengths), dtype=torch.float64) if inputs.scored_B is None else inputs.scored_B


def _compared(
    values_N: torch.Tensor, keys_N: torch.Tensor, scored_N: torch.Tensor, alone_N: torch.Tensor | bool
) -> _Groups:
    """Compare values that have the same key; the other arguments are as of _Groups and AdvantageInputs."""
    alone_N, counts_N = torch.as_tensor(alone_N).expand(len(values_N)), _by(keys_N, scored_N)
    means_N = torch.where(alone_N, 0.0, _by(keys_N, values_N * scored_N) / counts_N.clamp(min=1))
    centered_N = (values_N - means_N) * scored_N
    variance_N = _by(keys_N, centered_N.square()) / (counts_N - 1).clamp(min=1)
    deviations_N = torch.where(alone_N, 1.0, variance_N.sqrt()) + _EPSILON
    return _Groups(values_N, alone_N, counts_N, means_N, centered_N, deviations_N)


def grpo(inputs: AdvantageInputs, *, grpo_norm_by_std: bool) -> torch.Tensor:
    """Return the reward against the mean of its group (GRPO, arXiv:2402.03300, section 4.1.2).

    (r - mean) / (std + 1e-6) with the unbiased standard deviation, or with grpo_norm_by_std=false r - mean (Dr. GRPO,
    arXiv:2503.20783). A group whose rewards are all equal teaches nothing: 0. A group of one has nothing to compare with: mean 0
    and std 1.

    Formula:
        (R - mean of the group) / (standard deviation + 1e-6); without `grpo_norm_by_std` R - mean
    Use:
        the usual choice where a prompt can be sampled several times and the reward is of the whole answer; without the deviation
        (Dr.GRPO), easy and hard prompts weigh alike
    """
    return inputs.to_entries(_groups(inputs).advantages(grpo_norm_by_std))


def pass_at_k(inputs: AdvantageInputs, *, k: Several = 4, grpo_norm_by_std: bool) -> torch.Tensor:
    """Return what a sample adds to the best of k samples of its group (PKPO, arXiv:2505.15201, section 4).

    The mean over all choices of k - 1 other samples of max(0, r - their best reward). Its gradient is, but for a factor k, an unbiased
    one of the expected best reward of k samples: pass@k where rewards are 0 and 1. It is divided as grpo's by the standard deviation.
    With k the number of samples that is verl's grpo_passk (arXiv:2503.19595). In a group with fewer than k samples that have a
    reward, k is their number; 0 where there is no other.

    Formula:
        mean over k - 1 other samples of the group of max(0, R - their highest reward), divided as grpo
    Use:
        `n_samples_per_prompt` well above k, and samples are to be chosen among afterwards, or grpo has made all answers alike. Wrong
        answers are never pushed down, and prompts that are mostly solved teach next to nothing: it is not worth it where one answer is
        what counts
    Args:
        k: number of samples whose best reward is trained (arXiv:2505.15201); at most generator.n_samples_per_prompt.
    """
    groups = _groups(inputs)
    gains_B = torch.zeros_like(groups.rewards_B)
    scored_B = inputs.scored_B if inputs.scored_B is not None else torch.ones_like(gains_B)
    for group in inputs.groups_B.unique():
        members = ((inputs.groups_B == group) & (scored_B > 0)).nonzero()[:, 0]
        if len(members) > 1:
            gains_B[members] = _gains(groups.rewards_B[members], min(k, len(members)))
    return inputs.to_entries(gains_B / groups.deviations_B if grpo_norm_by_std else gains_B)


def _gains(rewards_N: torch.Tensor, k: int) -> torch.Tensor:
    """Return the mean over choices of k - 1 other rewards of max(0, reward - the highest of them), [N].

    Of the others in ascending order, the j-th is the highest of comb(j - 1, k - 2) choices, and one above the reward adds nothing.
    """
    count = len(rewards_N)
    shares = [comb(at, k - 2) / comb(count - 1, k - 1) for at in range(count - 1)]
    weights_N = rewards_N.new_tensor([*shares, 0.0])
    return (rewards_N[:, None] - rewards_N.sort().values).clamp(min=0) @ weights_N


def gdpo(inputs: AdvantageInputs, *, rewards: Mapping[str, float]) -> torch.Tensor:
    """Return several rewards, each against the mean of its group by itself (GDPO, arXiv:2601.05242, section 3).

    As grpo for each reward by itself, so that combinations of rewards with the same sum differ. Then (a - mean) / std over the samples of
    the batch, so that the scale does not grow with the number of rewards. Only samples with a trained token count there. TRL does the same;
    verl whitens over tokens, so that long samples count more.

    Formula:
        Σ weight × (reward - mean of the group) / (standard deviation + 1e-6) over named rewards, whitened over the samples of the batch
    Use:
        several rewards, of which an easy one (format, length) would drown the others: combinations with the same sum differ
    Args:
        rewards: name of each of `inputs.named_B` to its weight.
    """
    assert inputs.named_B is not None, "gdpo needs the rewards that trainer.algorithm.gdpo.rewards names"
    summed_B = torch.zeros(len(inputs.lengths), dtype=inputs.rewards_P.dtype)
    for name, weight in rewards.items():
        summed_B += weight * _groups(inputs, inputs.named_B[name]).advantages(by_std=True)
    trained_B = (inputs.by_sample(inputs.mask_P) > 0).to(summed_B.dtype)
    return inputs.to_entries(whiten(summed_B, trained_B, inputs.total))


def rloo(inputs: AdvantageInputs) -> torch.Tensor:
    """Return the reward against the mean of the group's other samples (RLOO, arXiv:2402.14740).

    0 where there is no other, as in verl's rloo_vectorized; its rloo keeps the reward there.

    Formula:
        R - mean of the other samples of the group
    Use:
        few samples per prompt: its baseline is unbiased even with two
    """
    groups = _groups(inputs)
    factor_B = groups.counts_B / (groups.counts_B - 1).clamp(min=1)
    return inputs.to_entries(torch.where(groups.alone_B, 0.0, groups.centered_B * factor_B))


def maxrl(inputs: AdvantageInputs) -> torch.Tensor:
    """Return the reward against the mean of its group, divided by that mean (MaxRL, arXiv:2602.02710).

    For rewards that are not negative; r in a group of one.
    Prompts that the policy rarely answers well count more than others.

    Formula:
        (R - mean) / (mean + 1e-6)
    Use:
        rewards of 0 and 1, and prompts that are rarely solved should count more
    """
    groups = _groups(inputs)
    return inputs.to_entries(groups.centered_B / torch.where(groups.alone_B, 1.0, groups.means_B + _EPSILON))


def online_dpo(inputs: AdvantageInputs, *, kl_loss_coef: float) -> torch.Tensor:
    """Return the weights of the best and of the worst sample of each group in the gradient of DPO (online DPO, arXiv:2402.04792, section 3).

    The loss of this pair is -log σ(β (c - r)) with β = kl_loss_coef. c and r are the sums over tokens of log π - log π_ref, of the best
    and of the worst sample. β c and β r are the penalties of use_kl_in_reward with k1. The gradient of the loss is that of gpg with
    these weights, but for a factor, at the policy that the batch begins with. The first of several equal samples is taken; 0 where all
    are equal.

    Formula:
        ±beta σ(-beta (c - r)) for the highest and the lowest R of the group, else 0. c and r: log π - log π_ref of these samples, beta:
        `kl_loss_coef`
    Use:
        rewards that order answers without a scale, such as a judge's. With `use_kl_in_reward`, k1, `gpg`, seq_mean_token_sum and one update
        per batch it is DPO on the policy's own pairs, and with `reference_reset_interval` iterative DPO (2312.11456). It is not worth it
        for rewards of right or wrong: grpo learns from all samples
    """
    assert inputs.earned_P is not None, "online_dpo compares rewards without the penalties of use_kl_in_reward"
    # not by adding penalties to rewards_P: what it rounds would tell equal rewards from each other
    rewards_B, scored_B = inputs.by_sample(inputs.earned_P), _scored(inputs)
    penalties_B, weights_B = rewards_B - inputs.by_sample(inputs.rewards_P), torch.zeros_like(rewards_B)
    for group in inputs.groups_B.unique():
        members = ((inputs.groups_B == group) & (scored_B > 0)).nonzero()[:, 0]
        own = rewards_B[members]
        if len(own) and own.max() > own.min():
            best, worst = members[own.argmax()], members[own.argmin()]
            weight = kl_loss_coef * torch.sigmoid(penalties_B[worst] - penalties_B[best])
            weights_B[best], weights_B[worst] = weight, -weight
    return inputs.to_entries(weights_B)


def opo(inputs: AdvantageInputs) -> torch.Tensor:
    """Return the reward against the mean of its group, weighted by trained tokens (OPO, arXiv:2505.23585, section 3).

    That baseline makes the variance of an on-policy gradient least, if the squared norm of a sample's gradient grows with its
    tokens. A group of one is its own baseline: 0, where verl's keeps its reward.

    Formula:
        R - mean of the group, weighted by tokens
    Use:
        strictly on-policy training of answers whose lengths differ much
    """
    rewards_B, tokens_B = inputs.by_sample(inputs.rewards_P), inputs.by_sample(inputs.mask_P)
    weights_B = torch.where(inputs.by_group(tokens_B) > 0, tokens_B, 1.0)
    return inputs.to_entries(rewards_B - inputs.by_group(weights_B * rewards_B) / inputs.by_group(weights_B))


@per_token
def optimal_token_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """Return the rewards from each token on against the optimal baseline of its position in the group (optimal token baseline, arXiv:2602.07078).

    The squared norm of a token's gradient is taken over the logits: 1 - 2 π + Σ π(v)^2 over tokens v, with the old policy's π. Over the
    parameters it would cost a backward pass per token. Only trained tokens are positions: it is verl's optimal_token_baseline for one
    turn, and its tir_optimal_token_baseline for several. W_t has no factor for a correction of the rollout, as verl's has with rollout_is.

    Formula:
        G_t - (Σ W_t G_t) / (Σ W_t), or G_t where one response of the group has a t-th token. G_t: rewards from token t on. W_t: sum of
        1 - 2π + Σπ² up to t
    Use:
        many samples per prompt, whose lengths or certainty differ much; penalties per token. It costs a forward pass. It is not worth it with
        few samples, whose weights are noise: opo weighs by the length alone
    """
    assert inputs.norms_P is not None, "optimal_token_baseline needs the norms of the tokens' gradients"
    assert inputs.longest is not None, "optimal_token_baseline needs the lengths of its groups"
    returns_P = lambda_returns(inputs, torch.zeros_like(inputs.rewards_P), 1.0, 1.0)
    baselines_P = token_baselines(
        returns_P, inputs.norms_P, inputs.mask_P, inputs.lengths, inputs.groups_B, inputs.longest, inputs.total
    )
    return (returns_P - baselines_P) * inputs.mask_P


def remax(inputs: AdvantageInputs) -> torch.Tensor:
    """Return the reward against that of the greedy response to the same prompt (ReMax, arXiv:2310.10505, algorithm 2).

    That response is generated beside the group. No other sample is needed: a group of one learns too. Rewards per token all count for each
    token of the sample, as those of the greedy response do; in verl only those from the token on.

    Formula:
        R - reward of the greedy response
    Use:
        one sample per prompt, without a critic; costs one greedy response per prompt
    """
    assert inputs.baselines_B is not None, "remax needs the rewards of greedy responses"
    return inputs.to_entries(inputs.by_sample(inputs.rewards_P) - inputs.baselines_B)


@per_turn
def turn_grpo(inputs: AdvantageInputs, *, grpo_norm_by_std: bool) -> torch.Tensor:
    """Return the rewards from each turn on, each against the mean over all turns of its group (GRPO with process supervision, arXiv:2402.03300, section 4.1.3).

    With one turn per sample that is grpo. The mean is over turns: a sample whose rewards are below it loses with each turn more.

    Formula:
        Σ over this turn and those after it of (reward - mean over the turns of the group) / (standard deviation + 1e-6)
    Use:
        each turn has a reward of its own. It is not worth it where only the last one has: then longer samples are pushed down, and grpo or
        gigpo serve better
    """
    sample_P = inputs.samples
    scored_P, alone_P = _scored(inputs)[sample_P], _groups(inputs).alone_B[sample_P]
    turns = _compared(inputs.rewards_P, inputs.groups_B[sample_P], scored_P, alone_P)
    return torch.where(inputs.mask_P > 0, _returns(inputs, turns.advantages(grpo_norm_by_std), 1.0), 0.0)


@per_turn
def gigpo(
    inputs: AdvantageInputs,
    *,
    gamma: float,
    grpo_norm_by_std: bool,
    step_weight: NotNegative = 1.0,
    episode_weight: NotNegative = 1.0,
) -> torch.Tensor:
    """Return the sample against its group, and each turn against those that the group took in the same state (GiGPO, arXiv:2505.10978, section 4).

    A turn is worth the rewards from it on, discounted by gamma for each turn of its role. In a state that the group was in once there is
    nothing to compare with: its part is 0. With one turn per sample both parts are grpo.

    Formula:
        episode_weight × A_E + step_weight × A_S, A_E as grpo. A_S: G less its mean over turns of the group in the same state, divided as
        grpo, G = Σ gamma^k reward_(t+k) over turns
    Use:
        long episodes in which samples of a group come into the same states: web pages, rooms, boards. The authors use gamma 0.95, and
        `grpo_norm_by_std=false` where it did better. With `episode_weight` 0 and gamma 0 attempts at one proposed problem are compared
        with each other alone. It is not worth it where no state comes twice: then it is grpo
    Args:
        step_weight: weight of the part that compares turns in the same state (arXiv:2505.10978, whose authors use 1).
        episode_weight: weight of the part that compares whole samples.
    """
    assert inputs.anchors_P is not None, "gigpo needs the states of turns"
    returns_P = _returns(inputs, inputs.rewards_P, gamma)
    steps = _compared(returns_P, inputs.anchors_P, _scored(inputs)[inputs.samples], alone_N=False)
    episodes_P = inputs.to_entries(_groups(inputs).advantages(grpo_norm_by_std))
    steps_P = torch.where(inputs.mask_P > 0, steps.advantages(grpo_norm_by_std), 0.0)
    return episode_weight * episodes_P + step_weight * steps_P


@per_turn
def turn_returns(inputs: AdvantageInputs, *, gamma: float) -> torch.Tensor:
    """Return the rewards from each turn on, discounted by turns, without a baseline (chunk-level returns of IPA, arXiv:2512.24873, equation 7).

    The source has one reward, at the end of the sample; those of other turns are added alike.

    Formula:
        Σ gamma^k reward_(t+k) over turns
    Use:
        with `ipa`, for agents of many turns that succeed rarely: late turns have most of the credit. Gamma is 0.95 by default in the
        authors' code, ROLL. It is not worth it where most samples are rewarded: gigpo and grpo compare them
    """
    return torch.where(inputs.mask_P > 0, _returns(inputs, inputs.rewards_P, gamma), 0.0)


def rae(inputs: AdvantageInputs, *, decay: Share = 0.95) -> torch.Tensor:
    """Return the reward against a moving mean of those of its data source and role (role-conditioned advantages of SPIRAL, arXiv:2506.24119, section 3).

    The mean is that before the batch, 0 at first. The n rewards of a batch change it as n that equal their mean would, one after the other:
    so it does not depend on their order, and any number of samples per prompt is enough. Checkpoints have it.

    Formula:
        R - b of the data source and role; after each batch b becomes decay^n b + (1 - decay^n) mean of R
    Use:
        self-play of two sides with different chances, from one sample per prompt on. It is not worth it where prompts differ in how much can
        be reached: grpo compares within each, by role too
    Args:
        decay: what is left of a moving mean after one sample (arXiv:2506.24119, whose authors use 0.95).
    """
    rewards_B, scored_B = inputs.by_sample(inputs.rewards_P), _scored(inputs)
    advantages_B = torch.zeros_like(rewards_B)
    for kind in sorted(set(inputs.kinds_B)):
        own_B = torch.tensor([each == kind for each in inputs.kinds_B]) & (scored_B > 0)
        before, count = inputs.carried.get(kind, 0.0), int(own_B.sum())
        if count:
            advantages_B[own_B] = rewards_B[own_B] - before
            inputs.carried[kind] = before + (1 - decay**count) * (rewards_B[own_B].mean().item() - before)
    return inputs.to_entries(advantages_B)


def _returns(inputs: AdvantageInputs, rewards_P: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the discounted sum of the rewards of each entry and those after it in its sample, [P]."""
    found = list[float]()
    for own in rewards_P.split(list(inputs.lengths)):
        backwards = accumulate(reversed(own.tolist()), lambda later, reward: reward + gamma * later)
        found += [*backwards][::-1]
    return rewards_P.new_tensor(found)


@per_token
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> torch.Tensor:
    """Return the discounted rewards from each token on, whitened over the batch (REINFORCE++, arXiv:2501.03262).

    The penalty of the paper, the KL divergence from the reference, is part of the rewards with use_kl_in_reward.

    Formula:
        discounted rewards from the token on, whitened over the batch
    Use:
        one sample per prompt, or rewards per token, without a critic; its penalty is `use_kl_in_reward`
    """
    returns_P = lambda_returns(inputs, torch.zeros_like(inputs.rewards_P), gamma, 1.0)
    return whiten(returns_P, inputs.mask_P, inputs.total) * inputs.mask_P


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """Return the reward against the mean of its group, whitened over the tokens of the batch (REINFORCE++ with a baseline, arXiv:2501.03262).

    Formula:
        R - mean of the group, whitened over the batch
    Use:
        as grpo, but scaled by the whole batch, so that nearly equal groups are not blown up
    """
    centered_P = inputs.to_entries(_groups(inputs).centered_B)
    return torch.where(inputs.mask_P > 0, whiten(centered_P, inputs.mask_P, inputs.total), 0.0)


@per_token
def gae(inputs: AdvantageInputs, *, gamma: float, lambd: float, length_alpha: NotNegative = 0.0) -> torch.Tensor:
    """Return generalized advantages against a critic, whitened over the batch (GAE, arXiv:1506.02438).

    With length_alpha, the lambda of a sample of l trained tokens is max(0, 1 - 1 / (length_alpha l)) (VAPO, arXiv:2504.05118,
    section 4.2). So the sum of the weights of its temporal differences, 1 / (1 - lambda), grows with its length.

    Formula:
        Σ (gamma lambd)^k δ_(t+k), δ_t = reward_t + gamma V_(t+1) - V_t, whitened over the batch; only trained tokens are steps
    Use:
        rewards per token, or long answers where each step deserves a value of its own; costs a second model
        (`trainer.critic.model.path`). `length_alpha` 0.05 with `critic_lambd` 1.0 where the lengths of answers differ by a factor of ten.
        It is not worth it for short ones: up to 20 tokens it makes lambda 0
    Args:
        length_alpha: makes the lambda of a sample's advantages 1 - 1 / (length_alpha * its trained tokens), at least 0, instead of lambd
            (VAPO, arXiv:2504.05118). Its authors use 0.05; 0: lambd for all.
    """
    assert inputs.values_P is not None, "gae needs a critic's values"
    lambda_B: torch.Tensor | float = lambd
    if length_alpha:
        tokens_B = inputs.by_sample(inputs.mask_P).clamp(min=1)
        lambda_B = (1 - 1 / (length_alpha * tokens_B)).clamp(min=0)
    returns_P = lambda_returns(inputs, inputs.values_P, gamma, lambda_B)
    return whiten(returns_P - inputs.values_P, inputs.mask_P, inputs.total) * inputs.mask_P


def lambda_returns(
    inputs: AdvantageInputs, values_P: torch.Tensor, gamma: float, lambd: float | torch.Tensor
) -> torch.Tensor:
    """Return what a critic should have expected before each token, [P]: its value plus the generalized advantage.

    Only trained tokens are steps: values elsewhere count nothing, they are no steps in time, and a reward there belongs to the last
    trained token before it. The sources step through padding and through observations.

    Args:
        lambd: one number, or [B], that of each sample.
    """

    def columns(of_P: torch.Tensor) -> torch.Tensor:
        return pad_sequence(list(of_P.split(list(inputs.lengths)))).flip(0)  # [longest, B], last entry first

    if not sum(inputs.lengths):
        return values_P
    advantage_B = next_value_B = reward_B = values_P.new_zeros(len(inputs.lengths))
    backwards = []
    for rewards_B, value_B, mask_B in zip(
        columns(inputs.rewards_P), columns(values_P), columns(inputs.mask_P), strict=True
    ):
        reward_B = reward_B + rewards_B
        step_B = reward_B + gamma * next_value_B - value_B + gamma * lambd * advantage_B
        trained_B = mask_B > 0
        advantage_B = torch.where(trained_B, step_B, advantage_B)
        next_value_B = torch.where(trained_B, value_B, next_value_B)
        reward_B = torch.where(trained_B, 0.0, reward_B)
        backwards.append(torch.where(trained_B, advantage_B + value_B, 0.0))
    rows = torch.stack(backwards[::-1], dim=1)  # [B, longest]
    return torch.cat([row[:length] for row, length in zip(rows, inputs.lengths, strict=True)])


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "pass_at_k": pass_at_k,
    "rloo": rloo,
    "maxrl": maxrl,
    "online_dpo": online_dpo,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "remax": remax,
    "gdpo": gdpo,
    "turn_grpo": turn_grpo,
    "gigpo": gigpo,
    "turn_returns": turn_returns,
    "rae": rae,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}
