"""Cosmos-RL's on-policy distillation: rows of positions become the trained tokens laid end to end."""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.algorithms.distillation import jensen_shannon, teacher_advantages
from hpcrl.algorithms.kl import k1
from hpcrl.algorithms.losses import sample_means
from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.trainer.loss import build_objective
from hpcrl.types import MicroBatch
from tests.golden.adapters.converted import cosmos
from tests.golden.adapters.packed import sample_weights
from tests.golden.case import Case
from tests.golden.distillation import selected_logprobs


def teacher(case: Case) -> dict[str, Any]:
    """Advantages of a batch, from the sampled token or from the k best; the policy's log-probabilities are packed already."""
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    trained = inputs["logprob_masks"]
    lengths = inputs["cu_seqlens"].diff().tolist()
    policy, others = inputs["current_logprobs"], inputs["teacher_logprobs"][trained]
    name = f"teacher_kl_jsd_top{case.params['top_k']}" if case.params["top_k"] else "teacher_kl_reversed"
    divergences = _divergences(case, policy, others)
    mask = torch.ones_like(divergences)
    zeros = torch.zeros_like(divergences)
    coef, discount = case.params["kl_penalty_coef"], case.params["kl_discount_factor"]

    def advantages(given: torch.Tensor, discount: float) -> torch.Tensor:
        return teacher_advantages(given, divergences, mask, lengths, kl_penalty_coef=coef, kl_discount_factor=discount)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return sample_means(values, mask, torch.tensor([len(values)]))[0]

    return {
        "advantages": advantages(inputs["current_advantages"][trained], discount),
        "metrics": {
            name: mean(divergences),
            "teacher_kl_advantages": mean(advantages(zeros, 0.0)),
            "teacher_kl_advantages_discounted": mean(advantages(zeros, discount)),
        },
    }


def end_to_end(case: Case) -> dict[str, Any]:
    """Loss of the product and its gradient by the logits; the policy is its own old policy.

    A mask tells the positions whose next token is trained; ids are at that token's position, the teacher's values at the one before.
    """
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    logits, trained = inputs["logits"].requires_grad_(), inputs["logprob_masks"]
    lengths = trained.sum(-1).tolist()
    logprobs = selected_logprobs(logits[trained], inputs["input_ids"].roll(-1, 1)[trained][:, None])[:, 0]
    policy = None
    if case.params["top_k"]:
        policy = selected_logprobs(logits[trained], inputs["topk_indices"].roll(-1, 1)[trained])
        divergences = _divergences(case, policy, inputs["teacher_topk_logprobs"][trained])
    else:
        divergences = _divergences(case, logprobs.detach(), inputs["teacher_logprobs"][trained])
    mask, zeros = torch.ones_like(logprobs), torch.zeros_like(logprobs)
    settings = DistillationConfig(
        enable=True, top_k=case.params["top_k"], jsd_beta=case.params["jsd_beta"],
        kl_penalty_coef=case.params["kl_penalty_coef"], kl_discount_factor=case.params["kl_discount_factor"],
    )  # fmt: skip
    given = inputs["reward_advantages"][trained]
    coefficients = {"kl_penalty_coef": settings.kl_penalty_coef, "kl_discount_factor": settings.kl_discount_factor}
    advantages = teacher_advantages(given, divergences, mask, lengths, **coefficients)
    weights = torch.tensor(sample_weights(Reduction("token_mean"), lengths))
    ids = torch.zeros(len(mask), dtype=torch.int64)
    batch = MicroBatch(
        token_ids=ids, positions=ids, lengths=lengths, labels=ids, loss_mask=mask,
        weights=weights.repeat_interleave(torch.tensor(lengths)), nll_weights=zeros, rollout_logprobs=logprobs.detach(),
        old_logprobs=logprobs.detach(), advantages=given if policy is not None else advantages,
        teacher_top=None if policy is None else inputs["teacher_topk_logprobs"][trained],
        teacher_ids=None if policy is None else inputs["topk_indices"].roll(-1, 1)[trained],
    )  # fmt: skip
    loss, _ = build_objective(_algorithm(case), settings)(batch, logprobs, zeros, policy)
    loss.backward()
    return {"loss": loss.detach(), "advantages": advantages.detach(), "grad_logits": logits.grad}


def top_k_logprobs(case: Case) -> dict[str, Any]:
    logits, ids, trained = (torch.tensor(case.inputs[name]) for name in ("logits", "input_ids", "logprob_masks"))
    ends = [0, *trained.sum(-1).cumsum(0).tolist()]
    return {"logps": selected_logprobs(logits[trained], ids.roll(-1, 1)[trained]), "cu_seqlens": ends}


def _divergences(case: Case, policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return jensen_shannon(policy, teacher, case.params["jsd_beta"]) if case.params["top_k"] else k1(policy, teacher)


def _algorithm(case: Case) -> AlgorithmConfig:
    names = ("epsilon_low", "epsilon_high", "lower_bound_ratio")
    return cosmos({f"train.train_policy.{name}": case.params[name] for name in names}).trainer.algorithm


ADAPTERS = {
    "compute_teacher_*_advantages": teacher,
    "distill_end_to_end": end_to_end,
    "compute_logprobs_for_top_k_indices": top_k_logprobs,
}
