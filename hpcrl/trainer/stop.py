"""Stop requests of the trainer: ranks agree between micro-batches, between phases, and while they wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcrl.faults import fault
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.signals import StopSignal
from hpcrl.trainer.distributed import World


class Stopping(Exception):
    """All ranks have agreed to save and leave. It is raised on all at the same place."""


_LOOK_S = 0.005
_PHASES = {"score": "step", "update": "step", "publish": "save", "export": "save"}


class StopConsensus:
    """A stop request may reach one rank only; here all ranks agree on it. Every method but `mark_progress` is collective.

    The places where ranks agree are fault points, and are also where each rank's heartbeat is written.

    Attributes:
        stopping: the ranks have agreed to stop.
    """

    def __init__(self, world: World, signal: StopSignal, heartbeat: Heartbeat) -> None:
        self._world, self._signal, self._heartbeat = world, signal, heartbeat
        self.stopping = False

    def __call__(self, place: str) -> None:
        """Agree here, where nothing is half done or what is can be thrown away.

        Args:
            place: what comes next: "load", "wait", "score", "update", "publish", "save" or "export", maybe with more after a dot.

        Raises:
            Stopping: a rank has received a stop request.
        """
        if self.asked(place):
            raise Stopping(place)

    def asked(self, place: str) -> bool:
        """Return whether any rank has received a stop request."""
        fault(place)
        phase = place.partition(".")[0]
        self._heartbeat.beat(_PHASES.get(phase, phase))
        self.stopping = self.stopping or self._world.any_rank(self._signal.seen)
        return self.stopping

    @contextmanager
    def among(self, own: World) -> Iterator[None]:
        """Let these ranks agree without the others, until all `meet`.

        Args:
            own: a part of all ranks, this one among them.
        """
        everyone, self._world = self._world, own
        try:
            yield
        finally:
            self._world = everyone

    def meet(self, stopped: bool) -> bool:
        """Return whether any rank was stopped, as soon as all are here. A rank that waits shows that it is alive."""
        waiting = self._world.begin_any_rank(stopped)
        while (found := waiting()) is None:
            self._heartbeat.beat("step")
            time.sleep(_LOOK_S)
        self.stopping = self.stopping or found
        return found

    def mark_stopped(self) -> None:
        """Record a stop request that all ranks have received, such as the controller's."""
        self._signal.mark_stopped()
        self.stopping = True

    def mark_progress(self) -> None:
        """Record that something was trained in this attempt, which leaving without a checkpoint would lose."""
        self._signal.has_progress = True

    def seconds(self) -> float:
        """Return how long ago the first rank received the request."""
        since = self._signal.since
        return self._world.max([0.0 if since is None else time.monotonic() - since])[0]
