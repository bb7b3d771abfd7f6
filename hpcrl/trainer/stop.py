"""Where the trainer's ranks agree to stop: between two micro-batches, between phases, and while they wait."""

from __future__ import annotations

import time

from hpcrl.run.fault import fault
from hpcrl.run.pulse import Pulse
from hpcrl.run.signals import StopSignal
from hpcrl.trainer.world import World


class Stopping(Exception):
    """All ranks have agreed to save and leave. It is raised on all of them at the same place."""


_PHASES = {"score": "step", "update": "step", "publish": "save", "export": "save"}


class Agreement:
    """What the ranks know together of a stop request that each may have heard alone. Every method but `at_stake` is called by all.

    The places where they ask, which are fault points, are also where each shows that it gets on.

    Attributes:
        agreed: they are to stop, as far as they have asked.
    """

    def __init__(self, world: World, signal: StopSignal, pulse: Pulse) -> None:
        self._world, self._signal, self._pulse = world, signal, pulse
        self.agreed = False

    def __call__(self, place: str) -> None:
        """Agree here, where nothing is half done or what is can be thrown away.

        Args:
            place: what comes next: "load", "wait", "score", "update", "publish", "save" or "export", maybe with more after a dot.

        Raises:
            Stopping: a rank has heard a stop request.
        """
        if self.asked(place):
            raise Stopping(place)

    def asked(self, place: str) -> bool:
        """Return whether any rank has heard a stop request."""
        fault(place)
        phase = place.partition(".")[0]
        self._pulse.beat(_PHASES.get(phase, phase))
        self.agreed = self.agreed or self._world.any(self._signal.seen)
        return self.agreed

    def hear(self) -> None:
        """All ranks have been told to stop."""
        self._signal.hear()
        self.agreed = True

    def at_stake(self) -> None:
        """Something has been trained in this attempt."""
        self._signal.at_stake = True

    def seconds(self) -> float:
        """Return how long ago the first rank heard of it."""
        since = self._signal.since
        return self._world.max([0.0 if since is None else time.monotonic() - since])[0]
