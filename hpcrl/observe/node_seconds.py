"""Divides the node seconds of allocations by what they were used for, from timelines. Pure: no files.

A node is divided equally among its devices, and a second of a device counts as what its process does. Where a trainer rank and a replica take
turns on a device, the rank counts, and the replica while the rank waits for its batch. So the seconds of all uses add up to nodes times time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from hpcrl.observe.timeline import ABSENT, ASLEEP, ENVIRONMENT, FIRST_RANK, IDLE, IMPORT, KINDS, LOAD, Span
from hpcrl.observe.waiting import (
    BATCH,
    CHECKPOINTS,
    DUMPS,
    EVALUATION,
    EXPORTS,
    SAMPLES,
    TURNS,
    wait_for_batch,
    wait_of_replica,
    wait_of_trainer,
)
from hpcrl.rundir.allocations import LEFT_OVER
from hpcrl.rundir.process_names import SCORER, WORKER

TRAINED, GENERATED, SCORED, EVALUATED, SAVED = "training", "generation", "scoring", "evaluation", "saving"
STARTING, WAITED, LOST, IDLE_NODES, UNRECORDED = "starting", "waiting", "lost", "idle", "not recorded yet"
CATEGORIES = (TRAINED, GENERATED, SCORED, EVALUATED, SAVED, STARTING, WAITED, LOST, IDLE_NODES, UNRECORDED)
"""What a node second may be; the first three are goodput."""
TRAINED_AGAIN, GENERATED_AGAIN, NOT_TRAINED, KILLED = "trained again", "generated again", "not trained", "until its end"
"""Why a node second is lost."""
JOBS, IMPORTS, MODELS = "jobs and agents", "imports", "models"
"""What starts: the batch script, agents and checks until a process begins; Python's modules of that process; its model or engine."""
UNFINISHED = "unfinished"
"""Phase of a replica whose groups were never finished, in place of `generate`."""

Use = tuple[str, str]
"""A category; and of waiting, lost and idle time, for what or why, else empty."""
Seconds = dict[Use, float]

_TRAIN, _RETRAINED = "train", "retrained"
_TRAINS = frozenset(KINDS["train"])
_SAVES = (CHECKPOINTS, EXPORTS, DUMPS)
_REPLICA, _TURNS = "rollout", "turns"
_NOT_BEGUN = "not begun"
"""State of a device none of whose processes has begun yet."""
_DOES: dict[str, Use] = {
    _NOT_BEGUN: (STARTING, JOBS),
    IMPORT: (STARTING, IMPORTS),
    LOAD: (STARTING, MODELS),
    _TRAIN: (TRAINED, ""),
    _RETRAINED: (LOST, TRAINED_AGAIN),
    "generate": (GENERATED, ""),
    UNFINISHED: (LOST, GENERATED_AGAIN),
    "evaluate": (EVALUATED, ""),
    "score": (SCORED, ""),
}
_GAP_S = 1e-3  # clocks are no better


@dataclass(frozen=True)
class Held:
    """One node of an allocation.

    Attributes:
        attempt: 0 for an element of an elastic pool.
        start, end: Unix time.
        devices: the processes on each device; of two the first is a trainer rank, which takes turns with the other.
        after: use of its time once its processes have ended.
        lends: as of `AllocatedNode`: a sleeping replica waits for nothing, and the rank's own wait counts.
    """

    attempt: int
    role: str
    start: float
    end: float
    devices: Sequence[Sequence[str]]
    after: Use
    lends: bool = False


_Key = tuple[int, str, float, str, str, Use]
"""Attempt and role of a node, share of the node that a device has, whose state it shows, that state, and the use after it."""


@dataclass
class _Device:
    """A device at one moment; `key` is what its seconds are added to, None while its node is not held."""

    node: Held
    processes: Sequence[str]
    held: bool = False
    begun: bool = False
    key: _Key | None = None

    def look(self, states: Mapping[str, str]) -> _Key | None:
        """Return the key for these states of processes."""
        if not self.held:
            return None
        shown = self.processes[0] if self.processes else ""
        state = states[shown]
        whose = shown.partition("-")[0]
        if len(self.processes) > 1 and state in (BATCH, ABSENT):
            other = states[self.processes[1]]
            if not (self.node.lends and other in (ASLEEP, IMPORT, LOAD, ABSENT)):
                whose, state = (_TURNS if state == BATCH else _REPLICA), other
        self.begun |= state != ABSENT
        if self.node.role == LEFT_OVER:
            return (self.node.attempt, LEFT_OVER, 1.0, "", ABSENT, (IDLE_NODES, LEFT_OVER))
        state = state if self.begun else _NOT_BEGUN
        return (self.node.attempt, self.node.role, 1 / max(1, len(self.node.devices)), whose, state, self.node.after)


