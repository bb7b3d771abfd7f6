"""Measures for what share of the time each role of a run waits, and for what, from the timelines of its newest steps.

The trainer's wait for its batch is divided by what the replicas do meanwhile, and a replica's idle time by what the trainer does. Where both
have the same GPUs (trainer.placement.colocate_all), only time in which neither of them computes is a wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile, zip_longest

from hpcrl.observe.timeline import ABSENT, ENVIRONMENT, FIRST_RANK, IDLE, IMPORT, LOAD, Span, recent_spans
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.rundir.process_names import SCORER, WORKER

TRAINER, ENGINES, GPUS = "trainer", "engines", "GPUs"
SAMPLES, SLOWEST, ENVIRONMENTS, SCORES = "samples", "the slowest samples", "environments", "scores"
TRAINING, EVALUATION, WEIGHTS, LOADING = "training", "evaluation", "weights", "weights to load"
CHECKPOINTS, EXPORTS, DUMPS, TURNS, START = "checkpoints", "exports", "dumps", "changes of turns", "a start"
CRITIC, POLICY = "the critic", "the policy"
"""Roles, and what they wait for."""

_STEPS = 20
_LEAST_STEPS = 3
_LEAST_SHARE = 0.005
BATCH = "wait_for_generation_buffer"
"""Phase of a trainer rank that waits for its batch."""
_OF_TRAINER = {
    "sync_weights": WEIGHTS, "save_checkpoints": CHECKPOINTS, "save_hf_model": EXPORTS, "dump_data_batch": DUMPS,
    "eval": EVALUATION, "offload": TURNS, "onload": TURNS, "wait_for_critic": CRITIC, "wait_for_policy": POLICY,
}  # fmt: skip
_OF_REPLICA = {
    "fetch_weights": WEIGHTS,
    "update_weights": LOADING,
    ENVIRONMENT: ENVIRONMENTS,
    IMPORT: START,
    LOAD: START,
}
# of several replicas the first that one of them does is what the trainer waits for
_FOR_BATCH = {"generate": SAMPLES, ENVIRONMENT: ENVIRONMENTS, "evaluate": EVALUATION, "update_weights": LOADING}
_FOR_BATCH |= {"fetch_weights": WEIGHTS, "score": SCORES, IMPORT: START, LOAD: START}


@dataclass(frozen=True)
class Wait:
    """One wait of a role.

    Attributes:
        role: "trainer", "engines", or "GPUs" where both share them.
        what: it waits for.
        share: of the role's time.
    """

    role: str
    what: str
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} for {self.what}"


@dataclass(frozen=True)
class Waiting:
    """The waits of a run.

    Attributes:
        waits: of each role, the longest first.
        first, last: steps of which the timelines were read.
        seconds: that they took.
    """

    waits: list[Wait]
    first: int
    last: int
    seconds: float

    def share(self, role: str, *what: str) -> float:
        """Return for what share of its time a role waits, for one of these; for nothing named, for anything."""
        return sum(wait.share for wait in self.waits if wait.role == role and (not what or wait.what in what))


def waiting_of(run: Run, *, colocated: bool, lent: Collection[str] = (), attempt: int | None = None) -> Waiting | None:
    """Return the waits in the newest 20 steps of an attempt, without its first one; None before there are 3.

    Args:
        colocated: trainer.placement.colocate_all.
        lent: replicas that the trainer lends its GPUs to; what they wait for is no wait of engines.
        attempt: its number; None: the newest.
    """
    attempts = read_attempts(run)
    number = attempt or (attempts[-1].number if attempts else 0)
    own = list(_newest_steps(recent_spans(run, number, FIRST_RANK)))
    steps = sorted({span.step for span in own if span.step is not None})[1:-1]  # the last one may go on
    if len(steps) < _LEAST_STEPS:
        return None
    own = sorted((span for span in own if span.step in steps), key=lambda span: span.start)
    start, end = own[0].start, max(span.end for span in own)
    spans = {FIRST_RANK: own}
    for path in run.timeline(number).glob("*.jsonl"):
        process = path.name.removesuffix(".jsonl").removesuffix(".old")
        if process.startswith((WORKER, SCORER)) and process not in spans:
            recent = takewhile(lambda span: span.end > start, recent_spans(run, number, process))
            spans[process] = [span for span in recent if span.start < end]
    waits = _colocated(spans, start, end) if colocated else _apart(spans, start, end, lent)
    found = [Wait(role, what, share) for (role, what), share in waits.items() if share >= _LEAST_SHARE]
    return Waiting(sorted(found, key=lambda wait: -wait.share), steps[0], steps[-1], end - start)


def _newest_steps(spans: Iterator[Span]) -> Iterator[Span]:
    seen = set[int | None]()
    for span in spans:
        if span.step not in seen and len(seen) > _STEPS + 1:
            return
        seen.add(span.step)
        yield span


Shares = dict[tuple[str, str], float]


def _apart(spans: Mapping[str, list[Span]], start: float, end: float, lent: Collection[str]) -> Shares:
    found, own = (
        defaultdict[tuple[str, str], float](float),
        {name for name in spans if _is_replica(name)}.difference(lent),
    )
    number = len(own)
    for seconds, trainer, others, replicas in _moments(spans, start, end, own):
        share = seconds / (end - start)
        if what := wait_of_trainer(trainer, wait_for_batch(others)):
            found[TRAINER, what] += share
        for phase, count in replicas.items():
            if what := wait_of_replica(phase, trainer):
                found[ENGINES, what] += share * count / number
    return found


def wait_of_trainer(phase: str, for_batch: str) -> str | None:
    """Return what a rank of the trainer in this phase waits for; None: it trains.

    Args:
        for_batch: as of `wait_for_batch`.
    """
    return for_batch if phase == BATCH else _OF_TRAINER.get(phase)


def wait_for_batch(others: Mapping[str, int]) -> str:
    """Return what a trainer without a batch waits for, by how many replicas and scorers are in each phase."""
    return next((what for own, what in _FOR_BATCH.items() if others.get(own)), SAMPLES)


def wait_of_replica(phase: str, trainer: str) -> str | None:
    """Return what a replica in this phase waits for, by the trainer's phase; None: it generates."""
    if phase != IDLE:
        return _OF_REPLICA.get(phase)
    if trainer == BATCH:
        return SLOWEST
    return START if trainer in (IMPORT, LOAD, ABSENT) else _OF_TRAINER.get(trainer, TRAINING)


