"""HTTP routes of the controller (hpcrl/runtime/controller_client.py), long polling, and the end of the attempt."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from hpcrl.controller.recovery import History
from hpcrl.controller.replicas import TICK_S, GpuLease, ReplicaHealth
from hpcrl.controller.service import WAITS, Service
from hpcrl.errors import DataError
from hpcrl.observe.goodput import GoodputMeter
from hpcrl.observe.timeline import IDLE, LOAD, Timeline
from hpcrl.rundir.commit import discard
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import FINISHED
from hpcrl.runtime.http_server import Route
from hpcrl.runtime.process_status import GIVEN_UP, RENEW_S, read_process_status, trainer_left
from hpcrl.runtime.signals import stop_asked
from hpcrl.types import Work

WAIT_S = 10.0
_READ_S = 10.0  # an answer to the trainer, while there is more to read
_GOODBYE_S = 20.0


class Api:
    """Routes over a `Service`, which is touched by one request at a time.

    Args:
        save_seconds: how long a trainer may take to save where the run cannot go on; 0: as long as it likes.
        timeline: of this process; None: nobody looks at one.
        goodput: of the attempt, measured at each commit; None: it is not.
    """

    def __init__(
        self,
        service: Service,
        save_seconds: float,
        timeline: Timeline | None = None,
        goodput: GoodputMeter | None = None,
    ) -> None:
        self._service, self._save_seconds, self._timeline, self._goodput = service, save_seconds, timeline, goodput
        self._measuring: asyncio.Task[None] | None = None
        self._making: asyncio.Task[None] | None = None
        self._schemas = service.schemas()
        self._changed = asyncio.Condition()
        self._waiting: dict[str, asyncio.Future[list[Work]]] = {}
        self._lease = GpuLease()
        self._told: tuple[int | None, bool] = None, False
        self._looked = time.monotonic()
        self._trainer_got_end = False
        self._reading: tuple[int, asyncio.Task[History]] | None = None

    def routes(self) -> dict[str, Route]:
        handlers = (
            self.report,
            self.claim,
            self.lease,
            self.complete,
            self.leave,
            self.start,
            self.published,
            self.next,
            self.committed,
            self.claim_scores,
            self.scored,
            self.status,
        )
        return {f"/{one.__name__}": Route(one, getattr(self._schemas, one.__name__)) for one in handlers}

    async def report(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.check_version(body["version"])
        worker = self._service.seen(body["worker"], body["version"], body["state"], body.get("any_version"))
        worker.stop_sent = self._service.stop is not None
        unwanted = self._service.unwanted(body["worker"], body.get("holding", []))
        version, newest = self._service.wanted(body["worker"], body["version"]), self._service.version
        return {"stop": self._service.stop, "version": version, "newest": newest, "unwanted": unwanted}

    async def claim(self, body: dict[str, Any]) -> dict[str, Any]:
        service, name, version = self._service, body["worker"], body["version"]
        service.check_version(version)
        worker = service.seen(name, version, "waiting", body.get("any_version"))
        service.reconcile(name, version, body["holding"])
        lent = name in service.lending.lent
        if lent:
            service.lending.times.awake(name, time.monotonic())
        # what begins now would wait for the engine, with an older version than it need have
        work = [] if self._recalls(name) else service.claim(name, version, body["capacity"])
        if lent and not work and service.version is not None:
            service.lending.note_idle(name, service.version)
            await self._notify()
        if not work and not service.stop and service.keeps(name, version):
            work = await self._work(name, version, body["capacity"])
        else:
            self._hand_out()  # what an answer that got lost had assigned to this worker
        worker.stop_sent = service.stop is not None
        unwanted = service.unwanted(name, body["holding"])
        given = [item.to_json() for item in work]
        return {
            "stop": service.stop,
            "version": service.wanted(name, version),
            "newest": service.version,
            "work": given,
            "unwanted": unwanted,
        }

    async def lease(self, body: dict[str, Any]) -> dict[str, Any]:
        service, name, deadline = self._service, body["worker"], time.monotonic() + WAIT_S
        held = await (self._holds if body["awake"] else self._granted)(name, deadline)
        known = service.workers.get(name)
        if known:
            known.stop_sent = service.stop is not None
        return {"stop": service.stop, "version": service.wanted(name, known.version if known else 0), "lease": held}

    async def _granted(self, name: str, deadline: float) -> bool:
        """Wait until a worker without the lease may have it; return whether it may."""
        service, request = self._service, self._lease.ask(name)
        if name in service.lending.lent:
            service.lending.rest(name, time.monotonic(), starts=name not in service.workers)
            self._answer(name)  # a claim that it made before
        await self._notify()  # the trainer may have waited for this engine
        while not service.stop and time.monotonic() < deadline:
            if self._may_wake(name) and self._lease.grant(name, request):
                if name in service.lending.lent:
                    service.lending.wake(name, time.monotonic())
                return True
            await self._wait(deadline)
        return False

    async def _holds(self, name: str, deadline: float) -> bool:
        """Wait until a worker is to give its lease back; return whether it keeps it."""
        while not self._service.stop and time.monotonic() < deadline:
            if self._recalls(name) or name not in self._lease.awake:
                self._service.lending.note_recall(name, time.monotonic())
                return False
            await self._wait(deadline)
        return True

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = self._schemas.groups(body["groups"])
        rejected = self._service.complete(groups)
        await self._notify()
        return {"accepted": [g.group_id for g in groups if g.group_id not in rejected], "rejected": rejected}

    async def leave(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = self._service.leave(body["worker"])
        self._lease.leave(body["worker"])
        self._answer(body["worker"])
        if groups and not self._service.stop:
            print(f"{body['worker']} leaves; {groups} groups of it go to others", flush=True)
        await self._notify()
        return {}

    async def start(self, body: dict[str, Any]) -> dict[str, Any]:
        service, step, history = self._service, body["step"], None
        if service.version is None:
            # beside the others, who get answers meanwhile: many samples on a shared filesystem take minutes
            if self._reading is None or self._reading[0] != step:
                self._reading = step, asyncio.create_task(asyncio.to_thread(service.history, step))
            reading = self._reading[1]
            await asyncio.wait([reading], timeout=_READ_S)
            if not reading.done():
                return {"total_steps": None, "steps_per_epoch": None}
            self._reading = None
            history = reading.result()
        total = service.start(step, history)
        if service.ahead and self._making is None:
            self._making = service.ahead.start(self._notify)
        await self._notify()
        return {"total_steps": total, "steps_per_epoch": service.steps_per_epoch}

    async def published(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.published(body["version"], body.get("weights", True))
        await self._notify()
        return {}

    async def next(self, body: dict[str, Any]) -> dict[str, Any]:
        service, step, deadline = self._service, body["step"], time.monotonic() + body.get("wait", WAIT_S)
        if step > service.total_steps:
            service.check_trained()
            self._trainer_got_end = True
            return {"stop": FINISHED, "path": None, "lend": False}
        path, times, away, lend = self._batch(step), service.lending.times, body.get("away", False), False
        if path is None and service.lending.lent and service.phase == WAITS:
            times.trainer_waits(time.monotonic(), away=away, onload=body.get("onload", 0.0))
            await self._notify()  # engines may wait for its GPUs
        while path is None and not service.stop:
            lend = not away and any(map(service.wants_lease, self._lease.asking))
            if lend or time.monotonic() >= deadline:
                break
            await self._wait(deadline)
            path = self._batch(step)
        if lend:
            times.trainer_leaves(time.monotonic())
        elif path:
            times.trainer_trains(time.monotonic())
        return {"stop": service.stop, "path": None if service.stop else path, "lend": lend}

    async def committed(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.committed()
        if self._goodput and (self._measuring is None or self._measuring.done()):
            self._measuring = asyncio.create_task(self._measure(self._goodput, body["step"]))
        return {}

    async def _measure(self, goodput: GoodputMeter, step: int) -> None:
        self._service.measured(step, await asyncio.to_thread(goodput.shares))

    async def claim_scores(self, body: dict[str, Any]) -> dict[str, Any]:
        service, name, deadline = self._service, body["scorer"], time.monotonic() + body.get("wait", WAIT_S)
        scores, wanted = service.scores, (name, body["samples"], body["holding"])
        scorer = scores.registry.seen(name, service.version or 0, "scoring")
        while not (groups := scores.claim(*wanted)) and not service.stop and time.monotonic() < deadline:
            await self._wait(deadline)
        scorer.stop_sent = service.stop is not None
        return {"stop": service.stop, "groups": [group.to_json() for group in groups]}

    async def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.scores.registry.seen(body["scorer"], self._service.version or 0, "scoring")
        unwanted = self._service.scored(body["scorer"], body["digests"], body.get("rewards", {}))
        await self._notify()
        return {"unwanted": unwanted}

    async def status(self, body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return self._service.status()

    async def end(self, reason: str) -> None:
        self._service.stop = self._service.stop or reason
        await self._notify()

    async def watch(self, run: Run, attempt: int, say: Callable[[str], None]) -> None:
        """Watch for the stop file, silent workers and failures; return when the run has finished and trainer and workers know it.

        Workers that do not ask again are given 20 s.

        Raises:
            HpcrlError: the run cannot go on; the trainer has saved what it trained, or was given time to.
        """
        service, finished_at = self._service, None
        health = [ReplicaHealth(run, attempt, few) for few in (service.min_replicas, *service.scores.needed)]
        while True:
            if reason := stop_asked(run, attempt):
                await self.end(reason)
            if not service.stop:
                calling, training = {*service.workers, *service.scores.registry.workers}, service.version is not None
                told = [one.failure(calling, training) for one in health]
                service.failure = service.failure or next(filter(None, told), None)
                if self._making and self._making.done():
                    try:
                        self._making.result()
                    except DataError as error:
                        service.failure = service.failure or error
            if service.failure:
                say("the run cannot go on; waiting for the trainer to save")
                await self._stop_trainer(run, attempt)
                raise service.failure
            for name in service.expire():
                self._answer(name)
                say(f"{name} is silent; its groups go to others")
                await self._notify()
            await self._forget_given_up(run, attempt)
            for name in service.scores.expire():
                say(f"{name} is silent; its groups go to others")
                await self._notify()
            # the trainer still saves after it has published the last version
            if service.stop == FINISHED and self._trainer_got_end:
                finished_at = finished_at or time.monotonic()
                clients = [*service.workers.values(), *service.scores.registry.workers.values()]
                all_know = all(client.stop_sent for client in clients)
                if all_know or time.monotonic() - finished_at > _GOODBYE_S:
                    discard(run.turns)
                    discard(run.snapshots)
                    return
            await asyncio.sleep(TICK_S)

    async def _forget_given_up(self, run: Run, attempt: int) -> None:
        """Release the lease of workers that their agents have given up, where the message was lost."""
        if not any(map(self._recalls, self._lease.awake)) or time.monotonic() - self._looked < RENEW_S:
            return
        self._looked = time.monotonic()
        for name in list(self._lease.awake):
            status = read_process_status(run, name, attempt)
            if status and status.state.startswith(GIVEN_UP):
                self._lease.leave(name)
                await self._notify()

    async def _stop_trainer(self, run: Run, attempt: int) -> None:
        """Let the trainer save: its agent ends it as soon as this process fails."""
        await self.end("failed")
        deadline = time.monotonic() + (self._save_seconds or math.inf)
        while not trainer_left(run, attempt) and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)

    def _trains(self) -> bool:
        return self._service.colocated and self._service.phase == IDLE and not self._service.stop

    def _may_wake(self, name: str) -> bool:
        """Return whether an engine may have the trainer's devices now."""
        service = self._service
        if name in service.lending.lent:
            return service.lending.times.away and service.wants_lease(name)
        return service.phase not in (IDLE, LOAD)

    def _recalls(self, name: str) -> bool:
        """Return whether an engine that has the trainer's devices is to give them back."""
        lending = self._service.lending
        return lending.recalls(name) if name in lending.lent else self._trains()

    def _batch(self, step: int) -> str | None:
        """Return the path of a batch that may be trained now: no engine is awake on the trainer's devices."""
        return None if self._lease.awake else self._service.batch(step)

    def _hand_out(self) -> None:
        if self._trains():
            return
        for name, work in self._service.assignments():
            self._answer(name, work)
        if self._service.ahead:
            self._service.ahead.claimed.set()

    async def _work(self, name: str, version: int, capacity: int) -> list[Work]:
        """Return the work for a worker as soon as there is some; none after a while, or with news of the run."""
        self._answer(name)  # an earlier request of the same worker, which has given up on it
        waiting = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._service.wait(name, version, capacity)
        timer = asyncio.get_running_loop().call_later(WAIT_S, self._answer, name)
        try:
            return await waiting
        finally:
            timer.cancel()

    def _answer(self, name: str, work: list[Work] | None = None) -> None:
        self._service.withdraw(name)
        waiting = self._waiting.pop(name, None)
        if waiting and not waiting.done():  # done: its connection was cut
            waiting.set_result(work or [])

    async def _notify(self) -> None:
        service = self._service
        if self._timeline:
            self._timeline.enter(service.phase)
        if service.lending.times.waits and service.phase != WAITS:
            service.lending.times.batch_complete(time.monotonic())
            for name in service.lending.lent:
                self._answer(name)
        news = service.version, self._trains()
        if service.stop or news != self._told:
            self._told = news
            for name in list(self._waiting):
                self._answer(name)
        for name in service.outdated():
            self._answer(name)
        async with self._changed:
            self._changed.notify_all()  # first the trainer, which may wait for a batch
        self._hand_out()

    async def _wait(self, deadline: float) -> None:
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
            pass
