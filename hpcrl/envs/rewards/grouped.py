"""The registry of group rewards, which compare the samples of a group, and their weighted sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from hpcrl.config import EnvironmentConfig
from hpcrl.config.import_path import find
from hpcrl.envs.base import finite, user_code
from hpcrl.envs.rewards.answers import after_thought
from hpcrl.envs.rewards.pairwise import pairwise_judge
from hpcrl.envs.rewards.response import GroupSample
from hpcrl.envs.rewards.rubric import rubric_judge_of_each
from hpcrl.errors import ServiceError, UserCodeError

_SETTING = "environment.group_reward_function"
_NGRAM = 3


def own(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    """Return the reward that each sample has by itself, from its environment or named rewards.

    Formula:
        r
    Use:
        in a sum with the others, which take its place without it
    """
    return [sample.reward for sample in group]


def rank(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    """Return the rank of each sample's own reward in its group, from -1 for the lowest to 1 for the highest; equal rewards share one.

    Formula:
        (samples with a lower r - samples with a higher r) / (n - 1)
    Use:
        own rewards of any scale or with outliers, such as a reward service's
    """
    others = max(1, len(group) - 1)
    return [
        sum((sample.reward > other.reward) - (sample.reward < other.reward) for other in group) / others
        for sample in group
    ]


def best(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    """Return 1 for each sample whose own reward no other one of the group exceeds, else 0.

    Formula:
        1 if r is the highest of the group
    Use:
        only the best of n responses counts afterwards
    """
    highest = max(sample.reward for sample in group)
    return [float(sample.reward == highest) for sample in group]


def unique(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    """Return each sample's own reward, where it is positive divided by the number of samples with the same answer.

    Answers are compared behind </think>, but for white space. A negative reward stays as it is.

    Formula:
        r / copies of the answer in the group if r > 0, else r
    Use:
        open tasks with many right answers, where the policy repeats one of them
    """
    answers = [" ".join(words) for words in map(_words, group)]
    copies = Counter(answers)
    return [
        sample.reward / copies[answer] if sample.reward > 0 else sample.reward
        for sample, answer in zip(group, answers, strict=True)
    ]


def distinct(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    """Return the share of each answer's different three-word sequences that no other answer of the group has, from 0 to 1.

    It compares n-grams as distinct-n does (arXiv:1510.03055), but between samples. Words end at white space; an answer of fewer than three
    is one sequence, and an empty one is worth 0.

    Formula:
        share of an answer's 3-grams that are in no other
    Use:
        creative writing, with a small weight beside `own`; it pays nonsense too
    """
    ngrams = [_ngrams(_words(sample)) for sample in group]
    answers = Counter(ngram for one in ngrams for ngram in one)
    return [sum(answers[ngram] == 1 for ngram in one) / max(1, len(one)) for one in ngrams]


def short(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    """Return what each sample's tokens are worth beside the others' (Kimi k1.5, arXiv:2501.12599, section 2.3.3).

    From 0.5 for the fewest to -0.5 for the most, over all turns; a sample without a positive reward of its own earns nothing by being
    short. All are 0 where the samples are equally long.

    Formula:
        s = 1/2 - (tokens - fewest) / (most - fewest) if r > 0, else min(0, s)
    Use:
        answers or agents' turns grow without a gain: with a small weight beside `own`, once the policy solves a good part of the tasks
    """
    tokens = [sample.n_tokens for sample in group]
    fewest, most = min(tokens), max(tokens)
    if fewest == most:
        return [0.0] * len(group)
    worth = [0.5 - (count - fewest) / (most - fewest) for count in tokens]
    return [one if sample.reward > 0 else min(0.0, one) for one, sample in zip(worth, group, strict=True)]


GroupReward = Callable[[Sequence[GroupSample], EnvironmentConfig], Iterable[float | ServiceError]]
"""What each sample of a group is worth, finite numbers in the order of the samples. It may be called in any thread.

An error in the place of a number costs that sample alone, where an error that is raised costs the group.
The second argument is the section `environment`, as of a `Reward`. Samples that failed are not in the group.
"""

GROUP_REWARDS: dict[str, GroupReward] = {
    "own": own,
    "rank": rank,
    "best": best,
    "unique": unique,
    "distinct": distinct,
    "short": short,
    "pairwise_judge": pairwise_judge,
    "rubric_judge": rubric_judge_of_each,
}


class WeightedGroupRewards:
    """Returns the group rewards of samples by name.

    Args:
        weights: a name in `GROUP_REWARDS`, or "package.module:function" for a user's own, to its weight; 0: only reported.

    Attributes:
        own_weight: of the samples' own rewards.
    """

    def __init__(self, weights: Mapping[str, float], environment: EnvironmentConfig) -> None:
        self._functions = {name: find(_SETTING, name, GROUP_REWARDS) for name in weights}
        self._weights, self._environment = weights, environment
        self.own_weight = weights.get("own", 0.0)

    def __call__(self, group: Sequence[GroupSample]) -> list[dict[str, float] | ServiceError]:
        """Return each sample's value of each group reward, unweighted, or the error of a sample that has failed.

        Raises:
            HpcrlError: a reward failed; UserCodeError also where it returns no finite number for each sample. The message names it.
        """
        columns = {name: self._values(name, reward, group) for name, reward in self._functions.items()}
        found = list[dict[str, float] | ServiceError]()
        for at in range(len(group)):
            numbers, failed = dict[str, float](), list[ServiceError]()
            for name, column in columns.items():
                if isinstance(value := column[at], ServiceError):
                    failed.append(type(value)(f"group reward {name!r}: {value}"))
                else:
                    numbers[name] = value
            found.append(failed[0] if failed else numbers)
            with user_code("weighted sum of group rewards"):
                finite(self.added(numbers))
        return found

    def added(self, values: Mapping[str, float]) -> float:
        """Return the weighted sum of a sample's values, but for its own reward."""
        return sum(self._weights[name] * value for name, value in values.items() if name != "own")

    def _values(self, name: str, reward: GroupReward, group: Sequence[GroupSample]) -> list[float | ServiceError]:
        with user_code(f"group reward {name!r}"):
            return values_of(reward, group, self._environment)


def values_of(
    reward: GroupReward, group: Sequence[GroupSample], environment: EnvironmentConfig
) -> list[float | ServiceError]:
    """Return the values of a group reward.

    Raises:
        UserCodeError: they are no finite numbers, or not one for each sample.
    """
    found = reward(group, environment)
    given = found if isinstance(found, Iterable) else []
    values = [each if isinstance(each, ServiceError) else finite(each) for each in given]
    if len(values) != len(group):
        raise UserCodeError(f"expected a list of {len(group)} numbers, one for each sample, found {found!r:.80}")
    return values


def _words(sample: GroupSample) -> list[str]:
    return after_thought(sample.text).split()


def _ngrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    if not words:
        return set()
    return {tuple(words[at : at + _NGRAM]) for at in range(max(1, len(words) - _NGRAM + 1))}
