"""The loop of a scorer: claim finished groups, score them, hand over.

    consumes   groups from the controller, samples/
    waits for  the controller (a claim waits there for finished groups)
    produces   scores/<model>/<group>-<digest>.safetensors

It may die at any moment: what it has not handed over, another scores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hpcrl.data.score_file import GroupRewards, RowScores, write_scores
from hpcrl.observe.timeline import IDLE, Timeline
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import RENEW_S, StatusWriter
from hpcrl.trainer.distributed import World
from hpcrl.types import GroupMeta

_WAIT_S = 5.0
_CALL_S = 20.0  # while it scores: the controller gives the groups of who is silent to others


class Judge(Protocol):
    """The model of a scorer, which scores this rank's share of finished groups, by their ids."""

    def scores(
        self, groups: Sequence[GroupMeta], before: Callable[[], None]
    ) -> Mapping[str, Sequence[RowScores] | GroupRewards]: ...


class ScoreWorker:
    """One scorer, seen from each of its ranks, which call it alike.

    Args:
        name: of the process.
        model_name: of what it finds, as of ScorerSet.
        samples: that are scored at a time, about.
    """

    def __init__(
        self,
        run: Run,
        attempt: int,
        name: str,
        model_name: str,
        model: Judge,
        samples: int,
        world: World,
        status: StatusWriter,
        heartbeat: Heartbeat,
        timeline: Timeline,
    ) -> None:
        self._run, self._name, self._model_name, self._model = run, name, model_name, model
        self._samples, self._world, self._status, self._heartbeat = samples, world, status, heartbeat
        self._timeline = timeline
        self._controller = ControllerClient(run, attempt)
        self._facts: dict[str, Any] = {"groups": 0, "tokens": 0, "seconds": 0.0}
        self._told = self._called = float("-inf")

    def run(self) -> None:
        """Score until the controller ends the run.

        Raises:
            HpcrlError: a sample file is damaged, a score cannot be written, or the controller does not answer.
        """
        self._timeline.enter(IDLE)
        try:
            self._work()
        finally:
            if self._world.first:
                self._controller.leave(self._name)

    def _work(self) -> None:
        while True:
            self._heartbeat.beat("wait")
            self._tell()
            answer = self._ask("claim_scores", samples=self._samples, holding=[], wait=_WAIT_S)
            if answer["stop"] is not None:
                return
            if groups := [GroupMeta.from_json(group) for group in answer["groups"]]:
                with self._timeline.during("score"):
                    self._score(groups)

    def _score(self, groups: list[GroupMeta]) -> None:
        began, known = time.monotonic(), {group.group_id: group for group in groups}
        found = self._model.scores(groups, lambda: self._still_there(list(known)))

        def write() -> tuple[dict[str, str], dict[str, list[float | None]]]:
            rewards = {name: said.scores for name, said in found.items() if isinstance(said, GroupRewards)}
            return write_scores(
                self._run, self._model_name, [(known[name], said) for name, said in found.items()]
            ), rewards

        digests, rewards = dict[str, str](), dict[str, list[float | None]]()
        for own, scores in self._world.all_gather(write):
            digests |= own
            rewards |= scores
        self._ask("scored", digests=digests, rewards=rewards)
        self._facts["groups"] += len(groups)
        self._facts["tokens"] += sum(sum(group.lengths) for group in groups)
        self._facts["seconds"] = round(self._facts["seconds"] + time.monotonic() - began, 1)

    def _still_there(self, holding: list[str]) -> None:
        self._heartbeat.beat("step")
        self._tell()
        if self._world.first and time.monotonic() - self._called > _CALL_S:
            self._called = time.monotonic()
            self._controller.call("claim_scores", scorer=self._name, samples=0, holding=holding, wait=0)

    def _tell(self) -> None:
        if self._world.first and time.monotonic() - self._told > RENEW_S:
            self._status.write("ready", **self._facts)
            self._told = time.monotonic()

    def _ask(self, route: str, **payload: Any) -> dict[str, Any]:
        self._called = time.monotonic()
        return self._world.rank0_broadcast(lambda: self._controller.call(route, scorer=self._name, **payload))
