"""A run with scorers, of which a reward model decides what is dropped: they die, fall silent and come back.

Plays with the controller's own code for scores too (hpcrl/controller/score_queue.py). Checked beside what every run checks: a batch begins only when
its groups have all scores, each model scores each of them once that counts, and nothing of a group is judged before its reward is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcrl.controller.batches import BatchComposer
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.rundir.process_names import scorer_name
from hpcrl.types import Batch, GroupMeta
from tests.controller.simulation.play import Play, Scene

_MODELS = ("reward-1", "teacher-2")


@dataclass
class Scorer:
    """A scorer; `life` changes when what was planned for it is void.

    Attributes:
        here: it computes.
        heard: the controller hears it.
        busy: it has groups.
    """

    name: str
    model: str
    life: int = 0
    here: bool = True
    heard: bool = True
    busy: bool = False


@dataclass(frozen=True)
class ScoreScene:
    """What is played of scorers; times in seconds of the virtual clock.

    Attributes:
        scorers: copies of each of two models.
        samples: that one claims at a time; groups have two.
        score_s: that it takes for a group, about.
        dies: share of claims within which it dies, or falls silent and hands over late.
    """

    scorers: int = 20
    samples: int = 40
    score_s: float = 0.2
    dies: float = 0.02


class ScoredPlay(Play):
    """One run of a scene with scorers.

    Attributes:
        scored, unwanted: scores that counted, and those that came twice or too late.
        deaths: of scorers.
    """

    def __init__(self, scene: Scene, scores: ScoreScene) -> None:
        self._scores = scores
        self._scorers = [
            Scorer(scorer_name(number), model)
            for number, model in enumerate(model for model in _MODELS for _ in range(scores.scorers))
        ]
        rewards = JudgedRewards(1.0, -5.0, 5.0)
        self.queue = ScoreQueue([one.model for one in self._scorers], None, rewards)
        self.scored = self.unwanted = self.deaths = 0
        self._good = dict[str, list[float]]()
        self._counted: dict[str, set[str]] = {}
        super().__init__(scene)

    def _make_composer(self, sampling: DynamicSampling) -> BatchComposer:
        return BatchComposer(self.admission, sampling, self.scene.batch_size, judged=True)

    def _finished(self, index: int, meta: GroupMeta) -> None:
        """What the environment paid is what the reward model will say; until then all of a group are worth the same."""
        self._good[meta.group_id] = list(meta.rewards)
        self._counted[meta.group_id] = set()
        unknown = replace(meta, samples=[replace(sample, reward=0.0) for sample in meta.samples])
        self.admission.update(index, unknown)
        self.queue.add([unknown])
        for scorer in self._scorers:
            self._begin_scoring(scorer)

    def _begin_scoring(self, scorer: Scorer) -> None:
        if scorer.busy or not scorer.here or not scorer.heard:
            return
        groups = self.queue.claim(scorer.name, self._scores.samples, [])
        if not groups:
            return
        scorer.busy, draw = True, self._draw
        seconds = len(groups) * self._scores.score_s * draw.uniform(0.5, 2.0)
        if draw.random() < self._scores.dies:
            self.deaths += 1
            back = draw.uniform(0.0, self.scene.absent_s)
            if draw.random() < 0.5:  # it goes on unheard, and hands over late
                scorer.heard = False
                self._at(seconds + back, self._end_scoring, scorer, scorer.life, groups)
            else:
                scorer.here, scorer.life = False, scorer.life + 1
                self._at(back, self._is_back, scorer, scorer.life)
            told = draw.random() < self.scene.told
            self._at(0.0 if told else self.scene.silence_s, self._taken_back, scorer)
        else:
            self._at(seconds, self._end_scoring, scorer, scorer.life, groups)

    def _taken_back(self, scorer: Scorer) -> None:
        if not (scorer.here and scorer.heard):
            self.queue.leave(scorer.name)
            for other in self._scorers:
                self._begin_scoring(other)

    def _is_back(self, scorer: Scorer, life: int) -> None:
        if scorer.life == life:
            scorer.here, scorer.busy = True, False
            self._begin_scoring(scorer)

    def _end_scoring(self, scorer: Scorer, life: int, groups: list[GroupMeta]) -> None:
        if scorer.life != life:
            return
        scorer.busy, scorer.heard = False, True
        names = [group.group_id for group in groups]
        rewards = {name: self._good[name] for name in names} if scorer.model == _MODELS[0] else {}
        unwanted = self.queue.complete(scorer.name, dict.fromkeys(names, scorer.name), rewards)
        taken = sorted(set(names).difference(unwanted))
        for name in taken:
            assert scorer.model not in self._counted[name], f"{name} was scored twice by {scorer.model}"
            self._counted[name].add(scorer.model)
        self.scored, self.unwanted = self.scored + len(taken), self.unwanted + len(unwanted)
        if rewards:
            self.queue.forget(self._composer.judge(self.queue.groups(taken)))
        self._progress = self.now
        self._compose()
        self._hand_out()
        self._begin_scoring(scorer)

    def _next_batch(self) -> Batch | None:
        composed = self._composer.batch()
        scored = composed and self.queue.scored(composed)
        if scored is None:
            return None
        for group in scored.groups:
            assert set(group.scores) == set(_MODELS) == self._counted[group.group_id]
            model_rewards = [sample.model_reward for sample in group.samples]
            assert model_rewards == group.rewards == self._good[group.group_id]
            assert len(set(group.rewards)) > 1, f"{group.group_id} is not worth training"
        self.queue.forget(scored.generated)
        for name in scored.dropped:
            assert len(set(self._good[name])) == 1, f"{name} was dropped and is good"
        return scored
