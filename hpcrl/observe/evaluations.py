"""Reads finished evaluations from disk, and compares two of them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import tomli

from hpcrl.config import GeneratorConfig
from hpcrl.errors import DataError
from hpcrl.observe.scores import ScoreDifference, by_source, compare, of_prompts, own_rewards, solved_by
from hpcrl.rundir.eval_dumps import dumped_samples
from hpcrl.rundir.layout import Run

_MOST_SHOWN = 5


@dataclass(frozen=True)
class EvaluatedPrompt:
    """A prompt of an evaluation.

    Attributes:
        group_id: of its samples.
        messages: chat messages that it begins with.
        rewards, env_metrics, response_lengths, stop_reasons: of its samples.
    """

    group_id: str
    messages: list[dict[str, str]]
    data_source: str
    rewards: list[float]
    env_metrics: list[Mapping[str, float]]
    response_lengths: list[int]
    stop_reasons: list[str]

    @classmethod
    def of(cls, group_id: str, lines: Sequence[Mapping[str, Any]]) -> EvaluatedPrompt:
        first = lines[0]
        return cls(
            group_id=group_id,
            messages=first["prompt"],
            data_source=first["data_source"],
            rewards=[float(line["score"]) for line in lines],
            env_metrics=[line["env_metrics"] for line in lines],
            response_lengths=[response_tokens(line) for line in lines],
            stop_reasons=[line["stop_reason"] for line in lines],
        )

    @property
    def mean_reward(self) -> float:
        """Of the samples that did not fail, of which there is one at least."""
        return fmean(own_rewards(self))


def response_tokens(line: Mapping[str, Any]) -> int:
    """Return how many tokens of a dumped sample the policy chose."""
    return sum(part.get("tokens") or 0 for part in line["parts"] if part["by"] == "policy")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        version: of the weights.
        prompts: in the order of the dataset.
    """

    run: Run
    version: int
    prompts: list[EvaluatedPrompt]

    @classmethod
    def read(cls, run: Run, version: int | None = None) -> Evaluation:
        """Return an evaluation, the newest one that is over where no version is named.

        Raises:
            RunError: there is none, or its samples were not written.
            DataError: a file is damaged.
        """
        chosen, samples = dumped_samples(run, version)
        groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for (group_id, _), line in samples.items():
            groups[group_id].append(line)
        return cls(run, chosen, [EvaluatedPrompt.of(group_id, lines) for group_id, lines in groups.items()])

    @property
    def name(self) -> str:
        return f"{self.run.name}@{self.version}"

    @property
    def success_reward(self) -> float:
        return success_reward_of(self.run)

    def by_prompt(self) -> dict[tuple[str, str, int], EvaluatedPrompt]:
        """Return the prompts by what makes them the same in another evaluation: source, messages, and which of several equal ones it is."""
        seen, found = Counter[tuple[str, str]](), dict[tuple[str, str, int], EvaluatedPrompt]()
        for prompt in self.prompts:
            key = prompt.data_source, json.dumps(prompt.messages)
            found[(*key, seen[key])] = prompt
            seen[key] += 1
        return found


def success_reward_of(run: Run) -> float:
    """Return generator.success_reward of a run, the default where its configuration lacks it or cannot be read."""
    with suppress(OSError, ValueError, AttributeError):
        found = tomli.loads(run.config.read_text(encoding="utf-8")).get("generator", {}).get("success_reward")
        return float(GeneratorConfig.success_reward if found is None else found)
    return GeneratorConfig.success_reward


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same prompts.

    Attributes:
        prompts: that both have, by source.
        means: of each, by metric as `scores` names it.
        differences: by metric.
        only: prompts that only the first, or only the second has.
        solved: as of `solved_by`, in both.
        worst: those whose mean reward fell most, of both; none of which all samples failed.
    """

    prompts: dict[str, int]
    means: dict[str, tuple[float, float]]
    differences: dict[str, ScoreDifference]
    only: tuple[int, int]
    solved: str
    worst: list[tuple[EvaluatedPrompt, EvaluatedPrompt]]


def compared(before: Evaluation, after: Evaluation, success_reward: float) -> Comparison:
    """Compare two evaluations by the prompts that both have. Raises DataError where they have none in common.

    Args:
        success_reward: reward from which on a sample has solved its prompt.
    """
    first, second = before.by_prompt(), after.by_prompt()
    pairs = [(first[key], second[key]) for key in first if key in second]
    if not pairs:
        raise DataError(
            f"{before.name} and {after.name} have no prompt in common: they are evaluations of other data, or their environments begin otherwise"
        )
    others = {id(mine): theirs for mine, theirs in pairs}
    means, differences = dict[str, tuple[float, float]](), dict[str, ScoreDifference]()
    sources = by_source([mine for mine, _ in pairs])
    for source, members in sources.items():
        ours, theirs = (
            of_prompts(those, success_reward) for those in (members, [others[id(prompt)] for prompt in members])
        )
        for name in ours.keys() & theirs.keys():
            values = [
                (mine, other)
                for mine, other in zip(ours[name], theirs[name], strict=True)
                if mine is not None and other is not None
            ]
            if values:
                first_values, second_values = zip(*values, strict=True)
                means[f"eval/{source}/{name}"] = fmean(first_values), fmean(second_values)
                differences[f"eval/{source}/{name}"] = compare(first_values, second_values)
    scored = [pair for pair in pairs if all(map(own_rewards, pair))]
    fallen = sorted(scored, key=lambda pair: pair[1].mean_reward - pair[0].mean_reward)
    return Comparison(
        prompts={source: len(members) for source, members in sources.items()},
        means=means,
        differences=differences,
        only=(len(first) - len(pairs), len(second) - len(pairs)),
        solved=solved_by([*before.prompts, *after.prompts], success_reward),
        worst=[pair for pair in fallen[:_MOST_SHOWN] if pair[1].mean_reward < pair[0].mean_reward],
    )
