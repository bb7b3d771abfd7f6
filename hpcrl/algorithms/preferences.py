"""Losses of pairs of answers to one prompt, of which one is preferred, and of single answers with a label, from the log-probabilities of
whole answers.

A loss gives one number per pair, or per answer. It neither divides nor knows the mini-batch, whose loss is the mean over its pairs or
answers. Formulas are those of TRL's DPOTrainer 1.16, with which tests compare them; simpo and orpo, which compare with no reference, are
those of their papers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from hpcrl.algorithms.losses import sample_sums
from hpcrl.config.sections.dpo import DPOConfig

LIKELIHOOD = "sft"
"""The name in trainer.dpo.loss_type that is no loss of pairs: the cross entropy of the chosen answers, a mean over their tokens."""
_NEARLY_CERTAIN = -1e-6


@dataclass(frozen=True)
class Pairs:
    """What a loss knows of N pairs: [N] tensors.

    Attributes:
        chosen, rejected: log π of the answer, the sum over its trained tokens; they carry the gradient, the others do not.
        ref_chosen, ref_rejected: the same of the reference; 0 where there is none.
        chosen_tokens, rejected_tokens: trained tokens of the answer.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    @classmethod
    def of(
        cls,
        logprobs_P: torch.Tensor,
        ref_logprobs_P: torch.Tensor | None,
        mask_P: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> Pairs:
        """Return the pairs that samples laid end to end are, chosen and rejected in turns; one sample alone is none."""
        sums = [logprobs_P, torch.zeros_like(logprobs_P) if ref_logprobs_P is None else ref_logprobs_P, mask_P]
        whole = len(lengths_B) // 2 * 2
        columns = [sample_sums(values_P, mask_P, lengths_B)[:whole] for values_P in sums]
        (chosen, rejected), (ref_chosen, ref_rejected), tokens = ((column[::2], column[1::2]) for column in columns)
        return cls(chosen, rejected, ref_chosen, ref_rejected, *tokens)

    @property
    def chosen_ratio(self) -> torch.Tensor:
        """log π - log π_ref of the chosen answer, c in the formulas below."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> torch.Tensor:
        """log π - log π_ref of the rejected answer, r in the formulas below."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def margin_per_token(self) -> torch.Tensor:
        """c and r each divided by the tokens of its answer."""
        chosen = self.chosen_ratio / self.chosen_tokens.clamp(min=1)
        return chosen - self.rejected_ratio / self.rejected_tokens.clamp(min=1)

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean log-probability of a trained token of the chosen and of the rejected answer, without the reference."""
        return self.chosen / self.chosen_tokens.clamp(min=1), self.rejected / self.rejected_tokens.clamp(min=1)


Loss = Callable[[Pairs, DPOConfig], torch.Tensor]
"""(pairs, settings) -> loss [N]."""


def sigmoid(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return -log σ(β (c - r)) (DPO, arXiv:2305.18290, equation 7)."""
    return -logsigmoid(dpo.beta * pairs.margin)


def sigmoid_norm(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return -log σ(β (c/|chosen| - r/|rejected|)), so that length does not count (Tülu 3, arXiv:2411.15124, section 5.1.1)."""
    return -logsigmoid(dpo.beta * pairs.margin_per_token)


def hinge(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return max(0, 1 - β (c - r)) (SLiC-HF, arXiv:2305.10425, in the form of arXiv:2309.06657)."""
    return torch.relu(1 - dpo.beta * pairs.margin)


def ipo(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return (c/|chosen| - r/|rejected| - 1/(2 β))² (IPO, arXiv:2310.12036, equation 17; per token as its authors compute it)."""
    return (pairs.margin_per_token - 1 / (2 * dpo.beta)).square()


def robust(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return (-(1 - ε) log σ(β (c - r)) + ε log σ(-β (c - r))) / (1 - 2 ε), ε = label_smoothing (robust DPO, arXiv:2403.00409)."""
    kept, flipped = logsigmoid(dpo.beta * pairs.margin), logsigmoid(-dpo.beta * pairs.margin)
    return (dpo.label_smoothing * flipped - (1 - dpo.label_smoothing) * kept) / (1 - 2 * dpo.label_smoothing)


def bco_pair(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return -log σ(β c) - log σ(-β r) (BCO, arXiv:2404.04656), without its shift of rewards by their running mean, as TRL for pairs."""
    return -logsigmoid(dpo.beta * pairs.chosen_ratio) - logsigmoid(-dpo.beta * pairs.rejected_ratio)


def nca_pair(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return -log σ(β c) - (log σ(-β c) + log σ(-β r)) / 2 (NCA, arXiv:2402.05369)."""
    chosen, rejected = dpo.beta * pairs.chosen_ratio, dpo.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def apo_zero(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return 1 - σ(β c) + σ(β r) (APO-zero, arXiv:2408.06266, equation 7): for chosen answers better than the policy's."""
    return 1 - torch.sigmoid(dpo.beta * pairs.chosen_ratio) + torch.sigmoid(dpo.beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return σ(β c) + 1 - σ(β (c - r)) (APO-down, arXiv:2408.06266, equation 8): for chosen answers worse than the policy's."""
    return torch.sigmoid(dpo.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(dpo.beta * pairs.margin)


def simpo(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return -log σ(β (log π(chosen)/|chosen| - log π(rejected)/|rejected|) - γ), γ = simpo_gamma (SimPO, arXiv:2405.14734, equation 6)."""
    chosen, rejected = pairs.means
    return -logsigmoid(dpo.beta * (chosen - rejected) - dpo.simpo_gamma)


def orpo(pairs: Pairs, _: DPOConfig) -> torch.Tensor:
    """Return -log σ(log (odds(chosen) / odds(rejected))) (ORPO, arXiv:2403.07691, equations 4 and 7), where odds(y) = p / (1 - p).

    p is the geometric mean of the probabilities of the answer's tokens. The paper's loss adds the likelihood of the chosen answers: `sft`
    beside it; its λ is the weight of this loss.
    """
    chosen, rejected = (_log_odds(mean) for mean in pairs.means)
    return -logsigmoid(chosen - rejected)


def _log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) from log p; p is kept from 1, where odds are infinite."""
    bounded = logprobs.clamp(max=_NEARLY_CERTAIN)
    return bounded - torch.log(-torch.expm1(bounded))


PAIR_LOSSES: dict[str, Loss] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "bco_pair": bco_pair,
    "nca_pair": nca_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "orpo": orpo,
}


def loss_weights(dpo: DPOConfig) -> dict[str, float]:
    """Return the weight of each loss that is named; one that is named twice has the sum of its weights."""
    found: dict[str, float] = {}
    for name, weight in zip(dpo.loss_type, dpo.loss_weights or [1.0] * len(dpo.loss_type), strict=True):
        found[name] = found.get(name, 0.0) + weight
    return found


def pair_loss(pairs: Pairs, dpo: DPOConfig) -> torch.Tensor:
    """Return the loss of each pair, [N], without the likelihood of the chosen answers."""
    weighted = [
        weight * PAIR_LOSSES[name](pairs, dpo) for name, weight in loss_weights(dpo).items() if name != LIKELIHOOD
    ]
    return sum(weighted, start=torch.zeros_like(pairs.chosen))


def pair_metrics(pairs: Pairs, dpo: DPOConfig) -> dict[str, torch.Tensor]:
    """Return what TRL reports of pairs, [N] each, without gradient.

    Rewards are β times the log-ratio; of losses that compare with no reference β times the mean log-probability of a token.
    """
    answers = pairs.means if dpo.compares_tokens else (pairs.chosen_ratio, pairs.rejected_ratio)
    chosen, rejected = (dpo.beta * answer.detach() for answer in answers)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "logps/chosen": pairs.chosen.detach(),
        "logps/rejected": pairs.rejected.detach(),
    }


def unpaired_loss(
    ratios_N: torch.Tensor, desirable_N: torch.Tensor, shifts_N: torch.Tensor, dpo: DPOConfig
) -> torch.Tensor:
    """Return w (1 - σ(±β (c - z))) of each answer, [N]: + and w = desirable_weight of a desirable one, - and undesirable_weight else.

    With z = max(0, mean log-ratio of mismatched answers) it is KTO (arXiv:2402.01306, section 4.1), with z = 0 APO-zero of single answers
    (arXiv:2408.06266, equation 7). Both as TRL's KTOTrainer computes them.

    Args:
        ratios_N: c, log π - log π_ref of the answers; they carry the gradient.
        desirable_N: 1, or 0.
        shifts_N: z.
    """
    signs_N = 2 * desirable_N - 1
    weights_N = torch.where(desirable_N > 0, dpo.desirable_weight, dpo.undesirable_weight)
    return weights_N * torch.sigmoid(-dpo.beta * signs_N * (ratios_N - shifts_N))


def bradley_terry(
    chosen_N: torch.Tensor, rejected_N: torch.Tensor, margins_N: torch.Tensor, center: float
) -> torch.Tensor:
    """Return -log σ(r_c - r_r - m) + center (r_c + r_r)² of each pair, [N].

    The first term is the negative log-likelihood of the preferences (Bradley and Terry 1952; InstructGPT, arXiv:2203.02155, equation 1),
    with margins m as in Llama 2 (arXiv:2307.09288, equation 2). The second keeps scores near 0 (arXiv:2312.09244, section 2). Tests
    compare it with TRL's RewardTrainer 1.16.

    Args:
        chosen_N, rejected_N: scores.
        margins_N: by how much the chosen answer should be ahead; 0: at all.
        center: weight of the second term.
    """
    return -logsigmoid(chosen_N - rejected_N - margins_N) + center * (chosen_N + rejected_N).square()
