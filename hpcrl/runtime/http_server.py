"""A server of JSON over HTTP, with signed requests and answers and bounded connections.

It implements ASGI itself: a web framework takes longer for each request than the controller does.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hpcrl.errors import HpcrlError
from hpcrl.runtime.token import NONCE, SIGNATURE, AttemptKey, Seen, authorized, same

Handler = Callable[[Any], Awaitable[dict[str, Any]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
MAX_BODY = 16 << 20
IDLE_S = 40.0  # a connection on which nothing is asked ends after this time, and at most as long again


class BadRequest(Exception):
    """A request's body is not what its route expects."""


class Refused(Exception):
    """A request gets another answer than its result: who has sent it, or what it asks for, keeps it from that."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Body(Protocol):
    """Body of a request."""

    def parse(self, content: bytes) -> Any:
        """Parse a body; BadRequest where it is not the one that the route expects."""
        ...


@dataclass(frozen=True)
class Route:
    """Handler of a path, and the type of its body."""

    handler: Handler
    schema: Body
    method: str = "POST"


class Proof(Protocol):
    """Authenticates requests of a server, and signs its answers."""

    def expect(self, given: Mapping[str, str]) -> None:
        """Refuse a request by its headers alone, before its body is read."""
        ...

    def admit(self, path: str, given: Mapping[str, str], body: bytes) -> None:
        """Refuse a request of a stranger."""
        ...

    def of_answer(self, given: Mapping[str, str], status: int, body: bytes) -> dict[str, str]:
        """Return the headers that an answer to an admitted request has."""
        ...


class Signed:
    """Requests are signed by a process of the attempt, each taken once; so are answers."""

    def __init__(self, token: str, run: str, attempt: int) -> None:
        self._key, self._seen = AttemptKey.of(token, run, attempt), Seen()

    def expect(self, given: Mapping[str, str]) -> None:
        if any(given.get(name) != value for name, value in self._key.whose.items()):
            raise Refused(409, f"this server serves {self._key.whose}")

    def admit(self, path: str, given: Mapping[str, str], body: bytes) -> None:
        nonce = given.get(NONCE, "")
        if not same(given.get(SIGNATURE), self._key.of_request(nonce, path, body)):
            raise Refused(401, "the request is not signed with the token of the run")
        if not self._seen.is_new(nonce):
            raise Refused(401, "the request was sent before")

    def of_answer(self, given: Mapping[str, str], status: int, body: bytes) -> dict[str, str]:
        return {SIGNATURE: self._key.of_answer(given[NONCE], status, body)}


class Bearer:
    """Requests show a token, for clients that are no processes of a run."""

    def __init__(self, token: str) -> None:
        self._token = token

    def expect(self, given: Mapping[str, str]) -> None:
        if not authorized(given.get("authorization"), self._token):
            raise Refused(401, "expected `Authorization: Bearer` with the token of this service")

    def admit(self, path: str, given: Mapping[str, str], body: bytes) -> None:
        pass

    def of_answer(self, given: Mapping[str, str], status: int, body: bytes) -> dict[str, str]:  # noqa: ARG002
        return {}


class Guard:
    """ASGI application: no request gets past it that `proof` does not admit.

    A handler's result is answered with 200, `Refused` with its status, BadRequest and HpcrlError with 400 and the reason. Any other
    exception is an error of hpcrl itself: it is answered with 500, and uvicorn writes its traceback into the log of the process.
    """

    def __init__(self, routes: Mapping[str, Route], proof: Proof) -> None:
        self._routes, self._proof = routes, proof

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        given = headers_of(scope)
        try:
            body = await self._body(scope["path"], given, receive)
        except Refused as refusal:
            # proves nothing: anybody could ask for it
            await self._send(send, refusal.status, {"error": str(refusal)}, None)
            return
        try:
            status, answer = await self._answer(scope, body)
        except BaseException:
            await self._send(send, 500, {"error": "an error of hpcrl itself"}, given)
            raise
        await self._send(send, status, answer, given)

    async def _body(self, path: str, given: Mapping[str, str], receive: Receive) -> bytes:
        self._proof.expect(given)
        body = await read_body(receive)
        self._proof.admit(path, given, body)
        return body

    async def _answer(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        route = self._routes.get(scope["path"])
        if route is None or scope["method"] != route.method:
            known = ", ".join(f"{one.method} {path}" for path, one in self._routes.items())
            return 404, {"error": f"expected one of {known}"}
        try:
            return 200, await route.handler(route.schema.parse(body))
        except Refused as refusal:
            return refusal.status, {"error": str(refusal)}
        except (HpcrlError, BadRequest) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}

    async def _send(self, send: Send, status: int, answer: dict[str, Any], given: Mapping[str, str] | None) -> None:
        """Send an answer, with its proof where it is to a request that was admitted."""
        body = json_body(answer)
        proof = {} if given is None else self._proof.of_answer(given, status, body)
        await send_body(send, status, body, {"content-type": "application/json", **proof})


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(receive: Receive, hold: Callable[[int], object] = lambda _: None) -> bytes:
    """Return the body of a request; Refused with 413 where it is larger than MAX_BODY.

    Args:
        hold: called with the bytes of each part that has come; it may refuse them.
    """
    body = bytearray()
    while True:
        message = await receive()
        body += (part := message.get("body", b""))
        hold(len(part))
        if len(body) > MAX_BODY:
            raise Refused(413, f"request larger than {MAX_BODY} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def json_body(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


async def send_body(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send an answer."""
    fields = {**headers, "content-length": str(len(body))}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def bind(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket of one address, on a free port where none is named."""
    listener = socket.create_server((address, port), backlog=1024)
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
        self._seen: Any = self  # no request yet is another state than none a while ago
        self._look()

    def _look(self) -> None:
        asked = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        # one that is used all the time is between two requests most of the time
        if not asked and self.cycle is self._seen:
            self.transport.close()
        if not self.transport.is_closing():
            self._seen = self.cycle
            self.loop.call_later(IDLE_S, self._look)


class _Server(uvicorn.Server):
    """A server whose process keeps its own signal handlers: a stop request must not cut the workers off."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: App, listener: socket.socket, until: Awaitable[object]) -> None:
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
