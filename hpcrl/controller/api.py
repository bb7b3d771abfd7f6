"""The controller's HTTP skin: routes of hpcrl/runtime/controller_client.py, who may call them, waiting, and the end of the attempt.

A request that lacks something, or asks for what the run cannot do, is answered with 400 and a reason. Any other exception is an
error of hpcrl itself: it is answered with 500, and uvicorn writes its traceback into the controller's log.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hpcrl.controller.recovery import History
from hpcrl.controller.replicas import TICK_S, ReplicaHealth
from hpcrl.controller.schema import BadRequest, Schema
from hpcrl.controller.service import Service
from hpcrl.errors import HpcrlError
from hpcrl.rundir.commit import discard
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import FINISHED
from hpcrl.runtime.process_status import trainer_left
from hpcrl.runtime.signals import stop_asked
from hpcrl.runtime.token import NONCE, SIGNATURE, AttemptKey, Seen, same
from hpcrl.types import Work

WAIT_S = 10.0
_READ_S = 10.0  # an answer to the trainer, while there is more to read
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_GOODBYE_S = 20.0
_MAX_BODY = 16 << 20
IDLE_S = 40.0  # a connection on which nothing is asked ends after this time, and at most as long again


class Refused(Exception):
    """Who has sent a request, or what it is as a whole, keeps it from being answered."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Route:
    """What answers a path, and what it is asked."""

    handler: Handler
    schema: Schema


class Guard:
    """ASGI application: no request gets past it that is not signed by a process of the attempt, or was sent before; its answers are signed.

    It speaks ASGI itself: what a web framework does for each request takes longer than what the controller does.
    """

    def __init__(self, routes: Mapping[str, Route], token: str, run: str, attempt: int) -> None:
        self._routes, self._key, self._seen = routes, AttemptKey.of(token, run, attempt), Seen()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            body = await self._body(scope["path"], given, receive)
        except Refused as refusal:
            # not signed: anybody could ask for it
            await self._send(send, refusal.status, {"error": str(refusal)}, None)
            return
        try:
            status, answer = await self._answer(scope, body)
        except BaseException:
            await self._send(send, 500, {"error": "an error of hpcrl itself"}, given[NONCE])
            raise
        await self._send(send, status, answer, given[NONCE])

    async def _body(self, path: str, given: Mapping[str, str], receive: Receive) -> bytes:
        """Return the body of a request that a process of the attempt has sent, and nobody before."""
        if any(given.get(name) != value for name, value in self._key.whose.items()):
            raise Refused(409, f"this controller serves {self._key.whose}")
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > _MAX_BODY:
                raise Refused(413, f"request larger than {_MAX_BODY} bytes")
            if not message.get("more_body", False):
                break
        nonce = given.get(NONCE, "")
        if not same(given.get(SIGNATURE), self._key.of_request(nonce, path, body)):
            raise Refused(401, "the request is not signed with the token of the run")
        if not self._seen.is_new(nonce):
            raise Refused(401, "the request was sent before")
        return body

    async def _answer(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        route = self._routes.get(scope["path"])
        if route is None or scope["method"] != "POST":
            return 404, {"error": f"expected POST to one of {', '.join(self._routes)}"}
        try:
            return 200, await route.handler(route.schema.parse(body))
        except (HpcrlError, BadRequest) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}

    async def _send(self, send: Send, status: int, answer: dict[str, Any], nonce: str | None) -> None:
        """Send an answer, signed where it is to a request with a nonce."""
        body = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if nonce is not None:
            fields.append((SIGNATURE.encode(), self._key.of_answer(nonce, status, body).encode()))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})


