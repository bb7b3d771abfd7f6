"""The server of a node's sandboxes, over HTTP.

    POST /start     {image, network?, snapshot?, client?, client_started?}
                                                                     -> {key, lease_s}; 503 where the node is full, 500 where it cannot
    GET  /health                                                     -> {running, most}
    POST /exec      {command, seconds, input?, terminal?, environment?, directory?, most?}
                                                                     -> lines {stdout} or {stderr}, the last {code, ended}; {} every
                                                                        BEAT_S seconds
    POST /write     {path, content, mode?}    POST /read {path}      -> {}, {content}
    POST /snapshot  {only?}                   POST /renew, /end {}   -> {snapshot}, {}, {}

The first two need the proof of a run's process, or of a token, and the others the key of a sandbox, which is of one sample. Contents are in
base64. A program that writes more than `most` bytes is ended. What a request lacks is answered with 400 and a reason. A program ends when its
client closes the connection. A start by a client that has restarted ends the sandboxes that it had started before.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from hpcrl.envs.agents.sandbox_command import BEAT_S
from hpcrl.errors import HpcrlError, SandboxError
from hpcrl.runtime.http_server import (
    ADMITTED,
    JSON,
    REFUSED,
    BadRequest,
    Proof,
    Receive,
    Refused,
    Scope,
    Send,
    headers_of,
    json_body,
    parse_json,
    read_body,
    send_body,
    serve,
)
from hpcrl.sandboxes.node import MOST_REQUESTS, Busy, Client, NodeFull, NodeSandboxes, UnknownKey
from hpcrl.sandboxes.sandbox import SandboxCommand, SandboxEnded
from hpcrl.sandboxes.snapshots import KEPT_S

R = TypeVar("R")

MOST_SECONDS = 24 * 3600.0
HOLD_S = KEPT_S / 6
_LOOK_S, _REPORT_S = 1.0, 60.0
_BEARER = "Bearer "
_NETWORK, _TEXTS = (bool, False), (list, None)
_EXEC = {
    "command": _TEXTS,
    "seconds": (float, None),
    "input": (str, ""),
    "terminal": (bool, False),
    "environment": (dict, {}),
    "directory": (str, ""),
    "most": (float, math.inf),
}
_START = {
    "image": (str, None),
    "network": _NETWORK,
    "snapshot": (str, ""),
    "client": (str, ""),
    "client_started": (float, 0.0),
}
_OF_NODE = "GET /health", "POST /start"
_STATUS = {UnknownKey: 401, SandboxEnded: 410, Busy: 429, NodeFull: 503}
Body = Mapping[str, Any]
Fields = Mapping[str, tuple[type, Any]]


class SandboxServer:
    """ASGI application: the sandboxes of a node.

    Args:
        proof: of those that start sandboxes.
    """

    def __init__(self, node: NodeSandboxes, proof: Proof) -> None:
        self._node, self._proof, self._report_at = node, proof, 0.0
        self._threads = ThreadPoolExecutor(MOST_REQUESTS * node.most + 4, "sandboxes")  # a program waits in one
        self._of_key: dict[str, tuple[Fields, Callable[[str, Body], dict[str, Any]]]] = {
            "/write": ({"path": (str, None), "content": (str, None), "mode": (int, 0o644)}, self._write),
            "/read": ({"path": (str, None)}, self._read),
            "/snapshot": ({"only": (list, [])}, self._snapshot),
            "/renew": ({}, self._renew),
            "/end": ({}, self._end),
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def look_after(self) -> None:
        """End sandboxes whose clients are gone, and hold the snapshots of the others, for ever."""
        hold_at = time.monotonic()
        while True:
            await self._in_thread(self._node.end_expired)
            if time.monotonic() >= hold_at:
                try:
                    await self._in_thread(self._node.hold_snapshots)
                except OSError as error:
                    print(f"snapshots of running sandboxes may become old: {error}", flush=True)
                hold_at = time.monotonic() + HOLD_S
            await asyncio.sleep(_LOOK_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        given, key, proved = headers_of(scope), "", False
        of_node = f"{scope['method']} {scope['path']}" in _OF_NODE
        try:
            if of_node:
                self._proof.expect(given)
                content = await read_body(receive)
                self._proof.admit(scope["path"], given, content)
                scope[ADMITTED] = proved = True
                status, answer = 200, await self._of_node(scope["path"], content, receive)
            else:
                key = given.get("authorization", "").removeprefix(_BEARER)
                self._node.expect(key)
                scope[ADMITTED] = True
                status, answer = 200, await self._of_sandbox(scope, await read_body(receive), key, receive, send)
        except Refused as refusal:
            status, answer = refusal.status, {"error": str(refusal)}
        except tuple(_STATUS) as error:
            status, answer = _STATUS[type(error)], {"error": str(error)}
        except SandboxError as error:
            status, answer = 500 if of_node else 400, {"error": f"{type(error).__name__}: {error}"}
            if of_node:
                self._report(scope["path"], error)
        except (HpcrlError, BadRequest) as error:
            status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        except OSError as error:  # of the node or a filesystem, such as a full one
            status, answer = 500, {"error": str(error)}
            self._report(scope["path"], error)
        if answer is not None:
            body = json_body(answer)
            signed = self._proof.of_answer(given, status, body) if proved else {}
            await send_body(send, status, body, {**(JSON if ADMITTED in scope else REFUSED), **signed})

    def _report(self, path: str, error: Exception) -> None:
        """Print why a request fails here, once a minute: clients ask again for minutes."""
        if time.monotonic() >= self._report_at:
            print(f"{path} fails here: {error}", file=sys.stderr, flush=True)
            self._report_at = time.monotonic() + _REPORT_S

    async def _of_node(self, path: str, content: bytes, receive: Receive) -> dict[str, Any]:
        """Return the answer to a request that starts a sandbox, or asks for the state of the node."""
        if path == "/health":
            return {"running": self._node.running, "most": self._node.most}
        asked = _fields(content, _START)
        client, snapshot = Client(asked["client"], asked["client_started"]), asked["snapshot"] or None
        gone = asyncio.create_task(_until_gone(receive))
        try:
            key = await self._in_thread(
                lambda: self._node.start(asked["image"], network=asked["network"], snapshot=snapshot, client=client)
            )
            if gone.done():  # nobody has its key
                await self._in_thread(lambda: self._node.end(key))
        finally:
            gone.cancel()
        return {"key": key, "lease_s": self._node.lease_s}

    async def _of_sandbox(
        self, scope: Scope, content: bytes, key: str, receive: Receive, send: Send
    ) -> dict[str, Any] | None:
        """Return the answer to a request of a sandbox; None where it was streamed."""
        path = scope["path"]
        if scope["method"] == "POST" and path == "/exec":
            await self._execute(key, _fields(content, _EXEC), receive, send)
            return None
        if scope["method"] == "POST" and path in self._of_key:
            fields, act = self._of_key[path]
            asked = _fields(content, fields)
            return await self._in_thread(lambda: act(key, asked))
        raise Refused(404, f"expected {', '.join(_OF_NODE)}, POST /exec, {', '.join(self._of_key)}")

    async def _execute(self, key: str, asked: Body, receive: Receive, send: Send) -> None:
        given = base64_of(asked["input"])
        if not asked["command"] or not all(isinstance(one, str) for one in asked["command"]):
            raise BadRequest("command: expected a list of texts")
        if not all(isinstance(one, str) for one in asked["environment"].values()):
            raise BadRequest("environment: expected texts")
        if not 0 < asked["seconds"] <= MOST_SECONDS:
            raise BadRequest(f"seconds: expected more than 0, and at most {MOST_SECONDS:g}")
        if not asked["most"] >= 0:
            raise BadRequest("most: expected a number of bytes")
        with self._node.use(key) as held:
            program = await self._in_thread(
                lambda: held.sandbox.begin(
                    asked["command"],
                    asked["seconds"],
                    terminal=asked["terminal"],
                    environment=asked["environment"],
                    directory=asked["directory"] or None,
                )
            )
            await self._stream(program, given, asked["most"], receive, send)

    async def _stream(self, program: SandboxCommand, given: bytes, most: float, receive: Receive, send: Send) -> None:
        """Send what a program writes, line by line, as fast as the client reads; the program ends where the client is gone."""
        loop = asyncio.get_running_loop()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]}
        )

        turn = asyncio.Lock()

        async def line(message: Body) -> None:
            async with turn:
                await send({"type": "http.response.body", "body": json_body(message) + b"\n", "more_body": True})

        async def beat() -> None:
            while True:
                await asyncio.sleep(BEAT_S)
                await line({})

        def pump() -> None:
            for name, piece in program.output(given, most):
                asyncio.run_coroutine_threadsafe(line({name: base64.b64encode(piece).decode()}), loop).result()

        async def until_gone() -> None:
            await _until_gone(receive)
            program.cancel()

        beside = [asyncio.create_task(until_gone()), asyncio.create_task(beat())]
        try:
            await self._in_thread(pump)
            await line(asdict(program.result) if program.result else {})
        except (HpcrlError, OSError) as error:
            await line({"error": str(error)})
        finally:
            for task in beside:
                task.cancel()
        await send({"type": "http.response.body", "body": b""})

    def _write(self, key: str, asked: Body) -> dict[str, Any]:
        content = base64_of(asked["content"])
        with self._node.use(key) as held:
            held.sandbox.write(asked["path"], content, asked["mode"])
        return {}

    def _read(self, key: str, asked: Body) -> dict[str, Any]:
        with self._node.use(key) as held:
            return {"content": base64.b64encode(held.sandbox.read(asked["path"])).decode()}

    def _snapshot(self, key: str, asked: Body) -> dict[str, Any]:
        if not all(isinstance(path, str) and path.startswith("/") for path in asked["only"]):
            raise BadRequest("only: expected absolute paths")
        return {"snapshot": self._node.keep(key, asked["only"])}

    def _renew(self, key: str, _: Body) -> dict[str, Any]:
        with self._node.use(key):
            return {}

    def _end(self, key: str, _: Body) -> dict[str, Any]:
        self._node.end(key)
        return {}

    async def _in_thread(self, act: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)


async def serve_sandboxes(node: NodeSandboxes, proof: Proof, listener: socket.socket, until: Awaitable[object]) -> None:
    """Serve the sandboxes of a node until `until` is done; then end them."""
    app = SandboxServer(node, proof)
    tasks = [asyncio.ensure_future(until), asyncio.create_task(app.look_after())]

    async def ended() -> None:
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:  # before the server ends: with the programs, the requests end that wait for them
            await asyncio.to_thread(node.close)

    try:
        await serve(app, listener, ended())
    finally:
        for task in tasks:
            task.cancel()
        app.close()


async def _until_gone(receive: Receive) -> None:
    """Return when the client of a request, whose body is read, has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def base64_of(text: str) -> bytes:
    """Return the bytes of a text in base64. Raises BadRequest where it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"expected base64: {error}") from error


def _fields(content: bytes, known: Fields) -> dict[str, Any]:
    """Return the fields of a request. A default of None makes a field required."""
    body = parse_json(content or b"{}")
    if not isinstance(body, dict) or not set(body) <= set(known):
        raise BadRequest(f"expected an object with {', '.join(known) or 'no fields'}, found {str(body)!r:.100}")
    for name, (kind, default) in known.items():
        value = body.setdefault(name, default)
        numbers = (int, float) if kind is float else kind
        if not isinstance(value, numbers) or (isinstance(value, bool) and kind is not bool):
            raise BadRequest(f"{name}: expected {kind.__name__}, found {value!r:.100}")
    return body
