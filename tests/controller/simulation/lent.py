"""A run with engines on the trainer's GPUs, which generate while it waits: leases that end at any moment.

Plays with the controller's own policy of leases (hpcrl/controller/lending.py). Checked beside what every run checks: no engine is awake while the
trainer trains, what an engine has begun goes on with its next lease, and no batch waits forever for an engine that sleeps. Engines die, and fall
silent, in every state of a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcrl.controller.dispatch import Dispatcher
from hpcrl.controller.lending import Lending
from hpcrl.rundir.process_names import worker_name
from tests.controller.simulation.play import Play, Replica, Scene

ASLEEP, WAKES, AWAKE, FALLS = "asleep", "wakes", "awake", "falls asleep"


@dataclass(frozen=True)
class LeaseScene:
    """What is played of leases; times in seconds of the virtual clock.

    Attributes:
        lent: engines on the trainer's GPUs.
        offload_s, onload_s: the trainer's way off its GPUs, and back.
        start_s, wake_s, sleep_s: of an engine.
    """

    lent: int = 250
    offload_s: float = 2.0
    onload_s: float = 2.0
    start_s: float = 60.0
    wake_s: float = 3.0
    sleep_s: float = 2.0


class LentPlay(Play):
    """One run of a scene with leases.

    Attributes:
        leases: how many there were, by the state of the engine in which it died or fell silent, and under "given" all.
    """

    def __init__(self, scene: Scene, leases: LeaseScene) -> None:
        super().__init__(scene)
        self._times, names = leases, [worker_name(scene.replicas + number) for number in range(leases.lent)]
        self._dispatcher = Dispatcher(self.admission, self._evaluation, 2, 1, lent=names)
        self._lending = Lending(names, self.admission, self._dispatcher, self._evaluation, scene.batch_size)
        self._states = dict.fromkeys(names, ASLEEP)
        self._started = set[str]()
        self._due: dict[tuple[str, int], float] = {}
        self._rested: dict[str, float] = {}
        self._moves = False
        replicas = [Replica(name) for name in names]
        self._replicas += replicas
        self._by_name |= {one.name: one for one in replicas}
        self.leases = {"given": 0, ASLEEP: 0, WAKES: 0, AWAKE: 0, FALLS: 0}

    def _at(self, after: float, event: Callable[..., None], *arguments: Any) -> None:
        if event == self._finish and arguments[0].name in self._states:
            self._due[arguments[0].name, arguments[2]] = self.now + after
        super()._at(after, event, *arguments)

    # lent engines

    def _appear(self, replica: Replica) -> None:
        if replica.name not in self._states:
            self._lending.times.replica_started(self.now)
            super()._appear(replica)
            return
        replica.here = replica.heard = True
        replica.version = -1
        self._started.discard(replica.name)
        self.counts["joined"] += 1
        self.counts["taken back"] += len(self.admission.release(replica.name))
        self._sleeps(replica, replica.life)
        self._at(self._draw.expovariate(1 / self.scene.lifetime_s), self._fail, replica, replica.life)

    def _sleeps(self, replica: Replica, life: int) -> None:
        """The engine sleeps, or has yet to start; the controller hears it, or not."""
        if replica.life != life:
            return
        name = replica.name
        self._states[name], self._rested[name], replica.asks = ASLEEP, self.now, False
        if replica.heard:
            self._lending.rest(name, self.now, starts=name not in self._started)
        self._train()
        self._hand_out()

    def _lease(self, replica: Replica) -> None:
        name = replica.name
        assert not self._training, f"{name} wakes while the trainer trains"
        self._states[name] = WAKES
        self._lending.wake(name, self.now)
        self.leases["given"] += 1
        seconds = self._times.wake_s if name in self._started else self._times.start_s
        self._at(seconds, self._woken, replica, replica.life)

    def _woken(self, replica: Replica, life: int) -> None:
        if replica.life != life:
            return
        name = replica.name
        self._states[name], replica.version = AWAKE, self.version
        self._started.add(name)
        for index in replica.held:  # they go on where they were
            if index not in replica.outbox:
                after = self._due[name, index] - self._rested[name]
                self._at(max(0.0, after), self._finish, replica, replica.life, index)
        if replica.heard:
            self._lending.times.awake(name, self.now)
        self._go_on(replica)
        self._recall()

    def _recall(self) -> None:
        for name, state in self._states.items():
            replica = self._by_name[name]
            if state == AWAKE and replica.heard and self._lending.recalls(name):
                self._states[name] = FALLS
                self._lending.note_recall(name, self.now)
                self._at(self._times.sleep_s, self._sleeps, replica, replica.life)

    def _finish(self, replica: Replica, life: int, index: int) -> None:
        name = replica.name
        if name in self._states:
            stopped = (
                self._states[name] not in (AWAKE, FALLS) or abs(self._due.get((name, index), -1.0) - self.now) > 1e-6
            )
            if stopped or index not in replica.held or index in replica.outbox:
                return
        super()._finish(replica, life, index)

    def _fail(self, replica: Replica, life: int) -> None:
        if replica.name in self._states and replica.life == life:
            self.leases[self._states[replica.name]] += 1
        super()._fail(replica, life)
        if replica.name in self._states and not replica.here:
            self._states[replica.name] = ASLEEP  # a process that has ended has no GPU
            self._train()

    def _gone(self, replica: Replica, life: int) -> None:
        gone = replica.life == life and not replica.heard
        if gone and replica.name in self._states:
            self._lending.leave(replica.name)
        super()._gone(replica, life)

    def _heard_again(self, replica: Replica, life: int) -> None:
        super()._heard_again(replica, life)
        if replica.name in self._states and replica.life == life:
            if self._states[replica.name] == ASLEEP:
                self._sleeps(replica, life)
            self._recall()

    def _go_on(self, replica: Replica) -> None:
        if replica.name not in self._states:
            super()._go_on(replica)
        elif self._states[replica.name] == AWAKE and replica.heard and not self._lending.recalls(replica.name):
            if self._lending.begins(replica.name):
                self._claim(replica)
            if replica.asks or not self._lending.begins(replica.name):
                self._lending.note_idle(replica.name, self.version)
                self._recall()

    def _worked(self, replica: Replica) -> None:
        if replica.name not in self._states:
            super()._worked(replica)

    def _is_empty(self, replica: Replica) -> bool:
        return replica.name not in self._states and super()._is_empty(replica)

    def _deliver(self, replica: Replica, index: int, version: int) -> None:
        super()._deliver(replica, index, version)
        self._lending.times.finished(replica.name)

    def _hand_out(self) -> None:
        super()._hand_out()
        self._look()

    # the trainer

    def _look(self) -> None:
        """The trainer asks for its batch, and sleeping engines for a lease."""
        times = self._lending.times
        if self._training or self._step + 1 in self._ready or self._step == self.scene.steps or self.version == 0:
            return
        if not times.waits:
            times.trainer_waits(self.now, away=times.away, onload=self._times.onload_s)
        own = {one.name: one.version for one in self._replicas if one.heard and one.name not in self._states}
        left = self.scene.steps - self.admission.composed
        asleep = [self._by_name[name] for name, state in self._states.items() if state == ASLEEP]
        for replica in asleep:
            if replica.heard and replica.here and self._lending.wants(replica.name, self.version, own, left):
                if times.away:
                    self._lease(replica)
                elif not self._moves:
                    self._moves = True
                    times.trainer_leaves(self.now)
                    self._at(self._times.offload_s, self._left)

    def _left(self) -> None:
        self._moves = False
        times = self._lending.times
        if times.waits:
            times.trainer_waits(self.now, away=True)
        times.away = True
        self._train()
        self._look()

    def _train(self) -> None:
        times, ready = self._lending.times, self._step + 1 in self._ready
        if ready and times.waits:
            times.batch_complete(self.now)
            self._recall()
        if self._moves or any(state != ASLEEP for state in self._states.values()):
            return
        super()._train()
        if self._training and ready:
            times.trainer_trains(self.now)

    def _trained(self) -> None:
        assert all(state == ASLEEP for state in self._states.values()), "an engine is awake while the trainer trains"
        super()._trained()
        self._look()
