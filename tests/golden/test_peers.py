"""Losses, advantages and corrections beside those of verl, TRL and prime-rl on the same batch (peers.py asked them)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from hpcrl.algorithms import losses
from hpcrl.algorithms.advantages import ESTIMATORS, AdvantageInputs, lambda_returns
from hpcrl.algorithms.distillation import jensen_shannon
from hpcrl.algorithms.entropies import highest_entropies
from hpcrl.algorithms.kl import KL_ESTIMATORS, adapted
from hpcrl.algorithms.losses import LossTokens, ratio
from hpcrl.algorithms.off_policy import correct
from hpcrl.algorithms.preferences import PAIR_LOSSES, Pairs, unpaired_loss
from hpcrl.algorithms.reductions import Reduction, TokenCounts, row_weight
from hpcrl.algorithms.values import clipped_value_loss
from hpcrl.algorithms.whitening import whiten
from hpcrl.config.sections.algorithm import OffPolicyCorrectionConfig
from hpcrl.config.sections.dpo import DPOConfig
from tests.golden.peers import (
    DUAL,
    FORMAT,
    GAMMA,
    GREEDY,
    GROUPS,
    HIGH,
    KTO,
    LABELS,
    LAMBDA,
    LOW,
    PLACE,
    REWARDS,
    WEIGHTS,
    WITH_ONE_ALONE,
    batch,
    with_gradient,
)
from tests.golden.trl_grpo import LONGEST

GOLDEN: dict[str, Any] = json.loads(PLACE.read_text())
GIVEN = batch()
MASK, WITHIN = GIVEN["mask"], GIVEN["within"]
ROWS, COLUMNS = MASK.shape
SIZES = torch.tensor([COLUMNS] * ROWS)
TRAINED = MASK > 0
Ours = Callable[[], list[float]]
PerToken = Callable[[LossTokens], torch.Tensor]


def weights(reduction: str) -> torch.Tensor:
    """Return the weight of each token of a sample, [B, 1]."""
    counts = [int(row.sum()) for row in MASK]
    rows = [TokenCounts(count, sum(counts), ROWS, 2, 0, 0, 1) for count in counts]
    own = [[row_weight(Reduction(reduction, max_seq_len=LONGEST), row)] for row in rows]
    return torch.tensor(own, dtype=torch.float64)


def loss(of: PerToken, reduction: str = "token_mean", rollout: str = "rollout") -> Ours:
    """Return loss and gradient of what `of` makes of tokens, reduced."""

    def reduced(leaf: torch.Tensor) -> torch.Tensor:
        others = (GIVEN["old"], GIVEN[rollout], GIVEN["advantages"], MASK)
        tokens = LossTokens(leaf.flatten(), *(each.flatten() for each in others), SIZES)
        return (of(tokens).view_as(MASK) * weights(reduction) * MASK).sum()

    return lambda: with_gradient(reduced, GIVEN["logprobs"], MASK)


def policy(name: str, reduction: str = "token_mean", rollout: str = "rollout", **settings: Any) -> Ours:
    return loss(lambda tokens: losses.POLICY_LOSSES[name](tokens, **settings)[0], reduction, rollout)


def advantages(
    name: str,
    groups: tuple[int, ...] = WITH_ONE_ALONE,
    mask: torch.Tensor = MASK,
    of: str = "outcomes",
    **settings: Any,
) -> torch.Tensor:
    """Return advantages, [B, T]; what they are where nothing is trained does not matter."""
    norms = 1 - 2 * GIVEN["old"].exp() + GIVEN["squares"]
    per_row = {"outcome": REWARDS, "format": FORMAT}
    inputs = AdvantageInputs(
        (GIVEN[of] * mask).flatten(),
        mask.flatten(),
        SIZES.tolist(),
        torch.tensor(groups),
        values_P=GIVEN["values"].flatten(),
        baselines_B=torch.tensor(GREEDY, dtype=torch.float64),
        named_B={key: torch.tensor(values, dtype=torch.float64) for key, values in per_row.items()},
        norms_P=norms.flatten(),
        longest=[
            max(int(mask[row].sum()) for row in range(ROWS) if groups[row] == group) for group in sorted(set(groups))
        ],
    )
    if name == "returns":
        return lambda_returns(inputs, GIVEN["values"].flatten(), GAMMA, LAMBDA).view_as(mask)
    return ESTIMATORS[name](inputs, **settings).view_as(mask)


def estimated(name: str, groups: tuple[int, ...] = WITH_ONE_ALONE, mask: torch.Tensor = MASK, **settings: Any) -> Ours:
    return lambda: advantages(name, groups, mask, **settings)[mask > 0].tolist()


def correction(**settings: Any) -> Ours:
    """Return weights of tokens, 0 where they are left out."""

    def weighted() -> list[float]:
        others = (GIVEN["old"], GIVEN["rollout"], GIVEN["advantages"], MASK)
        tokens = LossTokens(GIVEN["logprobs"].flatten(), *(each.flatten() for each in others), SIZES)
        found = correct(tokens, OffPolicyCorrectionConfig(**settings))
        return found.of(torch.ones_like(tokens.mask)).view_as(MASK)[TRAINED].tolist()

    return weighted


def divergence(name: str) -> Ours:
    return lambda: with_gradient(
        lambda leaf: (KL_ESTIMATORS[name](leaf, GIVEN["ref"], 1.0) * MASK).sum(), GIVEN["logprobs"], MASK
    )


def penalized(by_ratio: bool) -> Ours:
    def per_token(tokens: LossTokens) -> torch.Tensor:
        factor = ratio(tokens.logprobs, tokens.old_logprobs) if by_ratio else 1.0
        return losses.clipped_surrogate(tokens, **PPO)[0] + 0.1 * KL_ESTIMATORS["k3"](
            tokens.logprobs, GIVEN["ref"].flatten(), factor
        )

    return loss(per_token)


def without_divergent(tokens: LossTokens) -> torch.Tensor:
    found = correct(
        tokens,
        OffPolicyCorrectionConfig(
            negative_sample_mask_delta=0.02, tis_ratio_type="token", token_tis_ratio_clip_high=1e9
        ),
    )
    return torch.where(found.mask > 0, losses.clipped_surrogate(tokens, **PPO)[0], 0.0)


def of_highest_entropy(tokens: LossTokens) -> torch.Tensor:
    kept = highest_entropies(GIVEN["entropies"].flatten(), tokens.mask, 0.3, list)
    return kept * losses.clipped_surrogate(tokens, **PPO)[0]


def pairs(name: str, settings: DPOConfig) -> Ours:
    def summed(leaf: torch.Tensor) -> torch.Tensor:
        return PAIR_LOSSES[name](Pairs.of(leaf.flatten(), None, MASK.flatten(), SIZES), settings).sum()

    return lambda: with_gradient(summed, GIVEN["logprobs"], MASK)


def answers(name: str) -> Ours:
    """Return the mean over answers; for kto the shift is the mean log-ratio of mismatched answers, at least 0."""
    ref, others, others_ref = ((GIVEN[key] * MASK).sum(1) for key in ("ref", "old", "rollout"))
    shift = (others - others_ref).mean().clamp(min=0) if name == "kto" else torch.zeros(())
    settings = DPOConfig(loss_type=[name], **KTO[name])

    def mean(leaf: torch.Tensor) -> torch.Tensor:
        ratios = (leaf * MASK).sum(1) - ref
        return unpaired_loss(ratios, torch.tensor(LABELS), shift.expand(ROWS), settings).mean()

    return lambda: with_gradient(mean, GIVEN["logprobs"], MASK)


def distilled(beta: float) -> Ours:
    teacher = GIVEN["ref"].log_softmax(-1)
    return lambda: with_gradient(
        lambda leaf: jensen_shannon(leaf.log_softmax(-1), teacher, beta).sum(), GIVEN["logprobs"], torch.ones_like(MASK)
    )


def values() -> list[float]:
    def mean(leaf: torch.Tensor) -> torch.Tensor:
        found, _ = clipped_value_loss(leaf, GIVEN["values"], GIVEN["returns"], MASK, value_clip=0.2)
        return (found * weights("token_mean") * MASK).sum()

    return with_gradient(mean, GIVEN["logprobs"], MASK)


def reduced(name: str) -> Ours:
    return loss(lambda tokens: tokens.logprobs.square(), name)


PPO: Mapping[str, float] = {"eps_clip_low": LOW, "eps_clip_high": HIGH}
OURS: dict[str, Ours] = {
    "verl: policy loss vanilla": policy("dual_clip", **PPO, clip_ratio_c=DUAL),
    "verl: policy loss dppo_tv": policy("dppo", rollout="old", delta_low=0.03, delta_high=0.02),
    "verl: policy loss dppo_kl": policy("dppo", rollout="old", dppo_type="binary_kl", delta_low=0.02, delta_high=0.001),
    "verl: policy loss gspo": policy("gspo", "sequence_mean", eps_clip_low=0.03, eps_clip_high=0.04),
    "verl: policy loss sapo": policy("sapo", "sequence_mean", tau_pos=1.0, tau_neg=1.05),
    "verl: policy loss gpg": policy("gpg"),
    "verl: policy loss clip_cov": policy("clip_cov", **PPO, clip_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=5.0),
    "verl: policy loss kl_cov": policy("kl_cov", kl_cov_frac=0.2, ppo_kl_coef=1.0),
    "verl: policy loss geo_mean": policy("gmpo", "sequence_mean", log_clip_low=LOW, log_clip_high=HIGH),
    "verl: policy loss dro": policy("dro", rollout="old", beta=0.8),
    "verl: policy loss cispo": policy("cispo", cispo_eps_clip_low=LOW, cispo_eps_clip_high=HIGH),
    "verl: loss_agg_mode token-mean": reduced("token_mean"),
    "verl: loss_agg_mode token-sum": reduced("token_sum"),
    "verl: loss_agg_mode seq-mean-token-sum": reduced("seq_mean_token_sum"),
    "verl: loss_agg_mode seq-mean-token-sum-norm": reduced("seq_mean_token_sum_norm"),
    "verl: loss_agg_mode seq-mean-token-mean": reduced("seq_mean_token_mean"),
    "verl: kl_penalty kl": divergence("k1"),
    "verl: kl_penalty abs": divergence("abs"),
    "verl: kl_penalty mse": divergence("k2"),
    "verl: kl_penalty low_var_kl": divergence("k3"),
    "verl: kl_penalty k3+": divergence("k2"),
    "verl: value loss": values,
    "verl: adaptive kl": lambda: [adapted(0.1, 6.9, 64, 6.0, 1000)],
    "verl: advantages grpo": estimated("grpo", grpo_norm_by_std=True),
    "verl: advantages grpo_vectorized": estimated("grpo", grpo_norm_by_std=True),
    "verl: advantages grpo without deviation": estimated("grpo", grpo_norm_by_std=False),
    "verl: advantages grpo_vectorized without deviation": estimated("grpo", grpo_norm_by_std=False),
    "verl: advantages rloo": estimated("rloo"),
    "verl: advantages rloo_vectorized": estimated("rloo"),
    "verl: advantages opo": estimated("opo"),
    "verl: advantages reinforce_plus_plus_baseline": estimated("reinforce++_baseline"),
    "verl: advantages gpg": estimated("grpo", grpo_norm_by_std=False),
    "verl: advantages grpo_passk": estimated("pass_at_k", GROUPS, k=3, grpo_norm_by_std=True),
    "verl: advantages reinforce_plus_plus": estimated("reinforce++", of="rewards", gamma=GAMMA),
    "verl: advantages remax": estimated("remax"),
    "verl: advantages remax of rewards per token": estimated("remax", of="rewards"),
    "verl: advantages gae": estimated("gae", of="rewards", gamma=GAMMA, lambd=LAMBDA),
    "verl: returns of gae": estimated("returns", of="rewards"),
    "verl: advantages optimal_token_baseline": estimated("optimal_token_baseline", GROUPS, WITHIN, of="rewards"),
    "verl: advantages tir_optimal_token_baseline": estimated("optimal_token_baseline", of="rewards"),
    "verl: advantages gdpo": estimated("gdpo", GROUPS, rewards={"outcome": WEIGHTS[0], "format": WEIGHTS[1]}),
    "verl: rollout_correction token": correction(tis_ratio_type="token", token_tis_ratio_clip_high=1.05),
    "verl: rollout_correction sequence": correction(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.1),
    "verl: rollout_correction IcePop": correction(
        tis_ratio_type="token", token_mask_is_threshold_low=0.9, token_mask_is_threshold_high=1.1
    ),
    "verl: rollout_correction token_k1": correction(
        token_mask_is_threshold_low=1 / 1.15, token_mask_is_threshold_high=1 / 0.9
    ),
    "verl: rollout_correction seq_sum_k1": correction(
        sequence_mask_metric="product", product_mask_low=1 / 1.15, product_mask_high=1 / 0.8
    ),
    "verl: rollout_correction seq_mean_k1": correction(
        sequence_mask_metric="geometric", geo_mask_low=1 / 1.05, geo_mask_high=1 / 0.97
    ),
    "trl: GRPO grpo": policy("regular", "sequence_mean", **PPO),
    "trl: GRPO bnpo": policy("regular", **PPO),
    "trl: GRPO dr_grpo": policy("regular", "seq_mean_token_sum_norm", **PPO),
    "trl: GRPO dapo": policy("regular", **PPO),
    "trl: GRPO delta": policy("dual_clip", **PPO, clip_ratio_c=DUAL),
    "trl: GRPO cispo": policy("cispo", cispo_eps_clip_low=1.0, cispo_eps_clip_high=0.1),
    "trl: GRPO sapo": policy("sapo", "sequence_mean", tau_pos=0.8, tau_neg=1.3),
    "trl: GRPO gspo": policy("gspo", "sequence_mean", eps_clip_low=0.03, eps_clip_high=0.04),
    "trl: GRPO divergence": penalized(by_ratio=False),
    "trl: GRPO divergence by ratio": penalized(by_ratio=True),
    "trl: GRPO off_policy_mask_threshold": loss(without_divergent),
    "trl: GRPO top_entropy_quantile": loss(of_highest_entropy),
    "trl: GRPO gmpo": policy("gmpo", "sequence_mean", log_clip_low=LOW, log_clip_high=HIGH),
    "trl: CPO simpo": pairs("simpo", DPOConfig(beta=2.0, simpo_gamma=0.5)),
    "trl: ORPO": pairs("orpo", DPOConfig()),
    "trl: KTO kto": answers("kto"),
    "trl: KTO apo_zero_unpaired": answers("apo_zero_unpaired"),
    "trl: GKD 0": distilled(0),
    "trl: GKD 0.3": distilled(0.3),
    "trl: GKD 1": distilled(1),
    "prime_rl: default": policy("dppo", delta_low=0.03, delta_high=0.02, kl_tau=0.01),
    "prime_rl: icepop": policy("rollout_is", eps_clip_low=0.15, eps_clip_high=0.2),
}


def other_loss(name: str, of: Callable[[torch.Tensor], torch.Tensor]) -> Ours:
    """Return another loss, and the same gradient."""

    def numbers() -> list[float]:
        gradient = OURS[name]()[1:]
        return [of(torch.tensor(gradient, dtype=torch.float64)).item(), *gradient]

    return numbers


def as_log_likelihood(gradient: torch.Tensor) -> torch.Tensor:
    return gradient @ GIVEN["logprobs"][TRAINED]


def reward_of_one_alone(name: str) -> Ours:
    def numbers() -> list[float]:
        found = advantages(name)
        found[-1] = REWARDS[-1]
        return found[TRAINED].tolist()

    return numbers


def scaled() -> list[float]:
    return [
        number * len(REWARDS) / torch.tensor(REWARDS).count_nonzero().item()
        for number in OURS["verl: advantages gpg"]()
    ]


def from_token_on() -> list[float]:
    rewards = GIVEN["rewards"] * MASK
    found = advantages("remax", of="rewards") - (rewards.cumsum(1) - rewards)
    return found[TRAINED].tolist()


def whitened_over_tokens() -> list[float]:
    rows = (torch.tensor(rewards, dtype=torch.float64) for rewards in (REWARDS, FORMAT))
    inputs = [
        AdvantageInputs(row, torch.ones(ROWS, dtype=torch.float64), [1] * ROWS, torch.tensor(GROUPS)) for row in rows
    ]
    parts = [
        weight * ESTIMATORS["grpo"](own, grpo_norm_by_std=True) for weight, own in zip(WEIGHTS, inputs, strict=True)
    ]
    return whiten(sum(parts)[:, None].expand_as(MASK), MASK)[TRAINED].tolist()


DIFFERENT: dict[str, tuple[str, Ours]] = {
    "verl: policy loss dppo_tv": (
        "its loss is -stop(r) A log π, of the same gradient as -r A",
        other_loss("verl: policy loss dppo_tv", as_log_likelihood),
    ),
    "verl: policy loss dppo_kl": (
        "its loss is -stop(r) A log π, of the same gradient as -r A",
        other_loss("verl: policy loss dppo_kl", as_log_likelihood),
    ),
    "prime_rl: icepop": (
        "its loss is -u A, of the same gradient as -stop(u) A log π",
        other_loss("prime_rl: icepop", torch.sum),
    ),
    "verl: kl_penalty k3+": (
        "a + stands for the estimate with the gradient of k2",
        lambda: [divergence("k3")()[0], *divergence("k2")()[1:]],
    ),
    "verl: advantages rloo": (
        "a group of one keeps its reward; here, and in rloo_vectorized, it is 0",
        reward_of_one_alone("rloo"),
    ),
    "verl: advantages opo": (
        "a group of one keeps its reward; here it is its own baseline",
        reward_of_one_alone("opo"),
    ),
    "verl: advantages gpg": (
        "times the samples of the batch by those of a reward that is not 0; here groups without spread can be left out",
        scaled,
    ),
    "verl: advantages remax of rewards per token": (
        "only rewards from the token on count; here all, as the greedy response's",
        from_token_on,
    ),
    "verl: advantages gdpo": (
        "the sum is whitened over tokens; here and in TRL over samples, so that long ones do not count more",
        whitened_over_tokens,
    ),
}


def test_each_case_of_the_peers_has_its_own_here() -> None:
    assert OURS.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", [name for name in OURS if name not in DIFFERENT])
def test_numbers_are_those_of_the_peer(name: str) -> None:
    assert OURS[name]() == pytest.approx(GOLDEN[name]["numbers"], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", DIFFERENT)
def test_numbers_differ_as_they_should(name: str) -> None:
    reason, theirs = DIFFERENT[name]
    assert theirs() == pytest.approx(GOLDEN[name]["numbers"], rel=1e-6, abs=1e-8), reason
    assert OURS[name]() != pytest.approx(GOLDEN[name]["numbers"], rel=1e-6, abs=1e-8), reason
