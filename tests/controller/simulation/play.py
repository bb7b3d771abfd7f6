"""A run of the controller under a virtual clock: many replicas, long samples, failures.

Plays whole runs with the code that runs in the controller (hpcrl/controller/{admission,batches,dispatch,evaluation}.py); what is
simulated is the rest: replicas that take a drawn time per group, load weights, vanish, come back, join late or are silent for a while and
then deliver what they made; a trainer; groups that are not worth training. Checked all the while: no group trains later than the staleness
allows, none trains or is dropped twice, none is lost, each evaluation has all its rows, and the run gets to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.controller.admission import Admission, staleness
from hpcrl.controller.batches import BatchComposer
from hpcrl.controller.dispatch import Assignment, Dispatcher
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.evaluation import EvalQueue, eval_group_id
from hpcrl.controller.prompt_stream import group_id, group_index
from hpcrl.rundir.process_names import worker_name
from hpcrl.types import Batch, GroupMeta, SampleMeta

_GOOD, _BAD = [0.0, 1.0], [0.0, 0.0]


@dataclass(frozen=True)
class Scene:
    """What is played; times in seconds of the virtual clock.

    Attributes:
        capacity: groups that a replica generates at the same time.
        steps, batch_size, bound, surplus, at_once: as in `Admission`.
        interval: steps between two published versions.
        evaluate, rows: steps between two evaluations, 0 for none, and rows of each; one takes half as long as a group.
        dropped: share of groups that dynamic sampling drops.
        late: share of the replicas that join during the first hour.
        group_s, longest_s: a group takes a Pareto time (shape 1.5) of about that mean, cut off at the longest.
        train_s, load_s: a step of the trainer; a replica's taking in of weights, at most.
        latency_s: of one message.
        lifetime_s: between two failures of a replica, on average.
        absent_s: until it is back, at most.
        silence_s: after which a replica counts as gone.
        claim_s: for which a claim waits.
        told, silent: share of failures that the controller is told of; of those in which the replica goes on unheard.
    """

    replicas: int = 1000
    capacity: int = 8
    steps: int = 500
    batch_size: int = 2000
    bound: int = 2
    surplus: int = 0
    at_once: int | None = None
    interval: int = 1
    evaluate: int = 0
    rows: int = 4000
    dropped: float = 0.1
    late: float = 0.2
    group_s: float = 60.0
    longest_s: float = 2400.0
    train_s: float = 10.0
    load_s: float = 6.0
    latency_s: float = 0.02
    lifetime_s: float = 7200.0
    absent_s: float = 600.0
    silence_s: float = 60.0
    claim_s: float = 10.0
    told: float = 0.3
    silent: float = 0.3
    seed: int = 0


@dataclass
class Replica:
    """A replica; `life` changes when what was planned for it is void.

    Attributes:
        held: groups that it generates, with the version that began each.
        rows: of the evaluation of its version that it generates.
        outbox: what it finished while nobody heard it.
        asks: whether a claim of it is under way.
    """

    name: str
    version: int = -1
    life: int = 0
    here: bool = False
    heard: bool = False
    loading: bool = False
    asks: bool = False
    held: dict[int, int] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    outbox: list[int] = field(default_factory=list)
    busy_since: float = 0.0


class Play:
    """One run of a scene.

    Attributes:
        trained, dropped, given_up: how many groups.
        busy, idle: seconds of all replicas with groups, and without while there were some that they might begin.
        counts: how often what happened.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self._draw = scene, random.Random(scene.seed)
        self.admission = Admission(scene.batch_size, scene.bound, scene.steps, scene.at_once, scene.surplus)
        sampling = DynamicSampling(DynamicSamplingConfig(type="filter", max_sample_batches=0))
        self._composer = self._make_composer(sampling)
        self._evaluation = EvalQueue(1_000_000)
        self._dispatcher = Dispatcher(self.admission, self._evaluation, 2, 1)
        self._replicas = [Replica(worker_name(number)) for number in range(scene.replicas)]
        self._by_name = {replica.name: replica for replica in self._replicas}
        self._events = list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]()
        self._number = 0
        self.now = self._progress = 0.0
        self.version = self._step = 0
        self._training = False
        self._ready = dict[int, list[GroupMeta]]()
        self._fate = dict[int, str]()
        self._empty = 0  # replicas that are heard, hold the newest version and have nothing to do
        self.trained = self.dropped = self.given_up = self.steps_late = self.evaluated = 0
        self.busy = self.idle = 0.0
        self.counts = {"vanished": 0, "silent": 0, "joined": 0, "taken back": 0, "late accepted": 0, "late refused": 0}

    @property
    def idle_share(self) -> float:
        """Share of the replicas' time with groups to begin or to generate in which they had none."""
        return self.idle / (self.idle + self.busy)

    def _make_composer(self, sampling: DynamicSampling) -> BatchComposer:
        return BatchComposer(self.admission, sampling, self.scene.batch_size)

    def run(self) -> None:
        """Play to the last step.

        Raises:
            AssertionError: a property does not hold.
        """
        scene = self.scene
        for number, replica in enumerate(self._replicas):
            late = number < scene.late * scene.replicas
            self._at(self._draw.uniform(0.0, 3600.0 if late else scene.load_s), self._appear, replica)
        while self._step < scene.steps or self._evaluation.open:
            before, (self.now, _, event, arguments) = self.now, heappop(self._events)
            if self._empty and self.admission.room(self.version) > 0:
                self.idle += self._empty * (self.now - before)
            event(*arguments)
            stuck = self.now - self._progress
            assert stuck < 10 * (scene.longest_s + scene.absent_s), f"nothing happens any more in step {self._step + 1}"
        for replica in self._replicas:
            if replica.here and replica.held:
                self._worked(replica)
        self._account()

    def _account(self) -> None:
        """Check that each group that was begun is trained, dropped or given up."""
        assert self.trained == self.scene.steps * self.scene.batch_size
        assert len(self._fate) == self.trained + self.dropped + self.given_up
        lost = [index for index in range(self.admission.cursor) if index not in self._fate]
        assert not lost, f"groups {lost} are lost"
        assert len(self._fate) == self.admission.cursor

    def _at(self, after: float, event: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heappush(self._events, (self.now + after, self._number, event, arguments))

    # replicas

    def _appear(self, replica: Replica) -> None:
        """A replica's engine is ready, with the initial model."""
        replica.here = replica.heard = True
        replica.version = -1
        self.counts["joined"] += 1
        self._dispatcher.join(replica.name)
        self._reconcile(replica)  # what it had before it vanished
        self._hand_out()
        self._load(replica)
        self._at(self._draw.expovariate(1 / self.scene.lifetime_s), self._fail, replica, replica.life)

    def _load(self, replica: Replica) -> None:
        replica.loading = True
        after = self._draw.uniform(0.5, 1.0) * self.scene.load_s
        self._at(after, self._loaded, replica, replica.life, self._wanted(replica))

    def _loaded(self, replica: Replica, life: int, version: int) -> None:
        if replica.life != life:
            return
        replica.version, replica.loading = version, False
        self._empty += self._is_empty(replica)
        self._go_on(replica)

    def _wanted(self, replica: Replica) -> int:
        name, blocked = replica.name, self._evaluation.full or self._step == self.scene.steps
        goes_back = (
            blocked and self._evaluation.room() > 0 and name == min(each.name for each in self._replicas if each.heard)
        )
        return self._evaluation.wanted(replica.version, self.version, goes_back=goes_back)

    def _go_on(self, replica: Replica) -> None:
        """Load the version that the replica should have, once its rows have ended, or claim."""
        if replica.loading or not replica.heard:
            return
        wanted = self._wanted(replica)
        if wanted == replica.version or replica.rows:
            self._claim(replica)
        elif wanted > replica.version or not replica.held:
            self._leave_idle(replica)
            self._dispatcher.withdraw(replica.name)
            replica.asks = False
            self._load(replica)

    def _fail(self, replica: Replica, life: int) -> None:
        if replica.life != life:
            return
        kind, back = self._draw.random(), self._draw.uniform(0.0, self.scene.absent_s)
        self._leave_idle(replica)
        replica.heard = replica.asks = False
        if kind < self.scene.silent:
            self.counts["silent"] += 1
            self._at(back, self._heard_again, replica, life)
        else:
            self.counts["vanished"] += 1
            if len(replica.held) > len(replica.outbox):
                self._worked(replica)
            replica.held, replica.rows, replica.outbox, replica.here = {}, set(), [], False
            replica.life += 1
            self._at(back, self._appear, replica)
        told = kind >= self.scene.silent and self._draw.random() < self.scene.told
        self._at(0.0 if told else self.scene.claim_s, self._cut, replica, replica.life)
        self._at(0.0 if told else self.scene.silence_s, self._gone, replica, replica.life)

    def _cut(self, replica: Replica, life: int) -> None:
        """The answer to the claim that was under way has been given, to nobody."""
        if replica.life == life and not replica.heard:
            self._dispatcher.withdraw(replica.name)

    def _gone(self, replica: Replica, life: int) -> None:
        if replica.life != life or replica.heard:
            return
        self._dispatcher.leave(replica.name)
        self.counts["taken back"] += len(self.admission.release(replica.name))
        self._evaluation.release(replica.name)
        self._hand_out()

    def _heard_again(self, replica: Replica, life: int) -> None:
        if replica.life != life:
            return
        replica.heard = True
        self._dispatcher.join(replica.name)
        self._empty += self._is_empty(replica)
        outbox, replica.outbox = replica.outbox, []
        for index in outbox:
            self._deliver(replica, index, replica.held.pop(index))
        self._empty += bool(outbox) and self._is_empty(replica)
        self._compose()
        self._reconcile(replica)
        self._go_on(replica)
        self._hand_out()
        self._at(self._draw.expovariate(1 / self.scene.lifetime_s), self._fail, replica, life)

    def _finish(self, replica: Replica, life: int, index: int) -> None:
        if replica.life != life:
            return
        if not replica.heard:
            replica.outbox.append(index)
            if len(replica.outbox) == len(replica.held):
                self._worked(replica)
            return
        self._deliver(replica, index, replica.held.pop(index))
        if not replica.held:
            self._worked(replica)
            self._empty += self._is_empty(replica)
        self._compose()
        self._go_on(replica)
        self._hand_out()

    def _finish_row(self, replica: Replica, life: int, name: str) -> None:
        """A row that ends while its replica is not heard is generated again by another one."""
        if replica.life != life or name not in replica.rows:
            return
        replica.rows.remove(name)
        if not replica.heard:
            return
        version = replica.version
        meta = GroupMeta(name, "eval", 0, "", [SampleMeta(1.0, (2,), 1, "stop", {}, 1.0)], version, version, "s", 1.0)
        self._evaluation.complete(meta)
        self._dispatcher.load_changed(replica.name)
        for _, groups in self._evaluation.conclude():
            assert len(groups) == self.scene.rows
            self.evaluated += 1
        self._empty += self._is_empty(replica)
        self._go_on(replica)
        self._train()
        self._hand_out()

    def _worked(self, replica: Replica) -> None:
        """Count the time in which a replica had groups, which has ended."""
        self.busy += self.now - replica.busy_since

    def _is_empty(self, replica: Replica) -> bool:
        """Return whether a replica could begin groups of the newest version and has nothing to do."""
        busy = replica.held or replica.rows or replica.loading
        return replica.heard and not busy and replica.version == self.version

    def _leave_idle(self, replica: Replica) -> None:
        self._empty -= self._is_empty(replica)

    # what the replicas ask of the controller

    def _claim(self, replica: Replica) -> None:
        room = self.scene.capacity - len(replica.held) - -(-len(replica.rows) // 2)
        if replica.asks or room <= 0:
            return
        self._reconcile(replica)
        behind = replica.version != self.version
        assignment = self._dispatcher.claim(replica.name, replica.version, room, behind=behind)
        if assignment:
            self._begin(replica, assignment)
        else:
            replica.asks = True
            self._dispatcher.wait(replica.name, replica.version, room)

    def _begin(self, replica: Replica, assignment: Assignment) -> None:
        scene, wait = self.scene, 2 * self.scene.latency_s
        self._leave_idle(replica)
        for row in assignment.rows:
            name = eval_group_id(assignment.version, row)
            replica.rows.add(name)
            seconds = min(scene.longest_s, scene.group_s / 6.0 * self._draw.paretovariate(1.5))
            self._at(seconds + wait, self._finish_row, replica, replica.life, name)
        if assignment.indices and not replica.held:
            self.idle += wait
            replica.busy_since = self.now + wait
        for index in assignment.indices:
            if index in replica.held:  # taken from it while it was silent, and given to it anew
                continue
            replica.held[index] = replica.version
            seconds = min(scene.longest_s, scene.group_s / 3.0 * self._draw.paretovariate(1.5))
            self._at(seconds + wait, self._finish, replica, replica.life, index)

    def _hand_out(self) -> None:
        for name, assignment in self._dispatcher.assignments(self.version):
            replica = self._by_name[name]
            if replica.heard and replica.asks:  # else the answer gets lost
                replica.asks = False
                self._begin(replica, assignment)

    def _reconcile(self, replica: Replica) -> None:
        self.admission.release(replica.name, replica.held)
        self._evaluation.release(replica.name, replica.rows)
        self.admission.reclaim(replica.name, replica.version, replica.held)

    def _deliver(self, replica: Replica, index: int, version: int) -> None:
        owner = self.admission.worker_of(index)
        rewards = _BAD if self._draw.random() < self.scene.dropped else _GOOD
        samples = [SampleMeta(reward, (2,), 1, "stop", {}, reward) for reward in rewards]
        meta = GroupMeta(group_id(index), "train", 0, "", samples, version, replica.version, "s", 1.0)
        reason = self._composer.complete(index, meta)
        if reason is None and self.admission.is_finished(index):
            self._finished(index, meta)
        self._progress = self.now
        if owner is not None:
            self._dispatcher.load_changed(owner)
        if owner != replica.name:
            self.counts["late refused" if reason else "late accepted"] += 1

    def _finished(self, index: int, meta: GroupMeta) -> None:
        """A group may train."""

    # the trainer

    def _next_batch(self) -> Batch | None:
        """Return the batch of the next step, or None while it is not complete."""
        return self._composer.batch()

    def _compose(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._composer.take()
            self._ready[batch.step] = batch.groups
            for group in batch.groups:
                self._end(group.group_id, "trained")
            for name in batch.dropped:
                self._end(name, "dropped")
            for name in batch.given_up:
                self._end(name, "given up")
            self.trained += len(batch.groups)
            self.dropped += len(batch.dropped)
            self.given_up += len(batch.given_up)
        self._train()

    def _end(self, name: str, fate: str) -> None:
        index = group_index(name)
        assert index is not None
        assert index not in self._fate, f"{name} was {self._fate[index]} and is {fate} now"
        self._fate[index] = fate

    def _train(self) -> None:
        waits = self._training or self._evaluation.full
        groups = None if waits else self._ready.pop(self._step + 1, None)
        if groups is not None:
            self._training = True
            for group in groups:
                assert 0 <= staleness(self._step + 1, group) <= self.scene.bound, f"step {self._step + 1}: {group}"
            self._at(self.scene.train_s, self._trained)

    def _trained(self) -> None:
        self._training, self._step, self._progress = False, self._step + 1, self.now
        if self._step % self.scene.interval == 0 or self._step == self.scene.steps:
            self.version, self._empty = self._step, 0
            if self.scene.evaluate and self._step % self.scene.evaluate == 0:
                self._evaluation.begin(self.version, self.scene.rows)
            for replica in self._replicas:
                self._dispatcher.withdraw(replica.name)
                replica.asks = False
                self._go_on(replica)
        self._train()
