"""Watches whether Slurm would start the run on more nodes, and asks the attempt to stop for that where it is worth the restart.

The stop is that of `hpcrl requeue`: the trainer saves, and the end of the batch script requeues the job, whose range has more nodes then.
hpcrl/launch/requeue/growth.py decides; settings: slurm.grow_minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import takewhile

from hpcrl.config import Config
from hpcrl.config.sizes import sizes_in
from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.launch.requeue.growth import Growth, choose_growth, grew_lately
from hpcrl.launch.requeue.requests import recorded_requests
from hpcrl.launch.requeue.room import others_wait, seconds_left, starts_at_once
from hpcrl.launch.scheduler import queue
from hpcrl.observe.metrics import first_record, last_records
from hpcrl.observe.summary import STEP_SECONDS, pace_by_nodes
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.growth import GrowthRecord, read_growth, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt
from hpcrl.runtime.process_status import read_process_status
from hpcrl.runtime.signals import ask_to_stop, stop_asked

_LOOK_S = 30.0
_REQUEUE_S = 15.0  # Slurm ends what is left of a job, and looks for nodes
_SAVES = ("resilience/signal_to_commit_seconds", "timing/save_checkpoints")


class GrowthWatch:
    """Looks for growth in a thread of the first node's agent, because Slurm may take its time to answer.

    Args:
        layouts: that attempts of the same request may take, the fewest nodes first.
    """

    def __init__(
        self, run: Run, config: Config, context: NodeContext, attempt: Attempt, layouts: Sequence[AttemptLayout]
    ) -> None:
        self._run, self._config, self._context, self._attempt = run, config, context, attempt
        self._larger = [layout.nodes for layout in layouts if layout.nodes > len(attempt.hosts)]
        self._seen: tuple[str, int] | None = None

    def start(self) -> None:
        """Look every half minute until the attempt is asked to stop; do nothing where it cannot grow."""
        resumes = self._config.trainer.resume_mode != "none"
        if self._larger and resumes and self._config.slurm.grow_minutes is not None and not self._context.local:
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
        before = read_growth(self._run)
        if before and grew_lately(time.time(), before.time, 60.0 * (self._config.slurm.grow_minutes or 0)):
            return False
        paces = pace_by_nodes(self._run)
        if len(self._attempt.hosts) not in paces or self._best(paces, self._larger) is None:
            return False
        found = self._possible(paces)
        again, self._seen = found is not None and found[:2] == self._seen, found[:2] if found else None
        # Slurm may have taken its time to answer
        if found is None or not again or stop_asked(self._run, self._attempt.number) is not None:
            return False
        job, nodes, growth = found
        write_growth(self._run, GrowthRecord(self._attempt.number, time.time(), nodes, job))
        gain = f"{growth.gained_s:.0f} s gained in this allocation"
        ask_to_stop(self._run, self._attempt.number, "interrupted", f"to go on with {nodes} nodes, {gain}")
        print(f"Slurm would start job {job} on {nodes} nodes now: {asdict(growth)}", flush=True)
        return True

    def _best(self, paces: dict[int, float], candidates: Sequence[int]) -> Growth | None:
        newest = last_records(self._run, "trainer", STEP_SECONDS, lambda _: True)
        trainer = read_process_status(self._run, "trainer", self._attempt.number)
        total = trainer.facts.get("total") if trainer else None
        if not newest or total is None:
            return None
        return choose_growth(
            held=len(self._attempt.hosts),
            candidates=candidates,
            restart_s=self._starting_s + self._saving_s() + _REQUEUE_S,
            step_s=paces,
            steps_left=total - newest[0].step,
            left_s=seconds_left(self._context.job_id) - self._config.slurm.signal_seconds,
        )

    def _possible(self, paces: dict[int, float]) -> tuple[str, int, Growth] | None:
        """Return the job that would start on more nodes now, with its nodes; of several the growth that gains most."""
        jobs = recorded_requests(self._run)
        if others_wait(self._context.hosts, jobs.values()):
            return None
        scripts, found = queue(0.0), list[tuple[str, int, Growth]]()
        for job, sizes in self._wanted(jobs):
            # its own nodes are idle once it has given them back; whether those of another request are among them is not known
            held = len(self._context.hosts) if job == self._context.job_id else 0
            script = scripts[job].script if job in scripts else ""
            if script and (growth := self._best(paces, _room(script, sizes, held))):
                found.append((job, growth.nodes, growth))
        return max(found, key=lambda one: one[2].gained_s, default=None)

    def _wanted(self, jobs: dict[str, str]) -> Iterator[tuple[str, list[int]]]:
        """Yield each job with the nodes that are worth asking for, the fewest first.

        On GPUs with another memory a run has other layouts, and steps of another length: requests for those are left out.
        """
        slurm = self._config.slurm
        requests = slurm.requests
        memory = {job: slurm.asked_by(name).gpu_memory_gb for name, job in jobs.items() if name in requests}
        for name, job in jobs.items():
            if memory.get(job) != memory.get(self._context.job_id):
                continue
            asked = requests[name].nodes if name in requests else None
            sizes = [nodes for nodes in self._larger if asked is None or nodes in sizes_in(asked)]
            yield job, [nodes for nodes in sizes if job != self._context.job_id or nodes > len(self._context.hosts)]

    @cached_property
    def _starting_s(self) -> float:
        """Seconds from the start of this job to the end of its first step, without the time of a usual step."""
        own = [one.start for one in read_allocations(self._run) if one.job == self._attempt.job]
        number = self._attempt.number
        first = first_record(self._run, "trainer", STEP_SECONDS, lambda record: record.attempt == number)
        if first is None:
            raise RunError(f"attempt {number} has trained no step")
        pace = pace_by_nodes(self._run)[len(self._attempt.hosts)]
        return max(0.0, first.time - min([*own, self._attempt.started]) - pace)

    def _saving_s(self) -> float:
        newest = [record for name in _SAVES for record in last_records(self._run, "trainer", name, lambda _: True)]
        return max((value for record in newest for name in _SAVES if (value := record.metrics.get(name))), default=0.0)


def _room(script: str, sizes: Sequence[int], held: int) -> list[int]:
    """Return the sizes, the fewest nodes first, that Slurm would start at once: none is asked for above one that it would not.

    Args:
        held: nodes of them that are in hand.
    """
    return [*takewhile(lambda nodes: starts_at_once(script, nodes - held) is not None, sizes)]
