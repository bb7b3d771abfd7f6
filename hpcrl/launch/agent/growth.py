"""Watches whether Slurm would start the run's job on more nodes, and asks the attempt to stop for that where it is worth the restart.

The stop is that of `hpcrl requeue`: the trainer saves, and the end of the batch script requeues the job, whose range has more nodes then.
hpcrl/launch/requeue/growth.py decides; settings: slurm.grow_minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile

from hpcrl.config import Config
from hpcrl.config.sizes import sizes_in
from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.launch.requeue.growth import Growth, grew_lately
from hpcrl.launch.requeue.requests import recorded_requests
from hpcrl.launch.requeue.restart import AttemptMeasures, measure_attempt
from hpcrl.launch.requeue.room import others_wait, seconds_left, starts_at_once
from hpcrl.launch.scheduler import queue
from hpcrl.rundir.growth import GrowthRecord, read_growth, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt
from hpcrl.runtime.signals import ask_to_stop, stop_asked

_LOOK_S = 30.0


class GrowthWatch:
    """Looks for growth in a thread of the first node's agent, because Slurm may take its time to answer.

    Args:
        layouts: that attempts of the run may take, the fewest nodes first.
    """

    def __init__(
        self, run: Run, config: Config, context: NodeContext, attempt: Attempt, layouts: Sequence[AttemptLayout]
    ) -> None:
        self._run, self._config, self._context, self._attempt = run, config, context, attempt
        self._layouts = [layout.nodes for layout in layouts if layout.nodes > len(context.hosts)]
        self._seen: int | None = None

    def start(self) -> None:
        """Look every half minute until the attempt is asked to stop; do nothing where it cannot grow."""
        resumes = self._config.trainer.resume_mode != "none"
        if self._layouts and resumes and self._config.slurm.grow_minutes is not None and not self._context.local:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        complaint = ""
        while True:
            time.sleep(_LOOK_S)
            try:
                if stop_asked(self._run, self._attempt.number) is not None or self.look():
                    return
            except (SubmitError, RunError, OSError) as error:
                if str(error) != complaint:
                    print(f"whether the run could have more nodes is not known: {error}", flush=True)
                complaint, self._seen = str(error), None

    def look(self) -> bool:
        """Ask the attempt to stop if growth is worth it and was possible at the last look too; return whether it was asked."""
        before, larger = read_growth(self._run), self._larger()
        if before and grew_lately(time.time(), before.time, 60.0 * (self._config.slurm.grow_minutes or 0)):
            return False
        if not larger or (measures := measure_attempt(self._run, self._attempt)) is None:
            return False
        left_s = seconds_left(self._context.job_id) - self._config.slurm.signal_seconds
        growth = self._possible(measures, larger, left_s) if measures.growth(larger, left_s) else None
        again, self._seen = growth is not None and growth.nodes == self._seen, growth.nodes if growth else None
        # Slurm may have taken its time to answer
        if growth is None or not again or stop_asked(self._run, self._attempt.number) is not None:
            return False
        write_growth(self._run, GrowthRecord(self._attempt.number, time.time(), growth.nodes, self._context.job_id))
        gain = f"{growth.gained_s:.0f} s gained in this allocation"
        ask_to_stop(self._run, self._attempt.number, "interrupted", f"to go on with {growth.nodes} nodes, {gain}")
        print(f"Slurm would start this job on {growth.nodes} nodes now: {asdict(growth)}", flush=True)
        return True

    def _larger(self) -> list[int]:
        """Return the nodes of larger layouts that the job of the attempt asks for, the fewest first."""
        requests = self._config.slurm.requests
        names = {job: name for name, job in recorded_requests(self._run).items() if name in requests}
        own = names.get(self._context.job_id)
        asked = requests[own].nodes if own is not None else None
        return [nodes for nodes in self._layouts if asked is None or nodes in sizes_in(asked)]

    def _possible(self, measures: AttemptMeasures, larger: Sequence[int], left_s: float) -> Growth | None:
        """Return the growth to nodes that Slurm would give the job at once, beside those in hand; None: to none."""
        if others_wait(self._context.hosts, recorded_requests(self._run).values()):
            return None
        found = queue(0.0).get(self._context.job_id)
        if found is None or not found.script:
            return None
        return measures.growth(_room(found.script, larger, len(self._context.hosts)), left_s)


def _room(script: str, sizes: Sequence[int], held: int) -> list[int]:
    """Return the sizes, the fewest nodes first, that Slurm would start at once: none is asked for above one that it would not.

    Args:
        held: nodes of them that are in hand.
    """
    return [*takewhile(lambda nodes: starts_at_once(script, nodes - held) is not None, sizes)]
