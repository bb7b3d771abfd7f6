"""Cosmos-RL's policy loss: its settings go through the converter, and a mini-batch is one micro-batch of packed samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hpcrl.algorithms.kl import k1
from hpcrl.algorithms.losses import LossTokens, clipped_surrogate, masked_sum, sample_means
from hpcrl.algorithms.preferences import Pairs, pair_loss
from hpcrl.algorithms.reductions import Reduction, TokenCounts, row_weight
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.dpo import DPOConfig
from tests.golden.adapters.converted import cosmos
from tests.golden.adapters.packed import train
from tests.golden.case import Case


def compute_loss(case: Case) -> dict[str, Any]:
    """The policy loss and its gradient; kl_loss is what a second run gives whose advantages are 0 and whose weight is 1."""
    algorithm = _algorithm(case)
    reduction = Reduction(algorithm.loss_reduction, max_tokens=algorithm.unbiased_loss_max_tokens)
    samples = _samples(case.inputs)
    sums, gradient = train(algorithm, reduction, samples)
    found = {"loss": sums["final_loss"], "per_token_loss": sums["policy_loss"], "grad_current": gradient}
    if algorithm.use_kl_loss:
        still = [{**sample, "advantages": sample["zeros"]} for sample in samples]
        alone, _ = train(replace(algorithm, kl_loss_coef=1.0), reduction, still)
        return {**found, "kl_loss": alone["final_loss"]}
    return {**found, "kl_loss": 0.0}


def masked_mean(case: Case) -> dict[str, Any]:
    values, mask = (_tensor(case.inputs[name]) for name in ("values", "mask"))
    return {"out": sample_means(values.flatten(), mask.flatten(), torch.tensor([len(row) for row in values]))}


def vla_chunk_loss(case: Case) -> dict[str, Any]:
    """The share of a chunk in the loss of its episode, as if that were one sample."""
    names = "log_probs", "old_log_probs", "mask"
    logprobs, old, mask = (_tensor(case.inputs[name]).flatten() for name in names)
    advantages = torch.full_like(mask, case.inputs["advantage"])
    tokens = LossTokens(logprobs, old, old, advantages, mask, torch.tensor([len(mask)]))
    eps = {f"eps_clip_{side}": case.params[f"epsilon_{side}"] for side in ("low", "high")}
    values, sums = clipped_surrogate(tokens, **eps)
    length, episodes = int(case.inputs["episode_valid_responses"]), case.params["n_episodes"]
    weight = row_weight(Reduction("seq_mean_token_mean"), TokenCounts(length, 0, episodes, 0, 0, 0, 0))
    kl = masked_sum(k1(old, logprobs), mask)
    return {"loss": weight * masked_sum(values, mask), "clipfrac": sums["clip_ratio"] / length, "ppo_kl": kl / length}


def dpo_loss(case: Case) -> dict[str, Any]:
    """Each answer is one token here; the reference is left out."""
    chosen, rejected = (_tensor(case.inputs[name]) for name in ("chosen", "rejected"))
    none, one = torch.zeros_like(chosen), torch.ones_like(chosen)
    dpo = DPOConfig(beta=case.params["beta"], reference_free=True)
    return {"loss": pair_loss(Pairs(chosen, rejected, none, none, one, one), dpo).mean()}


def _algorithm(case: Case) -> AlgorithmConfig:
    given = {**case.params, "use_decoupled_loss": case.inputs["rollout_per_token_logps"] is not None}
    return cosmos({f"train.train_policy.{name}": value for name, value in given.items()}).trainer.algorithm


def _samples(inputs: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return the trained tokens of each row; padding and prompts are not among Cosmos-RL's log-probabilities."""
    lengths = _tensor(inputs["cu_seqlens"]).diff().int().tolist()
    advantages = _tensor(inputs["current_advantages"])
    if advantages.ndim > 1:
        advantages = advantages[_tensor(inputs["logprob_masks"]) > 0]
    current = _tensor(inputs["current_token_logps"])
    packed = {
        "logprobs": current,
        "old": _tensor(inputs["old_per_token_logps"]),
        "advantages": advantages,
        "mask": torch.ones_like(current),
        "zeros": torch.zeros_like(current),
    }
    if inputs["rollout_per_token_logps"] is not None:
        packed["rollout"] = torch.tensor([value for row in inputs["rollout_per_token_logps"] for value in row])
    if inputs["ref_per_token_logps"] is not None:
        packed["reference"] = _tensor(inputs["ref_per_token_logps"])
    parts = {name: values.split(lengths) for name, values in packed.items()}
    return [{name: part[at] for name, part in parts.items()} for at in range(len(lengths))]


def _tensor(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


ADAPTERS = {
    "compute_loss": compute_loss,
    "masked_mean": masked_mean,
    "vla_chunk_loss": vla_chunk_loss,
    "dpo_loss": dpo_loss,
}