class Api:
    """Routes over a `Service`, which is touched by one request at a time.

    Args:
        save_seconds: how long a trainer may take to save where the run cannot go on; 0: as long as it likes.
    """

    def __init__(self, service: Service, save_seconds: float) -> None:
        self._service, self._save_seconds = service, save_seconds
        self._schemas = service.schemas()
        self._changed = asyncio.Condition()
        self._waiting: dict[str, asyncio.Future[list[Work]]] = {}
        self._version: int | None = None
        self._trainer_got_end = False
        self._reading: tuple[int, asyncio.Task[History]] | None = None

    def routes(self) -> dict[str, Route]:
        handlers = (
            self.report,
            self.claim,
            self.complete,
            self.leave,
            self.start,
            self.published,
            self.next,
            self.committed,
            self.status,
        )
        return {f"/{one.__name__}": Route(one, getattr(self._schemas, one.__name__)) for one in handlers}

    async def report(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.check_version(body["version"])
        worker = self._service.seen(body["worker"], body["version"], body["state"])
        worker.stop_sent = self._service.stop is not None
        unwanted = self._service.unwanted(body.get("holding", []))
        return {"stop": self._service.stop, "version": self._service.version, "unwanted": unwanted}

    async def claim(self, body: dict[str, Any]) -> dict[str, Any]:
        service, name, version = self._service, body["worker"], body["version"]
        service.check_version(version)
        worker = service.seen(name, version, "waiting")
        service.reconcile(name, version, body["holding"])
        work = service.claim(name, version, body["capacity"])
        if not work and not service.stop and (service.version or 0) <= version:
            work = await self._work(name, version, body["capacity"])
        else:
            self._hand_out()  # what an answer that got lost had assigned to this worker
        worker.stop_sent = service.stop is not None
        unwanted = service.unwanted(body["holding"])
        given = [item.to_json() for item in work]
        return {"stop": service.stop, "version": service.version, "work": given, "unwanted": unwanted}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = self._schemas.groups(body["groups"])
        rejected = self._service.complete(groups)
        await self._notify()
        return {"accepted": [g.group_id for g in groups if g.group_id not in rejected], "rejected": rejected}

    async def leave(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = self._service.leave(body["worker"])
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
            return {"stop": FINISHED, "path": None}
        path = service.batch(step)
        while path is None and not service.stop and time.monotonic() < deadline:
            await self._wait(deadline)
            path = service.batch(step)
        return {"stop": service.stop, "path": None if service.stop else path}

    async def committed(self, body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        self._service.committed()
        return {}

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
        health = ReplicaHealth(run, attempt, service.min_replicas)
        while True:
            if reason := stop_asked(run, attempt):
                await self.end(reason)
            if not service.stop:
                service.failure = service.failure or health.failure(service.workers, service.version is not None)
            if service.failure:
                say("the run cannot go on; waiting for the trainer to save")
                await self._stop_trainer(run, attempt)
                raise service.failure
            for name in service.expire():
                self._answer(name)
                say(f"{name} is silent; its groups go to others")
                await self._notify()
            # the trainer still saves after it has published the last version
            if service.stop == FINISHED and self._trainer_got_end:
                finished_at = finished_at or time.monotonic()
                all_know = all(worker.stop_sent for worker in service.workers.values())
                if all_know or time.monotonic() - finished_at > _GOODBYE_S:
                    discard(run.turns)
                    return
            await asyncio.sleep(TICK_S)

    async def _stop_trainer(self, run: Run, attempt: int) -> None:
        """Let the trainer save: the agent ends it as soon as this process fails."""
        await self.end("failed")
        deadline = time.monotonic() + (self._save_seconds or math.inf)
        while not trainer_left(run, attempt) and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)

    def _hand_out(self) -> None:
        for name, work in self._service.assignments():
            self._answer(name, work)

    async def _work(self, name: str, version: int, capacity: int) -> list[Work]:
        """Return the work that a worker gets as soon as there is some; none after a while, or with news of the run."""
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
        if service.stop or service.version != self._version:
            self._version = service.version
            for name in list(self._waiting):
                self._answer(name)
        self._hand_out()
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, deadline: float) -> None:
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
            pass


def bind(address: str) -> socket.socket:
    """Return a listening socket on a free port of one address."""
    listener = socket.create_server((address, 0), backlog=1024)
    # connections inherit it; asyncio does not set it on them, and a body that follows its header would wait 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


class _Connection(AutoHTTPProtocol):
    """A connection that ends where nothing is asked on it for a while, or a request does not come to its end."""

    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle = False
        self._look()

    def _look(self) -> None:
        asked = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        if self._idle and not asked:
            self.transport.close()
        if not self.transport.is_closing():
            self._idle = not asked
            self.loop.call_later(IDLE_S, self._look)


class _Server(uvicorn.Server):
    """A server whose process keeps its own signal handlers: a stop request must not cut the workers off."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: Guard, listener: socket.socket, until: Awaitable[None]) -> None:
    """Serve `app` until `until` is done. Signals stay with the caller."""
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            http=_Connection,
            timeout_keep_alive=int(2 * IDLE_S),
            timeout_graceful_shutdown=2,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until
    finally:
        server.should_exit = True
        await serving
