"""Measures, from the files of a run, what a restart of its attempt costs and gains, and how long its roles take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcrl.config.sizes import GPUS, NUM_ENGINES, POLICY_NODES
from hpcrl.errors import HpcrlError
from hpcrl.launch.layouts import AttemptLayout, layouts_for
from hpcrl.launch.requeue.growth import Growth, choose_growth, worth_a_restart
from hpcrl.launch.requeue.roles import LEAST_GAIN, LayoutChoice, RoleTimes, choose_layout, fewest_nodes
from hpcrl.observe.metrics import first_record, last_records
from hpcrl.observe.summary import STEP_SECONDS, pace_by_layout
from hpcrl.observe.waiting import ENGINES, SAMPLES, TRAINER, TRAINING, waiting_of
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, attempts_as_set
from hpcrl.rundir.process_names import worker_name
from hpcrl.runtime.process_status import read_process_status

_REQUEUE_S = 15.0  # Slurm ends what is left of a job, and looks for nodes
_SAVES = ("resilience/signal_to_commit_seconds", "timing/save_checkpoints")


@dataclass(frozen=True)
class AttemptMeasures:
    """Measures of an attempt that has trained enough steps for them.

    Attributes:
        nodes: of the attempt.
        restart_s: seconds from its last step to the first one of the next attempt.
        step_s: seconds per step by nodes, those of other attempts too: of the fastest layout, and of the attempt's own on its nodes.
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

    def gained_by(self, step_s: float, left_s: float) -> float | None:
        """Return the seconds gained by a restart after which a step takes `step_s`, or None; arguments as of `worth_a_restart`."""
        own = self.step_s[self.nodes]
        return worth_a_restart(own, step_s, restart_s=self.restart_s, steps_left=self.steps_left, left_s=left_s)


def measure_attempt(run: Run, attempt: Attempt) -> AttemptMeasures | None:
    """Return the measures of an attempt; None while it has trained too few steps."""
    paces, nodes = dict[int, float](), len(attempt.hosts)
    for pace in pace_by_layout(run):
        alike = pace.sizes.get(GPUS) == attempt.sizes.get(GPUS)
        if alike and (pace.nodes != nodes or pace.sizes == attempt.sizes):
            paces[pace.nodes] = min(pace.seconds, paces.get(pace.nodes, pace.seconds))
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


def layout_of_attempt(run: Run, layouts: Sequence[AttemptLayout], nodes: int) -> LayoutChoice:
    """Return the layout that an attempt which begins on these nodes takes; where measures cannot be read, it is chosen without them.

    Args:
        layouts: that the attempts of the run may take, as `usable_layouts` returns them.
    """
    fitting = layouts_for(layouts, nodes)
    try:
        measures = _measures(run, fitting[0], reversed(attempts_as_set(run)))
    except (HpcrlError, OSError) as error:
        print(f"how long the roles of earlier attempts took is not known: {error}", flush=True)
        measures = None
    if measures is None:
        return LayoutChoice(fitting[-1])
    smaller = [layout for layout in layouts if layout.nodes < fitting[0].nodes]
    return fewest_nodes(choose_layout(fitting, *measures), smaller, *measures)


def better_layout(run: Run, attempt: Attempt, layouts: Sequence[AttemptLayout]) -> LayoutChoice | None:
    """Return the layout of as many nodes that would be worth a restart of a running attempt; None: there is none.

    It has to be twice as much faster as at the start of an attempt: the next one then chooses it too.
    """
    fitting = layouts_for(layouts, len(attempt.hosts))
    measures = _measures(run, fitting[0], [attempt])
    if measures is None:
        return None
    choice = choose_layout(fitting, *measures, least_gain=2 * LEAST_GAIN)
    return None if choice.layout.sizes == attempt.sizes else choice


def _measures(
    run: Run, layout: AttemptLayout, attempts: Iterable[Attempt]
) -> tuple[RoleTimes, list[tuple[dict[str, int], float]]] | None:
    """Return the times of the roles in the first of the attempts that has some on GPUs as of a layout, and the paces of all layouts."""
    paces = [(pace.sizes, pace.seconds) for pace in pace_by_layout(run)]
    own = (times for attempt in attempts if (times := _role_times(run, attempt, paces, layout.sizes.get(GPUS))))
    return next(((times, paces) for times in own), None)


def _role_times(
    run: Run, attempt: Attempt, paces: Sequence[tuple[dict[str, int], float]], gpus: int | None
) -> RoleTimes | None:
    """Return the times of the roles in an attempt; None where it has trained too few steps, or trainer and engines share their GPUs.

    Args:
        gpus: of each node in a layout of a request that has a number of its own; None: those of the run. On others attempts do not count.
    """
    step_s = next((seconds for sizes, seconds in paces if sizes == attempt.sizes), None)
    if step_s is None or not {POLICY_NODES, NUM_ENGINES} <= attempt.sizes.keys() or attempt.sizes.get(GPUS) != gpus:
        return None
    config = attempt_config(run, attempt.number)
    if config.trainer.placement.colocate_all:
        return None
    others = [worker_name(number) for number in (*config.lent_replicas, *config.evaluators)]
    waiting = waiting_of(run, colocated=False, lent=others, attempt=attempt.number)
    return waiting and RoleTimes(
        attempt.sizes,
        step_s,
        trains=1 - waiting.share(TRAINER),
        generates=1 - waiting.share(ENGINES),
        for_samples=waiting.share(TRAINER, SAMPLES),
        for_training=waiting.share(ENGINES, TRAINING),
        evaluators=len(config.evaluators),
    )
