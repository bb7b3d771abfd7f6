"""Training of a reward model: the loss of a mini-batch of pairs, and the measure of a validation set.

A sample's score stands at its last position, all other outputs of the model are 0. The loss is the mean over the pairs of the whole
mini-batch, independent of packing, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hpcrl.algorithms.losses import sample_means, sample_sums
from hpcrl.algorithms.preferences import bradley_terry
from hpcrl.config.sections.reward_model import RewardModelConfig
from hpcrl.trainer.backends.base import Objective
from hpcrl.trainer.offline.preferences import PER_PAIR
from hpcrl.trainer.packing import PackedRows
from hpcrl.types import MicroBatch


def build_reward_objective(settings: RewardModelConfig) -> Objective:
    """Return the objective of a mini-batch of pairs, whose samples have the weights of `PAIRS_REDUCTION`."""

    def objective(batch: MicroBatch, scores_P: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask_P, lengths_B = batch.loss_mask, batch.cu_seqlens.diff()
        chosen_N, rejected_N = _pairs(scores_P, batch.lengths)
        count = len(chosen_N)
        weights_N = sample_means(batch.weights, mask_P, lengths_B)[: 2 * count].view(count, 2).sum(1)
        assert batch.margins is not None
        losses_N = _losses(chosen_N, rejected_N, _margins(batch.margins, lengths_B), settings)
        loss = (
            weights_N * losses_N
        ).sum() + 0.0 * scores_P.sum()  # of no pair at all it has a gradient too, which is 0
        sums = {
            "tokens": mask_P.sum(),
            "samples": mask_P.new_tensor(2.0 * count),
            "pairs": mask_P.new_tensor(float(count)),
            "final_loss": loss,
            "policy_loss": loss,
            **{PER_PAIR + name: values_N.sum() for name, values_N in _metrics(chosen_N, rejected_N).items()},
        }
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


@dataclass(frozen=True)
class RewardMeasure:
    """Measure (build.py) of a set of pairs: the trained loss, and the metrics of training, as means over the set."""

    settings: RewardModelConfig

    def sums(self, samples: PackedRows, scores_P: torch.Tensor) -> dict[str, float]:
        chosen_N, rejected_N = _pairs(scores_P.double(), samples.lengths)
        margins_N = _margins(samples.rewards, torch.tensor(samples.lengths, dtype=torch.int64))
        losses_N = _losses(chosen_N, rejected_N, margins_N, self.settings)
        values = {"loss": losses_N, **_metrics(chosen_N, rejected_N)}
        return {name: values_N.sum().item() for name, values_N in values.items()} | {"pairs": float(len(chosen_N))}

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {name: value / sums["pairs"] for name, value in sums.items() if name != "pairs"}


def _pairs(scores_P: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the chosen and of the rejected answers, [N] each: samples in turns; one sample alone is none."""
    ends = [end - 1 for end in accumulate(lengths)][: len(lengths) // 2 * 2]
    scores_N2 = scores_P[torch.tensor(ends, dtype=torch.int64, device=scores_P.device)].view(-1, 2)
    return scores_N2[:, 0], scores_N2[:, 1]


def _margins(margins_P: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the margin of each pair, [N]; it stands somewhere in the chosen answer."""
    return sample_sums(margins_P, torch.ones_like(margins_P), lengths_B)[: len(lengths_B) // 2 * 2 : 2]


def _losses(
    chosen_N: torch.Tensor, rejected_N: torch.Tensor, margins_N: torch.Tensor, settings: RewardModelConfig
) -> torch.Tensor:
    return bradley_terry(chosen_N, rejected_N, margins_N, settings.center_rewards_coefficient)


def _metrics(chosen_N: torch.Tensor, rejected_N: torch.Tensor) -> dict[str, torch.Tensor]:
    chosen_N, rejected_N = chosen_N.detach(), rejected_N.detach()
    return {
        "rewards/chosen": chosen_N,
        "rewards/rejected": rejected_N,
        "rewards/margins": chosen_N - rejected_N,
        "rewards/accuracies": (chosen_N > rejected_N).to(chosen_N.dtype),
    }
