"""A controller that hands out what a test tells it to, over real HTTP by the protocol of hpcrl/runtime/controller_client.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.types import GroupMeta, Work


class FakeController:
    """Set `work`, `version`, `stop`, `unwanted` and `claim_takes`, in seconds; look at `completed`, `claims`, `process statuses` and `left`.

    What is in `again` is given to the first worker that says it holds something.
    """

    def __init__(self) -> None:
        self.unwanted: list[str] = []
        self.work: deque[Work] = deque()
        self.version = 0
        self.stop: str | None = None
        self.claim_takes = 0.0
        self.again: deque[Work] = deque()
        self.completed: list[GroupMeta] = []
        self.claims: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.left: list[str] = []

    async def claim(self, body: dict[str, Any]) -> dict[str, Any]:
        self.claims.append(body)
        while body["holding"] and self.again:
            self.work.append(self.again.popleft())
        deadline = time.monotonic() + 1.0
        while not (self.work and body["capacity"]) and not self.stop and self.version <= body["version"]:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.claim_takes)
        work = [self.work.popleft().to_json() for _ in range(min(body["capacity"], len(self.work)))]
        return {"stop": self.stop, "version": self.version, "work": work, "unwanted": self.unwanted}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = [GroupMeta.from_json(value) for value in body["groups"]]
        self.completed += groups
        return {"accepted": [group.group_id for group in groups], "rejected": {}}

    async def report(self, body: dict[str, Any]) -> dict[str, Any]:
        self.reports.append(body)
        return {"stop": self.stop, "version": self.version, "unwanted": self.unwanted}

    async def leave(self, body: dict[str, Any]) -> dict[str, Any]:
        self.left.append(body["worker"])
        return {}

    @contextmanager
    def served(self, run: Run, attempt: int) -> Iterator[FakeController]:
        def route(handler: Callable[[dict[str, Any]], Any]) -> Route:
            async def respond(request: Request) -> JSONResponse:
                return JSONResponse(await handler(await request.json()))

            return Route(f"/{handler.__name__}", respond, methods=["POST"])

        app = Starlette(routes=[route(handler) for handler in (self.claim, self.complete, self.report, self.leave)])
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        StatusWriter(run, "controller", attempt).write("serving", url=f"http://127.0.0.1:{port}")
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(10)
