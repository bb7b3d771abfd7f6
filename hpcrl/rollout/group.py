"""A finished group: its rows, with rules for truncated and failed samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from statistics import fmean

import numpy as np

from hpcrl.algorithms.prefixes import common_prefix
from hpcrl.config import GeneratorConfig
from hpcrl.envs.base import Messages
from hpcrl.types import GroupMeta, Row, SampleMeta, TurnMeta, Work


@dataclass(frozen=True)
class Group:
    """The finished samples of one prompt.

    Attributes:
        rows: of each sample: itself, or with step-wise trajectories its turns.
        version: that the engine held when the group began.
        conversations: of each sample the messages after its prompt.
        raw_rewards: of each sample from its environment, before rules on its stop reason and on failures.
        failures: what went wrong in samples whose environment failed.
        seconds: from claim to the last token.
        baseline: reward of the greedy response; None where there is none.
        cached_tokens: that the policy chose for those who had begun the group before.
        judged: each sample as a reward model that scores finished groups reads it, from its prompt on; empty: there is none.
    """

    work: Work
    version: int
    rows: list[list[Row]]
    conversations: list[Messages]
    raw_rewards: list[float]
    failures: list[str]
    seconds: float
    baseline: float | None = None
    cached_tokens: int = 0
    judged: list[Messages] = field(default_factory=list)

    @cached_property
    def samples(self) -> list[Row]:
        """All rows, as they lie in the group's file."""
        return [row for rows in self.rows for row in rows]

    @property
    def texts(self) -> list[str]:
        """The policy's last response in each sample, as the environment saw it."""
        said = ([m["content"] for m in messages if m["role"] == "assistant"] for messages in self.conversations)
        return [texts[-1] if texts else "" for texts in said]

    @property
    def _versions(self) -> np.ndarray:
        return np.concatenate([sample.versions for sample in self.samples])

    @property
    def oldest_version(self) -> int:
        versions = self._versions
        chosen = versions[versions >= 0]
        return int(chosen.min()) if len(chosen) else self.version

    @property
    def newest_version(self) -> int:
        return max(self.version, int(self._versions.max()))

    @cached_property
    def response_lengths(self) -> list[int]:
        """Tokens of each sample that the policy chose, trained or not."""
        chosen = [0, *(self._versions >= 0).cumsum().tolist()]
        ends = [0, *accumulate(sum(len(row.versions) for row in rows) for rows in self.rows)]
        return [chosen[end] - chosen[begin] for begin, end in pairwise(ends)]

    def meta(self, replica: int, path: str) -> GroupMeta:
        return GroupMeta(
            group_id=self.work.group_id,
            kind=self.work.kind,
            replica=replica,
            path=path,
            samples=self._sample_metas(),
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            data_source=self.work.prompt.data_source,
            seconds=self.seconds,
            baseline=self.baseline,
            failures=self.failures,
        )

    def _sample_metas(self) -> list[SampleMeta]:
        pairs = pairwise(self.samples)
        shared = iter([0, *(common_prefix(one.token_ids, other.token_ids) for one, other in pairs)])
        turns = turn_metas(self.rows) if self.work.kind == "train" else [()] * len(self.rows)
        return [
            SampleMeta(
                reward=sample_reward(rows),
                lengths=tuple(len(row.token_ids) for row in rows),
                response_length=response_length,
                stop_reason=rows[-1].stop_reason,
                env_metrics=rows[-1].env_metrics,
                raw_reward=raw_reward,
                shared=tuple(islice(shared, len(rows))),
                turns=own,
            )
            for rows, response_length, raw_reward, own in zip(
                self.rows, self.response_lengths, self.raw_rewards, turns, strict=True
            )
        ]


def turn_metas(samples: Sequence[Sequence[Row]]) -> Sequence[Sequence[Sequence[TurnMeta]]]:
    """Return the turns of each row of each sample of a group; nothing where each sample is one turn, all in the same state and without a role."""
    places = dict.fromkeys((turn.role, turn.anchor) for rows in samples for row in rows for turn in row.turns)
    several = any(len(rows) > 1 or len(rows[0].turns) > 1 for rows in samples)
    if not several and len(places) <= 1 and not any(role for role, _ in places):
        return [()] * len(samples)
    known = {place: number for number, place in enumerate(places)}
    return [[_turns_of(row, known) for row in rows] for rows in samples]


def _turns_of(row: Row, known: Mapping[tuple[str, str], int]) -> list[TurnMeta]:
    """Return the turns of a row; what lies behind the last one, as the reward of a failed sample, belongs to that."""
    bounds = [0, *(turn.end for turn in row.turns[:-1]), len(row.rewards)]
    return [
        TurnMeta(turn.end, float(row.rewards[start:end].sum()), turn.role, known[turn.role, turn.anchor])
        for turn, (start, end) in zip(row.turns, pairwise(bounds), strict=False)
    ]


def sample_reward(rows: Sequence[Row]) -> float:
    """Return the reward of a sample: the outcome, which its last row has."""
    return float(rows[-1].rewards.sum())


def apply_stop_reason(sample: Row, config: GeneratorConfig) -> Row:
    """Apply the rules for samples that did not end by themselves, or whose environment failed."""
    failed = sample.stop_reason == "failed"
    if sample.stop_reason == "stop":
        return sample
    if failed or config.zero_reward_on_non_stop:
        sample = replace(sample, rewards=np.zeros_like(sample.rewards))
    if failed or config.apply_overlong_filtering:
        sample = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    return sample


def neutralize_failed(samples: Sequence[list[Row]]) -> list[list[Row]]:
    """Return the samples of a group, each as its rows, with the failed ones given the mean reward of the others, so that they move no baseline."""
    rewards = [sample_reward(rows) for rows in samples if rows[-1].stop_reason != "failed"]
    if len(rewards) == len(samples):
        return list(samples)
    mean = fmean(rewards) if rewards else 0.0

    def neutral(rows: list[Row]) -> list[Row]:
        rewards_T = np.zeros_like(rows[-1].rewards)
        rewards_T[-1] = mean
        return [*rows[:-1], replace(rows[-1], rewards=rewards_T)]

    return [neutral(rows) if rows[-1].stop_reason == "failed" else rows for rows in samples]
