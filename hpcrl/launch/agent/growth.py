"""Watches whether the attempt would be faster on more nodes, or with other roles of its own, and asks it to stop where that is worth a restart.

The stop is that of `hpcrl requeue`: the trainer saves. For more nodes, which Slurm would have to start now, the end of the batch script requeues
the job. For other roles it starts the next attempt on the same nodes. hpcrl/launch/requeue/growth.py and roles.py decide; settings:
slurm.grow_minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import takewhile

from hpcrl.config import Config
from hpcrl.config.sizes import sizes_in
from hpcrl.errors import HpcrlError
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.layouts import AttemptLayout, layouts_for
from hpcrl.launch.requeue.growth import Growth, grew_lately
from hpcrl.launch.requeue.requests import recorded_requests
from hpcrl.launch.requeue.restart import AttemptMeasures, better_layout, measure_attempt
from hpcrl.launch.requeue.room import others_wait, seconds_left, starts_at_once
from hpcrl.launch.scheduler import queue
from hpcrl.rundir.growth import GrowthRecord, read_growth, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, describe_sizes
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
        self._layouts, self._hosts = layouts, [*attempt.hosts, *attempt.idle]
        # it has given back what gains nothing
        self._sizes = sorted({layout.nodes for layout in layouts if layout.nodes > attempt.nodes_at_start})
        self._moves = len(layouts) > 1 and len(layouts_for(layouts, len(self._hosts))) > 1
        self._seen = ""

    def start(self) -> None:
        """Look every half minute until the attempt is asked to stop; do nothing where it cannot grow."""
        resumes = self._config.trainer.resume_mode != "none"
        if (
            (self._sizes or self._moves)
            and resumes
            and self._config.slurm.grow_minutes is not None
            and not self._context.local
        ):
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        complaint = ""
        while True:
            time.sleep(_LOOK_S)
            try:
                if stop_asked(self._run, self._attempt.number) is not None or self.look():
                    return
            except (HpcrlError, OSError) as error:
                if str(error) != complaint:
                    print(f"whether a restart would be faster is not known: {error}", flush=True)
                complaint, self._seen = str(error), ""

    def look(self) -> bool:
        """Ask the attempt to stop if a restart is worth it and was at the last look too; return whether it was asked."""
        before, larger = read_growth(self._run), self._larger()
        if before and grew_lately(time.time(), before.time, 60.0 * (self._config.slurm.grow_minutes or 0)):
            return False
        if not (larger or self._moves) or (measures := measure_attempt(self._run, self._attempt)) is None:
            return False
        left_s = seconds_left(self._context.job_id) - self._config.slurm.signal_seconds
        growth = self._possible(measures, larger, left_s) if measures.growth(larger, left_s) else None
        goal = (growth, f"{growth.nodes} nodes") if growth else self._move(measures, left_s)
        again, self._seen = goal is not None and goal[1] == self._seen, goal[1] if goal else ""
        # Slurm may have taken its time to answer
        if goal is None or not again or stop_asked(self._run, self._attempt.number) is not None:
            return False
        found, what = goal
        write_growth(self._run, GrowthRecord(self._attempt.number, time.time(), found.nodes, self._context.job_id))
        cause = f"to go on with {what}, {found.gained_s:.0f} s gained in this allocation"
        ask_to_stop(self._run, self._attempt.number, "interrupted", cause)
        print(f"this attempt stops {cause}", flush=True)
        return True

    def _move(self, measures: AttemptMeasures, left_s: float) -> tuple[Growth, str] | None:
        """Return other roles of the nodes in hand that are worth a restart, with their sizes for people, or None."""
        choice = better_layout(self._run, self._attempt, self._layouts) if self._moves else None
        gained_s = measures.gained_by(choice.step_s, left_s) if choice and choice.step_s is not None else None
        if choice is None or gained_s is None:
            return None
        return Growth(measures.nodes, gained_s), describe_sizes(choice.layout.sizes)

    def _larger(self) -> list[int]:
        """Return the nodes of larger layouts that the job of the attempt asks for, the fewest first."""
        requests = self._config.slurm.requests
        names = {job: name for name, job in recorded_requests(self._run).items() if name in requests}
        own = names.get(self._context.job_id)
        asked = requests[own].nodes if own is not None else None
        return [nodes for nodes in self._sizes if asked is None or nodes in sizes_in(asked)]

    def _possible(self, measures: AttemptMeasures, larger: Sequence[int], left_s: float) -> Growth | None:
        """Return the growth to nodes that Slurm would give the job at once, beside those in hand; None: to none."""
        if others_wait(self._hosts, recorded_requests(self._run).values()):
            return None
        found = queue(0.0).get(self._context.job_id)
        if found is None or not found.script:
            return None
        return measures.growth(_room(found.script, larger, len(self._hosts)), left_s)


def _room(script: str, sizes: Sequence[int], held: int) -> list[int]:
    """Return the sizes, the fewest nodes first, that Slurm would start at once: none is asked for above one that it would not.

    Args:
        held: nodes of them that are in hand.
    """
    return [*takewhile(lambda nodes: starts_at_once(script, nodes - held) is not None, sizes)]
