"""Dynamic sampling: drops or replaces groups whose samples all have the same reward. Pure logic on metadata.

filter    such a group is dropped as soon as it is finished, and another prompt is generated in its place (DAPO, arXiv:2503.14476, section
          3.2). SkyRL generates whole batches and discards surplus good groups; here only missing groups are generated.
replace   in a complete batch, good groups take the places of such groups (POLARIS). If too few groups are good, the whole batch is
          dropped and generated again.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hpcrl.algorithms.filters import filter_values, is_worth_training, named_rewards
from hpcrl.config.sections.algorithm import OWN_REWARD, DynamicSamplingConfig
from hpcrl.types import GroupMeta

_SECTION = "trainer.algorithm.dynamic_sampling"
_SETTING = f"{_SECTION}.max_sample_batches"


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling by the settings `trainer.algorithm.dynamic_sampling`.

    Attributes:
        metrics: `trainer.algorithm.filter_reward_metric`.
        seed: `trainer.seed`.
        later: metrics that groups have only when they are scored.
        rewards: names in `trainer.algorithm.gdpo.rewards`, which all groups must have: one that nobody reports is found with the first
            finished group, not when a whole batch is to be trained.
    """

    config: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    metrics: Sequence[str] = ()
    seed: int = 0
    later: Collection[str] = ()
    rewards: Collection[str] = ()

    def is_good(self, group: GroupMeta) -> bool:
        """Return whether the group is worth training, by `is_worth_training`."""
        return is_worth_training(group, self.metrics)

    def can_judge(self, group: GroupMeta) -> bool:
        """Return whether the group has all metrics and rewards that a finished one has."""
        asked = {*self.metrics, *self.rewards} - {*self.later, OWN_REWARD}
        return all(any(name in sample.env_metrics for sample in group.samples) for name in asked)

    def keeps(self, group: GroupMeta) -> bool:
        """Return whether a finished group may train.

        Raises:
            DataError: the group lacks one of the metrics or rewards.
        """
        for name in self.rewards:
            named_rewards(group, name)
        return self.config.type != "filter" or self.is_good(group)

    def worth(self, group: GroupMeta) -> float | None:
        """Return the mean of the group's metric over its samples; None where all failed."""
        values = filter_values(group, self.metrics)
        return fmean(values) if values else None

    def chosen(self, step: int, groups: Sequence[GroupMeta]) -> list[GroupMeta] | None:
        """Return the groups that train in `step`, of its complete batch; None: none do, and the batch is to be generated again.

        With `replace`, copies of good groups are drawn without replacement as long as there are enough. The seed and the step determine
        them, so that a restart chooses alike. A copy is a group of its own: its samples are compared with each other. SkyRL merges copies
        into one group, so that each reward counts several times in the unbiased deviation of grpo, and advantages become larger.
        """
        if self.config.type != "replace":
            return list(groups)
        good = [group for group in groups if self.is_good(group)]
        bad = len(groups) - len(good)
        if not len(good) > len(groups) * self.config.min_replace_ratio:
            return None
        chance = random.Random(f"replace-{self.seed}-{step}")
        drawn = iter(chance.sample(good, bad) if bad <= len(good) else chance.choices(good, k=bad))
        return [group if self.is_good(group) else next(drawn) for group in groups]

    def exhausted(self, batch_size: int, kept: int, dropped: int) -> bool:
        """Return whether as many groups as may be were generated for a step, and yet its batch is not complete.

        Args:
            kept: groups of the step that are finished and may train.
            dropped: groups of the step that were dropped.
        """
        most = self.config.max_sample_batches
        return self.config.type is not None and 0 < most * batch_size <= kept + dropped and kept < batch_size

    def explain(self, step: int, kept: int, dropped: int) -> str:
        """Return the message for a user when the batches are exhausted."""
        by = f"the sums of {', '.join(self.metrics)}" if self.metrics else "the rewards"
        if self.config.type == "replace":
            why = (
                f"in no batch did {by} differ among the samples of more than {_SECTION}.min_replace_ratio = "
                f"{self.config.min_replace_ratio} of the groups"
            )
        else:
            why = f"{dropped} of them dropped, since {by} of their samples are all equal"
        return (
            f"step {step}: {kept + dropped} groups were generated, and {why}; that is {_SETTING} = "
            f"{self.config.max_sample_batches} batches. Use prompts that the policy answers well sometimes but not always, raise "
            f"generator.n_samples_per_prompt, or raise {_SETTING} (0: no bound) and resume"
        )
