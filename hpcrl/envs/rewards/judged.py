"""The reward of samples that a reward model scores when their group is finished: as a scorer, beside the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from hpcrl.config.sections.environment import REWARD_MODEL, EnvironmentConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.rewards.response import Response
from hpcrl.types import GroupMeta, TurnMeta


def rewarded_later(_response: Response) -> Turn:
    """Reward a response with nothing, and end its sample: the reward model scores it later."""
    return Turn([], 0.0, done=True)


@dataclass(frozen=True)
class JudgedRewards:
    """What scores are worth.

    Attributes:
        weight, clip_min, clip_max: of `environment.reward_model`.
        stopped_only: `generator.zero_reward_on_non_stop`.
    """

    weight: float
    clip_min: float
    clip_max: float
    stopped_only: bool = False

    @classmethod
    def of(cls, environment: EnvironmentConfig, *, stopped_only: bool) -> JudgedRewards:
        own = environment.reward_model
        return cls(own.weight, own.clip_min, own.clip_max, stopped_only)

    def complete(self, group: GroupMeta, scores: Sequence[float | None]) -> GroupMeta:
        """Return a finished group with complete rewards.

        A sample whose environment failed, or at which the reward model did, counts as the mean of the others, so that it moves no baseline.

        Args:
            scores: of each sample, by the reward model; None: it failed at the sample.
        """
        worth = [0.0 if one is None else self.weight * min(max(one, self.clip_min), self.clip_max) for one in scores]
        counted = [
            sample.reward + (0.0 if self.stopped_only and sample.stop_reason != "stop" else value)
            for sample, value in zip(group.samples, worth, strict=True)
        ]
        failed = [sample.stop_reason == "failed" for sample in group.samples]
        left_out = [one or score is None for one, score in zip(failed, scores, strict=True)]
        others = [reward for reward, out in zip(counted, left_out, strict=True) if not out]
        neutral = mean(others) if others else 0.0
        rewards = [neutral if out else reward for reward, out in zip(counted, left_out, strict=True)]
        samples = [
            replace(
                sample,
                reward=reward,
                raw_reward=sample.raw_reward + value,
                env_metrics=sample.env_metrics if score is None else {**sample.env_metrics, REWARD_MODEL: score},
                model_reward=None if score is None and not one else reward - sample.reward,
                turns=_with_reward(sample.turns, reward - sample.reward),
            )
            for sample, reward, value, score, one in zip(group.samples, rewards, worth, scores, failed, strict=True)
        ]
        return replace(group, samples=samples, judged=True)


def _with_reward(turns: Sequence[Sequence[TurnMeta]], reward: float) -> Sequence[Sequence[TurnMeta]]:
    """Return the turns of a sample with a further reward of the last one."""
    if not (turns and turns[-1]):
        return turns
    last = turns[-1][-1]
    return [*turns[:-1], [*turns[-1][:-1], last._replace(reward=last.reward + reward)]]