def _colocated(spans: Mapping[str, list[Span]], start: float, end: float) -> Shares:
    found = defaultdict[tuple[str, str], float](float)
    for seconds, trainer, others, _ in _moments(spans, start, end, ()):
        what = wait_of_trainer(trainer, wait_for_batch(others))
        if trainer == BATCH and what == SAMPLES:
            what = None if others.get("generate") else TURNS
        if what:
            found[GPUS, TURNS if what in (WEIGHTS, LOADING) and trainer == BATCH else what] += seconds / (end - start)
    return found


def _moments(
    spans: Mapping[str, list[Span]], start: float, end: float, own: Collection[str]
) -> Iterator[tuple[float, str, Counter[str], Counter[str]]]:
    """Yield seconds in which no process changes its phase, with the trainer's phase, and how many others, and how many of `own`, are in each."""
    changes = sorted(_changes(spans), key=lambda change: change[0])
    phases, others, replicas, before = dict.fromkeys(spans, ABSENT), Counter[str](), Counter[str](), start
    for at, process, phase in changes:
        at = min(max(at, start), end)
        if at > before:
            yield at - before, phases[FIRST_RANK], others, replicas
            before = at
        of_process = (others, replicas) if process in own else (others,) if process != FIRST_RANK else ()
        for counts in of_process:
            counts[phases[process]] -= 1
            counts[phase] += 1
        phases[process] = phase


def _is_replica(process: str) -> bool:
    return process.startswith(WORKER)


def _changes(spans: Mapping[str, list[Span]]) -> Iterator[tuple[float, str, str]]:
    """Yield when each process begins which phase, in the order of each process."""
    for process, unordered in spans.items():
        own = sorted(unordered, key=lambda span: (span.start, span.end))
        for span, following in zip_longest(own, own[1:]):
            yield span.start, process, span.phase
            # times in files are rounded: a span may end after the next one begins
            if following is None or span.end < following.start:
                yield span.end, process, ABSENT
