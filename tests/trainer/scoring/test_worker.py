"""A scorer and its controller: one that computes for long is not taken for dead, and one that ends gives back what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.controller.replicas import SILENCE_S
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.data.score_file import RowScores
from hpcrl.observe.timeline import Timeline
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.trainer.distributed import World
from hpcrl.trainer.scoring import worker
from hpcrl.types import GroupMeta, Work
from tests.controller.test_api import SCHEDULE, end, finish, make_run, serve_attempt

NAME = "teacher-1"


class Slow:
    """A model that takes almost as long as a scorer may be silent, over each of two forward passes; then its process is asked to end."""

    def __init__(self, queue: ScoreQueue) -> None:
        self._queue, self.passes, self.held = queue, 0, list[str]()

    def scores(self, groups: Sequence[GroupMeta], before: Callable[[], None]) -> dict[str, list[RowScores]]:
        for _ in range(2):
            self._queue.registry.workers["scorer-0"].seen -= SILENCE_S - 5
            before()
            self.passes += 1
        if self.passes > 2:
            raise SystemExit(0)  # what SIGTERM does
        return {
            group.group_id: [RowScores(np.full(length, -1.0, np.float32)) for length in group.lengths]
            for group in groups
        }


def test_it_says_that_it_is_there_while_it_computes_and_leaves(
    tmp_path: Path, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_CALL_S", 0.0)
    run, queue = make_run(tmp_path / "project" / "run"), ScoreQueue([NAME])
    served = serve_attempt(run, 1, replace(SCHEDULE, eval_interval=0, staleness=1), scores=queue)
    model: Any = Slow(queue)
    with (
        closing(ControllerClient(run, 1, patience_s=10)) as controller,
        closing(Timeline(run, "scorer-0", 1)) as timeline,
    ):
        controller.call("start", step=0)
        work = controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=[])["work"]
        groups = [finish(run, Work.from_json(item), 0) for item in work]
        assert len(groups) == 4
        controller.call("complete", worker="rollout-0", groups=[group.to_json() for group in groups])
        status, heartbeat = StatusWriter(run, "scorer-0", 1), Heartbeat(run, 1, "scorer-0")
        scorer = worker.ScoreWorker(
            run, 1, "scorer-0", NAME, model, 2 * SCHEDULE.n_samples, alone, status, heartbeat, timeline
        )
        with pytest.raises(SystemExit):
            scorer.run()
    assert model.passes == 4, "the second two groups came after the first ones"
    assert "scorer-0" not in queue.registry.workers, "it has left"
    assert queue.taken_back == 2
    assert len(list(run.scores_of(NAME).iterdir())) == 2
    assert queue.registry.silent() == []
    end(run, 1, served)
