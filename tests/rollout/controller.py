"""A controller that hands out what a test tells it to, over real HTTP by the protocol of hpcrl/runtime/controller_client.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpcrl.controller.schema import Schema
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import Guard, Route, Signed, bind, serve
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.token import read_token
from hpcrl.types import GroupMeta, Work


class Anything(Schema):
    """Takes all objects: groups have short names here."""

    def check(self, body: Mapping[str, Any], within: str = "") -> None:
        pass


class FakeController:
    """Set `work`, `version`, `stop`, `unwanted`, `trains`, `claim_takes` and `complete_takes`, in seconds; look at `completed`, `claims`, `leases`,
    requests of a worker whose engine sleeps, `process statuses` and `left`.

    What is in `again` is given to the first worker that says it holds something.
    """

    def __init__(self) -> None:
        self.unwanted: list[str] = []
        self.work: deque[Work] = deque()
        self.version = 0
        self.stop: str | None = None
        self.trains = False
        self.leases = 0
        self.claim_takes = self.complete_takes = 0.0
        self.again: deque[Work] = deque()
        self.completed: list[GroupMeta] = []
        self.claims: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.left: list[str] = []
        self._evaluated: set[str] = set()

    def _keeps(self, version: int) -> bool:
        """Return whether the engine of the worker keeps its version: it is the one at hand, or rows of it are open."""
        return self.version == version or bool(self._evaluated)

    async def claim(self, body: dict[str, Any]) -> dict[str, Any]:
        self.claims.append(body)
        while body["holding"] and self.again:
            self.work.append(self.again.popleft())
        deadline = time.monotonic() + 1.0
        while not (self.work and body["capacity"]) and not self.stop and self._keeps(body["version"]):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.claim_takes)
        given = [self.work.popleft() for _ in range(min(body["capacity"], len(self.work)))]
        self._evaluated |= {item.group_id for item in given if item.kind == "eval"}
        work = [item.to_json() for item in given]
        answer = {"stop": self.stop, "version": self.version, "newest": self.version, "work": work}
        return answer | {"unwanted": self.unwanted}

    async def lease(self, body: dict[str, Any]) -> dict[str, Any]:
        self.leases += not body["awake"]
        await asyncio.sleep(0.05)
        return {"stop": self.stop, "version": self.version, "lease": not self.trains}

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.complete_takes)
        groups = [GroupMeta.from_json(value) for value in body["groups"]]
        self.completed += groups
        self._evaluated -= {group.group_id for group in groups}
        return {"accepted": [group.group_id for group in groups], "rejected": {}}

    async def report(self, body: dict[str, Any]) -> dict[str, Any]:
        self.reports.append(body)
        return {"stop": self.stop, "version": self.version, "newest": self.version, "unwanted": self.unwanted}

    async def leave(self, body: dict[str, Any]) -> dict[str, Any]:
        self.left.append(body["worker"])
        return {}

    @contextmanager
    def served(self, run: Run, attempt: int) -> Iterator[FakeController]:
        handlers = (self.claim, self.lease, self.complete, self.report, self.leave)
        routes = {f"/{handler.__name__}": Route(handler, Anything()) for handler in handlers}
        listener, over = bind("127.0.0.1"), threading.Event()
        serving = serve(
            Guard(routes, Signed(read_token(run), run.name, attempt)), listener, asyncio.to_thread(over.wait)
        )
        thread = threading.Thread(target=lambda: asyncio.run(serving), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        StatusWriter(run, "controller", attempt).write("serving", url=f"http://127.0.0.1:{port}")
        try:
            yield self
        finally:
            over.set()
            thread.join(10)
