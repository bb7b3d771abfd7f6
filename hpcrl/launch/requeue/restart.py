"""Measures, from the files of a run, what a restart of its attempt on more nodes costs and gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.launch.requeue.growth import Growth, choose_growth
from hpcrl.observe.metrics import first_record, last_records
from hpcrl.observe.summary import STEP_SECONDS, pace_by_nodes
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt
from hpcrl.runtime.process_status import read_process_status

_REQUEUE_S = 15.0  # Slurm ends what is left of a job, and looks for nodes
_SAVES = ("resilience/signal_to_commit_seconds", "timing/save_checkpoints")


@dataclass(frozen=True)
class AttemptMeasures:
    """Measures of an attempt that has trained enough steps for them.

    Attributes:
        nodes: of the attempt.
        restart_s: seconds from its last step to the first one of the next attempt.
        step_s: seconds per step by nodes, those of other attempts too.
        steps_left: steps that are not trained.
    """

    nodes: int
    restart_s: float
    step_s: dict[int, float]
    steps_left: float

    def growth(self, candidates: Sequence[int], left_s: float) -> Growth | None:
        """Return the growth that gains most of those worth their restart, or None; arguments as of `choose_growth`."""
        return choose_growth(
            held=self.nodes,
            candidates=candidates,
            restart_s=self.restart_s,
            step_s=self.step_s,
            steps_left=self.steps_left,
            left_s=left_s,
        )


def measure_attempt(run: Run, attempt: Attempt) -> AttemptMeasures | None:
    """Return the measures of an attempt; None while it has trained too few steps."""
    paces, nodes = pace_by_nodes(run), len(attempt.hosts)
    newest = last_records(run, "trainer", STEP_SECONDS, lambda _: True)
    first = first_record(run, "trainer", STEP_SECONDS, lambda record: record.attempt == attempt.number)
    trainer = read_process_status(run, "trainer", attempt.number)
    total = trainer.facts.get("total") if trainer else None
    if nodes not in paces or not newest or first is None or total is None:
        return None
    own = [one.start for one in read_allocations(run) if one.job == attempt.job]
    starting_s = max(0.0, first.time - min([*own, attempt.started]) - paces[nodes])
    saves = [record for name in _SAVES for record in last_records(run, "trainer", name, lambda _: True)]
    saving_s = max((value for record in saves for name in _SAVES if (value := record.metrics.get(name))), default=0.0)
    return AttemptMeasures(nodes, starting_s + saving_s + _REQUEUE_S, paces, total - newest[0].step)
