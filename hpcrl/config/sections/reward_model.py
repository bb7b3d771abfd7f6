"""Section `trainer.reward_model`: how a reward model is trained from pairs of a chosen and a rejected answer. Names: TRL's."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.setting import NOT_NEGATIVE, setting

HEAD = "score"
"""Name of the head of transformers' classifiers of causal language models."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    center_rewards_coefficient: float = setting(0.0, range=NOT_NEGATIVE)
    """Weight of the squared sum of both scores of a pair in the loss, which keeps scores near 0; TRL's documents use 0.01."""
