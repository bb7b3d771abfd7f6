"""The controller's HTTP skin: routes of hpcrl/run/call.py, the token on each of them, waiting, and the end of the attempt."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from hpcrl.controller.roster import TICK_S, Presence
from hpcrl.controller.service import FINISHED, Service
from hpcrl.errors import HpcrlError
from hpcrl.run.call import authorized, headers
from hpcrl.run.layout import Run
from hpcrl.run.lease import trainer_left
from hpcrl.run.stop_request import stop_asked
from hpcrl.types import GroupMeta, Work

WAIT_S = 10.0
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_GOODBYE_S = 20.0
_MAX_BODY = 16 << 20


class Guard:
    """ASGI application: no request gets past it without the token, the run's name and the attempt's number.

    It speaks ASGI itself: what a web framework does for each request takes longer than what the controller does.
    """

    def __init__(self, routes: Mapping[str, Handler], token: str, run: str, attempt: int) -> None:
        self._routes, self._token = routes, token
        self._expected = {k: v for k, v in headers(token, run, attempt).items() if k != "authorization"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        status, answer = await self._answer(scope, receive)
        body = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not authorized(given.get("authorization"), self._token):
            return 401, {"error": "the run's token is missing or wrong"}
        if any(given.get(name) != value for name, value in self._expected.items()):
            return 409, {"error": f"this controller serves {self._expected}"}
        handler = self._routes.get(scope["path"])
        if handler is None or scope["method"] != "POST":
            return 404, {"error": f"expected POST to one of {', '.join(self._routes)}"}
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > _MAX_BODY:
                return 413, {"error": f"request larger than {_MAX_BODY} bytes"}
            if not message.get("more_body", False):
                break
        try:
            return 200, await handler(json.loads(body))
        except (HpcrlError, KeyError, TypeError, ValueError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}


class Api:
    """Routes over a `Service`, which is touched by one request at a time.

    Args:
        save_seconds: how long a trainer may take to save where the run cannot go on; 0: as long as it likes.
    """

    def __init__(self, service: Service, save_seconds: float) -> None:
        self._service, self._save_seconds = service, save_seconds
        self._changed = asyncio.Condition()
        self._waiting: dict[str, asyncio.Future[list[Work]]] = {}
        self._version: int | None = None
        self._trainer_told = False

    def routes(self) -> dict[str, Handler]:
        handlers = [
            self.lease, self.claim, self.complete, self.leave, self.start, self.published,
            self.next, self.committed, self.status,
        ]  # fmt: skip
        return {f"/{handler.__name__}": handler for handler in handlers}

    async def lease(self, body: dict[str, Any]) -> dict[str, Any]:
        worker = self._service.seen(body["worker"], body["version"], body["state"])
        worker.told_stop = self._service.stop is not None
        unwanted = self._service.unwanted(body.get("holding", []))
        return {"stop": self._service.stop, "version": self._service.version, "unwanted": unwanted}

    async def claim(self, body: dict[str, Any]) -> dict[str, Any]:
        service, name, version = self._service, body["worker"], body["version"]
        worker = service.seen(name, version, "waiting")
        service.reconcile(name, version, body["holding"])
        work = service.claim(name, version, body["capacity"])
        if not work and not service.stop and (service.version or 0) <= version:
            work = await self._work(name, version, body["capacity"])
        else:
            self._hand_out()  # what this worker was given and never got
        worker.told_stop = service.stop is not None
        unwanted = service.unwanted(body["holding"])
        given = [item.to_json() for item in work]
        return {"stop": service.stop, "version": service.version, "work": given, "unwanted": unwanted}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = [GroupMeta.from_json(value) for value in body["groups"]]
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
        total = self._service.start(body["step"])
        await self._notify()
        return {"total_steps": total, "steps_per_epoch": self._service.steps_per_epoch}

    async def published(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.published(body["version"])
        await self._notify()
        return {}

    async def next(self, body: dict[str, Any]) -> dict[str, Any]:
        service, step, deadline = self._service, body["step"], time.monotonic() + body.get("wait", WAIT_S)
        if step > service.total_steps:
            self._trainer_told = True
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
        """Forward the stop file until the run has finished, the trainer knows and every worker too, or was given time to.

        Raises:
            HpcrlError: the run cannot go on; the trainer has saved what it trained, or was given time to.
        """
        service, finished_at = self._service, None
        presence = Presence(run, attempt, service.floor)
        while True:
            if reason := stop_asked(run, attempt):
                await self.end(reason)
            if not service.stop:
                service.failure = service.failure or presence.failure(service.workers, service.version is not None)
            if service.failure:
                say("the run cannot go on; waiting for the trainer to save")
                await self._stop_trainer(run, attempt)
                raise service.failure
            for name in service.expire():
                self._answer(name)
                say(f"{name} is silent; its groups go to others")
                await self._notify()
            # the trainer still saves after it has published the last version
            if service.stop == FINISHED and self._trainer_told:
                finished_at = finished_at or time.monotonic()
                told = all(worker.told_stop for worker in service.workers.values())
                if told or time.monotonic() - finished_at > _GOODBYE_S:
                    return
            await asyncio.sleep(TICK_S)

    async def _stop_trainer(self, run: Run, attempt: int) -> None:
        """Let the trainer save: the agent ends it as soon as this process fails."""
        await self.end("failed")
        deadline = time.monotonic() + (self._save_seconds or math.inf)
        while not trainer_left(run, attempt) and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)

    def _hand_out(self) -> None:
        for name, work in self._service.grants():
            self._answer(name, work)

    async def _work(self, name: str, version: int, capacity: int) -> list[Work]:
        """Return the work that a worker gets as soon as there is some; none after a while, or with news of the run."""
        self._answer(name)  # an earlier request of the same worker: it does not listen any more
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
            async with self._changed, asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            pass


def bind(address: str) -> socket.socket:
    """Return a listening socket on a free port of one address."""
    listener = socket.create_server((address, 0), backlog=1024)
    # connections inherit it; asyncio does not set it on them, and a body that follows its header would wait 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


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
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until
    finally:
        server.should_exit = True
        await serving
