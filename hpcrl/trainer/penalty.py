"""The KL divergence from the reference as a price on each token's reward (trainer.algorithm.use_kl_in_reward)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpcrl.algorithms.kl import KL_ESTIMATORS, adapted
from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.trainer.packing import Row

_COEFFICIENT, _START = "kl_coef", "kl_coef_start"


class KlPenalty:
    """What one nat of divergence costs, which the adaptive controller changes after each batch.

    Args:
        carried: numbers of the checkpoint that training continues from. Another kl_loss_coef than its run had starts afresh.
    """

    def __init__(self, algorithm: AlgorithmConfig, carried: dict[str, float]) -> None:
        self._algorithm = algorithm
        self._adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
        self.coefficient = algorithm.kl_loss_coef
        if self._adaptive and carried.get(_START) == algorithm.kl_loss_coef:
            self.coefficient = carried[_COEFFICIENT]

    def carried(self) -> dict[str, float]:
        """Return what a checkpoint keeps of it."""
        if not self._adaptive:
            return {}
        return {_COEFFICIENT: self.coefficient, _START: self._algorithm.kl_loss_coef}

    def charge(self, rows: Sequence[Row], over_ranks: Callable[[Sequence[float]], list[float]]) -> dict[str, float]:
        """Fill in the penalties of this rank's samples, adapt the coefficient, and return loss/*; nothing if it is off.

        Every rank calls it, with rows that have old (or rollout) and reference log-probabilities.

        Returns:
            avg_kl: mean over samples of the mean over their trained tokens, in nats; avg_kl_max: mean over samples of the
            largest absolute value; kl_loss_coef: the coefficient that was charged.
        """
        if not self._algorithm.use_kl_in_reward:
            return {}
        mean = largest = 0.0
        for row in rows:
            divergence_T = self._divergence(row)
            row.penalties = self.coefficient * divergence_T
            mean += divergence_T.sum().item() / max(row.trained.sum().item(), 1.0)
            largest += divergence_T.abs().max().item()
        mean, largest, samples = over_ranks([mean, largest, float(len(rows))])
        charged, count = self.coefficient, max(samples, 1.0)
        self.adapt(mean / count, samples)
        return {"loss/avg_kl": mean / count, "loss/avg_kl_max": largest / count, "loss/kl_loss_coef": charged}

    def adapt(self, divergence: float, samples: float) -> None:
        """Change the coefficient after a batch, if it is adaptive; arguments as in `adapted`."""
        if self._adaptive:
            control = self._algorithm.kl_ctrl
            self.coefficient = adapted(self.coefficient, divergence, samples, control.kl_target, control.horizon)

    def _divergence(self, row: Row) -> torch.Tensor:
        """Return [T] float64, entry t of token t; 0 where nothing is trained."""
        assert row.ref_logprobs is not None
        reference_T = row.ref_logprobs.roll(1)
        if self._algorithm.use_rollout_logprobs_for_loss:
            old_T = row.sample.rollout_logprobs
        else:
            assert row.old_logprobs is not None
            old_T = row.old_logprobs.roll(1)
        estimate = KL_ESTIMATORS[self._algorithm.kl_estimator_type]
        return torch.where(row.trained > 0, estimate(old_T, reference_T, 1.0).double(), 0.0)