def node_seconds(
    held: Sequence[Held],
    spans: Mapping[str, Sequence[Span]],
    kept: Mapping[int, float],
    trained: Mapping[int, float],
) -> dict[tuple[int, str], Seconds]:
    """Return by attempt and role the seconds of each use.

    Args:
        spans: of each process, in their order.
        kept: by attempt the last of its steps that no later attempt trained again.
        trained: by attempt the share of the finished groups that training used; 1 where it is not known.
    """
    found: dict[tuple[int, str], Seconds] = {(node.attempt, node.role): {} for node in held}
    for (key, trainer, for_batch), seconds in _sums(held, spans, kept).items():
        attempt, role, *_ = key
        for use, share in _shares(_use(key, trainer, for_batch), trained.get(attempt, 1.0)):
            row = found[attempt, role]
            row[use] = row.get(use, 0.0) + share * seconds
    return found


def _shares(use: Use, trained: float) -> Iterator[tuple[Use, float]]:
    if use[0] != GENERATED or trained >= 1:
        yield use, 1.0
    else:
        yield use, trained
        yield (LOST, NOT_TRAINED), 1 - trained


def _sums(
    held: Sequence[Held], spans: Mapping[str, Sequence[Span]], kept: Mapping[int, float]
) -> dict[tuple[_Key, str, str], float]:
    """Return the node seconds by key, by the trainer's state, and by what the trainer would wait for without a batch."""
    devices = [_Device(node, processes) for node in held for processes in node.devices or [()]]
    of_process = defaultdict[str, list[_Device]](list)
    for device in devices:
        for process in device.processes:
            of_process[process].append(device)
    changes = [(at, process, state, None) for process, own in spans.items() for at, state in _states(own, kept)]
    changes += [(at, "", "", device) for device in devices for at in (device.node.start, device.node.end)]
    helpers = {process for process in spans if process.startswith((WORKER, SCORER))}
    states, others, active = defaultdict[str, str](lambda: ABSENT), Counter[str](), Counter[_Key]()
    sums, before = defaultdict[tuple[_Key, str, str], float](float), 0.0
    for at, process, state, device in sorted(changes, key=itemgetter(0)):
        if at > before and active:
            trainer = states[FIRST_RANK]
            for_batch = wait_for_batch(others) if trainer == BATCH else SAMPLES
            for key, count in active.items():
                sums[key, trainer, for_batch] += count * key[2] * (at - before)
        before = at
        if device:
            device.held = not device.held
            _move(active, device, device.look(states))
            continue
        if process in helpers:
            others[states[process]] -= 1
            others[state] += 1
        states[process] = state
        for own in of_process[process]:
            _move(active, own, own.look(states))
    return sums


def _move(active: Counter[_Key], device: _Device, key: _Key | None) -> None:
    if key == device.key:
        return
    if device.key:
        active[device.key] -= 1
        if not active[device.key]:
            del active[device.key]
    if key:
        active[key] += 1
    device.key = key


def _states(spans: Sequence[Span], kept: Mapping[int, float]) -> Iterator[tuple[float, str]]:
    """Yield when a process enters another state: its phase, or one for all phases that train; it restarts within gaps of an attempt."""
    last, end, attempt = ABSENT, float("inf"), 0
    for span in spans:
        state = span.phase
        if state in _TRAINS:
            state = _RETRAINED if span.step is not None and span.step > kept.get(span.attempt, span.step) else _TRAIN
        if span.start > end + _GAP_S:
            last = LOAD if span.attempt == attempt else ABSENT
            yield end, last
        if state != last:
            yield span.start, state
        last, attempt = state, span.attempt
        end = span.end if end == float("inf") else max(end, span.end)
    if spans:
        yield end, ABSENT


def _use(key: _Key, trainer: str, for_batch: str) -> Use:
    *_, whose, state, after = key
    if state == ABSENT:
        return after
    if state in _DOES:
        return _DOES[state]
    if whose == "rank":
        what = wait_of_trainer(state, for_batch)
        if what in _SAVES:
            return SAVED, what
        if what == EVALUATION and state != BATCH:
            return EVALUATED, ""
        return (WAITED, what) if what else (IDLE_NODES, "between phases")
    if whose in (_REPLICA, _TURNS):
        own = whose == _TURNS and state not in (IDLE, ENVIRONMENT)
        return WAITED, (TURNS if own else wait_of_replica(state, trainer)) or TURNS
    return WAITED, SAMPLES
