"""The trainer's side of the run: rank 0 talks to the controller, keeps the lease and writes metrics; all ranks hear the answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from hpcrl.errors import RunError
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.run.call import Controller
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter
from hpcrl.run.pulse import Pulse
from hpcrl.trainer.world import World
from hpcrl.types import Batch

PROCESS = "trainer"
_UNASKED_S = 30.0  # a stop file that another node wrote may show late


class StopSignal:
    """Notes SIGTERM and SIGUSR2 (Slurm's two ways to announce the end) instead of dying of them.

    torchrun sends SIGTERM too, when another rank has failed; nobody has asked the run to stop then, and a rank that waits for the lost
    one inside a collective would never look at this: it is ended.
    """

    def __init__(self, run: Run) -> None:
        self.seen = False
        self._run = run
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self.seen:
            threading.Thread(target=self._leave_if_unasked, daemon=True).start()
        self.seen = True

    def _leave_if_unasked(self) -> None:
        time.sleep(_UNASKED_S)
        if not self._run.stop.exists():
            os._exit(1)


class Link:
    """Every method but `say` is called by all ranks.

    Consumes: answers of the controller, batch files. Waits for: the controller. Produces: lease, metrics.
    """

    def __init__(self, run: Run, attempt: int, world: World, stop: StopSignal, pulse: Pulse) -> None:
        self._pulse = pulse
        self._run, self._attempt, self._world, self._stop = run, attempt, world, stop
        self._controller = Controller(run, attempt) if world.first else None
        self._lease = LeaseWriter(run, PROCESS, attempt) if world.first else None
        self._metrics: MetricsWriter | None = None

    def say(self, state: str, **facts: float) -> None:
        if self._lease:
            self._lease.say(state, **facts)

    def start(self, step: int) -> tuple[int, int]:
        """Tell that training continues after `step`; return how many steps the run has, and an epoch."""
        if self._world.first:
            self._metrics = MetricsWriter(self._run, PROCESS, self._attempt, step)
        answer = self._ask("start", step=step)
        return answer["total_steps"], answer["steps_per_epoch"]

    def next(self, step: int) -> Batch | None:
        """Return the batch of `step` as soon as there is one, or None if training ends here."""
        while True:
            self._pulse.beat("wait")
            if self._world.any(self._stop.seen):
                return None
            answer = self._ask("next", step=step)
            if answer["stop"] is not None:
                return None
            if answer["path"] is not None:
                self._pulse.beat("step")
                return self._read(answer["path"], step)
            self.say("waiting for batch", step=step - 1)

    def _read(self, relative: str, step: int) -> Batch:
        path = self._run.inside(relative)
        value = self._world.look(lambda: read_json(path))
        if value is None:
            raise RunError(f"the controller named {path} as the batch of step {step}, but there is no such file")
        batch = Batch.from_json(value)
        assert batch.step == step, f"asked for step {step}, {path} holds step {batch.step}"
        return batch

    def published(self, version: int) -> None:
        self._pulse.beat("save")
        self._ask("published", version=version)

    def committed(self, step: int) -> None:
        self._ask("committed", step=step)

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        if self._metrics:
            self._metrics.write(step, metrics)

    def _ask(self, route: str, **payload: int) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            assert self._controller is not None
            return self._controller.call(route, **payload)

        return self._world.look(call)

    def close(self, state: str) -> None:
        self.say(state)
        if self._metrics:
            self._metrics.close()
        if self._controller:
            self._controller.close()
