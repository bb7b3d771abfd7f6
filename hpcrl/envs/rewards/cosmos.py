"""Reward functions of a launch script of Cosmos-RL that get whole groups, as group rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import GroupSample


def of_group(function: Callable[..., Any]) -> Callable[[Sequence[GroupSample], EnvironmentConfig], Iterable[float]]:
    """Return the group reward that a function for `train.train_policy.group_reward_calculation` gives.

    It is called as by `compute_per_reward_func` of Cosmos-RL (cosmos_rl/dispatcher/algo/reward.py): with the samples' texts and the ground truth
    of their row. `prompt` has the messages of the row. `config` is the section `environment` here, whose `custom` is that of the converted
    file; `data_packer` and `tokenizer` are None. Of a pair the numbers count, and what its dictionaries report is left out.

    Args:
        function: returns a list of numbers, one for each text, or a pair of such a list and of a list of dictionaries.
    """

    def reward(group: Sequence[GroupSample], environment: EnvironmentConfig) -> Iterable[float]:
        texts, first = [sample.text for sample in group], group[0]
        found = function(
            texts, first.ground_truth, prompt=first.messages, config=environment, data_packer=None, tokenizer=None
        )
        return found[0] if isinstance(found, tuple) and len(found) == 2 else found

    return reward
