"""Objective and validation measure of each trainer.mode."""

from __future__ import annotations

from typing import Protocol

import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.backends.base import Objective
from hpcrl.trainer.loss import build_objective, build_reduction
from hpcrl.trainer.offline.likelihood import LikelihoodMeasure, build_likelihood_objective
from hpcrl.trainer.offline.preferences import PAIRS_REDUCTION, PreferenceMeasure, build_preference_objective
from hpcrl.trainer.offline.rewards import RewardMeasure, build_reward_objective
from hpcrl.trainer.offline.unpaired import UnpairedMeasure, build_unpaired_objective
from hpcrl.trainer.packing import PackedRows


class Measure(Protocol):
    """Measure of a validation set."""

    def sums(self, samples: PackedRows, outputs_P: torch.Tensor, /) -> dict[str, float]:
        """Return sums over these samples, maybe none, with the same names for any of them.

        Args:
            outputs_P: log-probabilities of the policy, [P], or values of a reward model; log-probabilities of the reference, if there is
                one, are among the samples' scores.
        """
        ...

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a set from its sums; `loss` is always one."""
        ...


def objective_of(trainer: TrainerConfig) -> Objective:
    """Return the objective of a language model."""
    match trainer.mode:
        case "rl":
            return build_objective(trainer.algorithm, trainer.distillation)
        case "sft":
            return build_likelihood_objective(trainer.sft, trainer.distillation)
        case "dpo":
            build = build_unpaired_objective if trainer.unpaired else build_preference_objective
            return build(trainer.dpo)
        case "reward_model":
            return build_reward_objective(trainer.reward_model)


def reduction_of(trainer: TrainerConfig, max_seq_len: int) -> Reduction:
    """Return how the policy's loss becomes one number; arguments as of `build_reduction`."""
    of_answers = trainer.pairwise or trainer.unpaired
    return PAIRS_REDUCTION if of_answers else build_reduction(trainer.algorithm, max_seq_len)


def measure_of(trainer: TrainerConfig) -> Measure:
    """Return the measure of validation sets, where rows of datasets are trained."""
    if trainer.mode == "reward_model":
        return RewardMeasure(trainer.reward_model)
    if trainer.unpaired:
        return UnpairedMeasure(trainer.dpo)
    return PreferenceMeasure(trainer.dpo) if trainer.mode == "dpo" else LikelihoodMeasure()
