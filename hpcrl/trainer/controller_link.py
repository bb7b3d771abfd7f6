"""The trainer's client of the controller: rank 0 calls it, keeps the process status and writes metrics; all ranks get the answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

from hpcrl.data.batch_file import read_batch
from hpcrl.errors import RunError
from hpcrl.observe.metrics import Histogram, MetricsWriter
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.trainer.backends.colocation import DeviceLease
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import PhaseTimer, step_line
from hpcrl.trainer.stop import StopConsensus, Stopping
from hpcrl.types import Batch

log = logging.getLogger(__name__)

PROCESS, CRITIC = "trainer", "critic"
_WAIT_S = 1.0  # ranks agree whether to stop in between
_SHOWN_S = 2.0
_COUNTED = ("fwd_logprobs_values_reward", "critic_train", "policy_train")  # phases with micro-batches


class ControllerLink:
    """Link to the controller; every method but `report` is called by all ranks.

    Consumes: answers of the controller, batch files. Waits for: the controller. Produces: process status, metrics.

    Args:
        critic: whether this rank is one of those with the critic alone, which have a process status of their own.
    """

    def __init__(self, run: Run, attempt: int, world: World, consensus: StopConsensus, *, critic: bool = False) -> None:
        self._run, self._attempt, self._world, self._consensus = run, attempt, world, consensus
        self._total = 0
        self._controller = ControllerClient(run, attempt) if world.first else None
        self._status = StatusWriter(run, CRITIC if critic else PROCESS, attempt) if world.first or critic else None
        self._metrics: MetricsWriter | None = None
        self._lock, self._reported = Lock(), ("", dict[str, float]())
        self._timer: PhaseTimer | None = None

    def report(self, state: str, **facts: float) -> None:
        if self._status:
            with self._lock:
                self._reported = state, facts
                self._write()

    def _write(self) -> None:
        assert self._status
        state, facts = self._reported
        self._status.write(state, **facts, **_phase(self._timer))

    @contextmanager
    def showing(self, timer: PhaseTimer) -> Iterator[None]:
        """Add the phase of the timer to the process status as long as the block lasts; a thread writes it, so training does not wait.

        A phase without progress is not written again, so that the status of a rank that hangs grows old.
        """
        self._timer, over = timer, Event()
        thread = Thread(target=self._show, args=(timer, over), daemon=True) if self._status else None
        if thread:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread:
                thread.join()
            self._timer = None

    def _show(self, timer: PhaseTimer, over: Event) -> None:
        shown = None
        while not over.wait(_SHOWN_S):
            with self._lock:
                now = *self._reported, timer.phase, timer.begun
                if now != shown and timer.phase:
                    self._write()
                shown = now

    def start(self, step: int) -> tuple[int, int]:
        """Report that training continues after `step`; return the number of steps of the run, and of an epoch."""
        if self._world.first:
            self._metrics = MetricsWriter(self._run, PROCESS, self._attempt, step)
        while (answer := self._ask("start", step=step))["total_steps"] is None:
            self.report("waiting for the controller to read what earlier attempts left", step=step)
        self._total = answer["total_steps"]
        return self._total, answer["steps_per_epoch"]

    def next(self, step: int, clock: PhaseTimer, devices: DeviceLease) -> Batch | None:
        """Return the batch after that of `step` as soon as there is one, or None if training has none.

        Args:
            devices: are lent meanwhile where the controller asks for it.

        Raises:
            Stopping: the run is to stop.
        """
        if step >= self._total:
            return None
        clock.begin(step + 1)
        with clock("wait_for_generation_buffer"):
            return self._next(step + 1, clock, devices)

    def finished(self) -> None:
        """Report that all steps are trained and saved: the controller ends."""
        self._ask("next", step=self._total + 1)

    def _next(self, step: int, clock: PhaseTimer, devices: DeviceLease) -> Batch:
        while True:
            self._consensus("wait")
            state = {"away": devices.away, "onload": devices.onload_seconds}
            answer = self._ask("next", step=step, wait=_WAIT_S, **state)
            if answer["stop"] is not None:
                self._consensus.mark_stopped()
                raise Stopping(answer["stop"])
            if answer["path"] is not None:
                return self._read(answer["path"], step)
            if answer["lend"]:
                devices.lend(clock)
            self.report("waiting for batch", step=step - 1, total=self._total)

    def _read(self, relative: str, step: int) -> Batch:
        path = self._run.inside(relative)
        value = self._world.rank0_broadcast(lambda: (file := read_batch(path)) and file.batch.to_json())
        if value is None:
            raise RunError(f"the controller named {path} as the batch of step {step}, but there is no such file")
        batch = Batch.from_json(value)
        assert batch.step == step, f"asked for step {step}, {path} holds step {batch.step}"
        return batch

    def published(self, version: int, weights: bool = True) -> None:
        """Report that step `version` is trained, and whether its weights are published."""
        self._ask("published", version=version, weights=weights)

    def committed(self, step: int) -> None:
        if not self._consensus.stopping:  # who is to leave does not wait for an answer
            self._ask("committed", step=step)

    def trained(self, step: int, metrics: dict[str, float], histograms: dict[str, Histogram | None]) -> None:
        """Write the metrics of a trained step, and log one line."""
        self.measured(step, metrics, histograms)
        if self._world.first:
            log.info(step_line(step, self._total, metrics))

    def measured(
        self, step: int, metrics: dict[str, float], histograms: dict[str, Histogram | None] | None = None
    ) -> None:
        if self._metrics and metrics:
            self._metrics.write(step, metrics, histograms)

    def everything_is_saved(self, step: int) -> None:
        """Report that all training up to the stop request is committed, with `step` as the last complete step.

        The metric resilience/signal_to_commit_seconds is counted from the moment at which the first rank heard of the request.
        """
        seconds = self._consensus.seconds()
        self.measured(step, {"resilience/signal_to_commit_seconds": seconds})
        if self._world.first:
            log.info("everything is committed %.1f s after the stop request", seconds)

    def _ask(self, route: str, **payload: float) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            assert self._controller is not None
            return self._controller.call(route, **payload)

        return self._world.rank0_broadcast(call)

    def close(self, state: str) -> None:
        self.report(state)
        if self._metrics:
            self._metrics.close()
        if self._controller:
            self._controller.close()


def _phase(timer: PhaseTimer | None) -> dict[str, Any]:
    if timer is None or not timer.phase:
        return {}
    counted = {"begun": timer.begun, "expected": timer.expected} if timer.phase in _COUNTED else {}
    return {"phase": timer.phase, **counted}
