"""Queue of finished groups that scorers have yet to score. Pure logic, but for the clock of silent scorers.

A group waits for a score by each model, from the moment at which it is finished until a batch has it. Batches are composed as if there were
no scorers; one is only held back until its groups have all scores. So nothing of what admission proves about staleness and progress changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcrl.config.scorers import REWARD, role_of
from hpcrl.controller.replicas import MinReplicas, WorkerRegistry
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.errors import RunError
from hpcrl.rundir.process_names import scorer_name
from hpcrl.types import Batch, GroupMeta

Rewards = Mapping[str, Sequence[float | None]]
"""A reward model's scores of each sample of groups, by their ids; None: it failed at the sample."""


@dataclass
class _Scored:
    """A finished group that is in no batch yet.

    A reward model's scores are in its rewards as soon as they are there.

    Attributes:
        digests: of its scores, by model.
    """

    group: GroupMeta
    digests: dict[str, str]


class ScoreQueue:
    """The scores of one run.

    Args:
        models: name of the model of each scorer, scorer-0 first; empty: nothing is scored.
        judges: returns the names of the models that score a group of a data source; None: all do.
        rewards: what a reward model's scores of a group are worth; None: no scorer has one.
        needed: when there are too few scorers of a model, for each of them.

    Attributes:
        registry: of the scorers that call.
        taken_back: groups of scorers that had left or were silent.
    """

    def __init__(
        self,
        models: Sequence[str] = (),
        judges: Callable[[str], Sequence[str]] | None = None,
        rewards: JudgedRewards | None = None,
        needed: Sequence[MinReplicas] = (),
    ) -> None:
        self._judges, self._rewards, self.needed = judges, rewards, needed
        self._models = {scorer_name(number): model for number, model in enumerate(models)}
        self._groups = dict[str, _Scored]()
        self._at: dict[str, set[str]] = {scorer: set() for scorer in self._models}
        self._unscored: dict[str, dict[str, None]] = {model: {} for model in models}  # in the order of their ends
        self.registry, self.taken_back = WorkerRegistry(), 0

    @property
    def models(self) -> Collection[str]:
        return self._unscored

    @property
    def scorers(self) -> Collection[str]:
        return self._models

    @property
    def reward(self) -> bool:
        """Whether rewards of finished groups are complete only when they are scored."""
        return self._rewards is not None

    @property
    def waiting(self) -> int:
        """Groups that lack a score."""
        return sum(not self.has_all(each.group, each.digests) for each in self._groups.values())

    def has_all(self, group: GroupMeta, scores: Collection[str]) -> bool:
        """Return whether a group has the scores of all its models."""
        return set(scores) >= set(self._judges_of(group)) if self._models else True

    def _judges_of(self, group: GroupMeta) -> Collection[str]:
        return self._unscored if self._judges is None else self._judges(group.data_source)

    def add(self, groups: Iterable[GroupMeta], found: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Take finished groups.

        Args:
            found: digests of scores that they have already: model -> id of the group -> digest.
        """
        for group in groups if self._models else ():
            judges, there = self._judges_of(group), found or {}
            own = {model: there[model][group.group_id] for model in judges if group.group_id in there.get(model, ())}
            self._groups[group.group_id] = _Scored(group, own)
            for model in judges:
                if model not in own:
                    self._unscored[model][group.group_id] = None

    def claim(self, scorer: str, samples: int, holding: Collection[str]) -> list[GroupMeta]:
        """Return groups of about so many samples, one at least where there is any, which the scorer is to score with its model.

        Args:
            holding: ids of the groups that it has; what else it was given got lost with an answer.
        """
        self.release(scorer, holding)
        waiting, given = self._unscored[self._models[scorer]], list[GroupMeta]()
        while waiting and samples > 0:
            group_id = next(iter(waiting))
            del waiting[group_id]
            self._at[scorer].add(group_id)
            given.append(self._groups[group_id].group)
            samples -= len(given[-1].lengths)
        return given

    def complete(self, scorer: str, digests: Mapping[str, str], rewards: Rewards | None = None) -> list[str]:
        """Add scores, by the ids of the groups; return the groups that no longer wait for them: scored before, or not to be trained.

        Args:
            rewards: of the same groups, where the scorer has a reward model.

        Raises:
            RunError: a reward model names no rewards, or another one some; nothing is taken.
        """
        model, unwanted, rewards = self._models[scorer], list[str](), rewards or {}
        expected = digests.keys() if role_of(model) == REWARD else set[str]()
        if rewards.keys() != expected:
            raise RunError(f"{scorer}: expected rewards of {sorted(expected)}, found those of {sorted(rewards)}")
        for group_id, digest in digests.items():
            scored = self._groups.get(group_id)
            if scored is None or model in scored.digests:
                unwanted.append(group_id)
                continue
            scored.digests[model] = digest
            scored.group = self.rewarded(scored.group, rewards)
            self._done(model, group_id)
        return unwanted

    def rewarded(self, group: GroupMeta, rewards: Rewards) -> GroupMeta:
        """Return a finished group with its complete rewards, where a reward model has scored it."""
        scores = rewards.get(group.group_id)
        return group if scores is None or self._rewards is None else self._rewards.complete(group, scores)

    def groups(self, names: Iterable[str]) -> list[GroupMeta]:
        """Return the current metadata of groups that are in no batch."""
        return [self._groups[name].group for name in sorted(names)]

    def release(self, scorer: str, holding: Collection[str] = ()) -> int:
        """Take back the groups of a scorer that is gone, or that an answer lost; return how many."""
        lost = sorted(self._at[scorer].difference(holding))
        self._at[scorer].difference_update(lost)
        model = self._models[scorer]
        self._unscored[model] = dict.fromkeys(lost) | self._unscored[model]  # they have waited longest
        return len(lost)

    def scored(self, batch: Batch) -> Batch | None:
        """Return the batch with the scores of its groups; None while some are missing."""
        if not self._models:
            return batch
        scored = [self._groups[group.group_id] for group in batch.groups]
        if not all(self.has_all(each.group, each.digests) for each in scored):
            return None
        return replace(batch, groups=[replace(each.group, scores=dict(each.digests)) for each in scored])

    def forget(self, group_ids: Iterable[str]) -> None:
        """Remove groups that are in a batch, or never will be."""
        for group_id in group_ids:
            if self._groups.pop(group_id, None) is not None:
                for model in self._unscored:
                    self._done(model, group_id)

    def _done(self, model: str, group_id: str) -> None:
        self._unscored[model].pop(group_id, None)
        for scorer, own in self._models.items():
            if own == model:
                self._at[scorer].discard(group_id)

    def expire(self) -> list[str]:
        """Take back the groups of silent scorers; return the names of those scorers."""
        silent = self.registry.silent()
        for name in silent:
            self.leave(name)
        return silent

    def leave(self, scorer: str) -> int:
        """Remove a scorer that ends: others get its groups. Returns how many."""
        self.registry.remove(scorer)
        lost = self.release(scorer)
        self.taken_back += lost
        return lost

    def status(self) -> dict[str, object]:
        """Return for each scorer that calls how many groups it has."""
        return {name: {"groups": len(self._at[name])} for name in sorted(self.registry.workers)}
