"""A server of JSON over HTTP, with signed requests and answers and bounded connections.

It implements ASGI itself: a web framework takes longer for each request than the controller does.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from hpcrl.errors import HpcrlError
from hpcrl.runtime.token import NONCE, SIGNATURE, AttemptKey, Seen, authorized, same

Handler = Callable[[Any], Awaitable[dict[str, Any]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
MAX_BODY = 16 << 20
MOST_CONNECTIONS = 4096
ADMITTED = "hpcrl.admitted"
"""Key of the scope of a request that a proof has admitted."""
WAITING = "hpcrl.waiting"
"""Key of the scope of a request whose body the application will read later: meanwhile its connection is not idle."""
_LONGEST_HEAD = 64 << 10  # bytes of a request before its body
_LEAST_BODY = 64 << 10  # bytes of a body that keep its connection for another IDLE_S
_ACCEPTED, _WAITING = (
    32,
    1024,
)  # connections that asyncio takes at a time, before one of them can be ended; and that wait for it
BODY_S = 60.0
IDLE_S = 40.0  # a connection on which nothing is asked ends after this time, and at most as long again


JSON = {"content-type": "application/json"}
REFUSED = {**JSON, "connection": "close"}
"""Headers of an answer to a request that was not admitted: more of them would wait unread, and hold the connection."""


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
            await send_body(send, refusal.status, json_body({"error": str(refusal)}), REFUSED)
            return
        scope[ADMITTED] = True
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

    async def _send(self, send: Send, status: int, answer: dict[str, Any], given: Mapping[str, str]) -> None:
        """Send an answer to a request that was admitted, with its proof."""
        body = json_body(answer)
        await send_body(send, status, body, {**JSON, **self._proof.of_answer(given, status, body)})


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def body_size(given: Mapping[str, str]) -> int:
    """Return the most bytes that `read_body` reads of a request with these headers."""
    length = given.get("content-length", "")
    return min(MAX_BODY, int(length)) if length.isdecimal() else MAX_BODY


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request.

    Refused with 413 where it is larger than MAX_BODY, and with 408 where it takes longer than BODY_S: meanwhile it counts among the bytes
    that a server holds.
    """
    first = await receive()
    body = first.get("body", b"")
    _expect_bounded(body)
    if not first.get("more_body", False):  # of most requests: a time limit is a task of its own
        return body
    try:
        return await asyncio.wait_for(_read_rest(bytearray(body), receive), BODY_S)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body of the request takes longer than {BODY_S:g} s") from None


async def _read_rest(body: bytearray, receive: Receive) -> bytes:
    while True:
        message = await receive()
        body += message.get("body", b"")
        _expect_bounded(body)
        if not message.get("more_body", False):
            return bytes(body)


def _expect_bounded(body: bytes | bytearray) -> None:
    if len(body) > MAX_BODY:
        raise Refused(413, f"request larger than {MAX_BODY} bytes")


def parse_json(content: bytes) -> Any:
    """Return the value in a body. Raises BadRequest where it is no JSON in UTF-8, or has half a character, of which no tokens can be made."""
    try:
        value = json.loads(content.decode())  # of bytes, Python's reader would take halves of characters too
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"expected JSON: {error}") from error
    return value


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
    listener = socket.create_server((address, port), backlog=_WAITING)
    # connections inherit it; asyncio does not set it on them, and a body that follows its header would wait 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


class BoundedConnection(AutoHTTPProtocol):
    """A connection of a server, each of which has at most MOST_CONNECTIONS.

    It ends where nothing is asked on it for a while, the body of a request hardly comes, or nobody reads the answer. Where there are too many,
    the oldest ends on which no request was admitted.
    """

    cycle: Any
    scope: Any
    server_state: ServerState
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.ws_protocol_class = None  # a websocket would go on in another class, which bounds nothing
        self._seen: Any = self  # no request yet is another state than none a while ago
        self._unread = self._head = self._body = 0
        self._unproven = _unproven.setdefault(self.server_state, {})
        self._unproven[self] = None
        self._look()
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()
        self._unproven.pop(self, None)

    def data_received(self, data: bytes) -> None:
        before, in_body = self.cycle, self.cycle is not None and self.cycle.more_body
        super().data_received(data)
        self._body += len(data) if in_body else 0
        self._head = 0 if in_body or self.cycle is not before else self._head + len(data)
        if self._head > _LONGEST_HEAD:
            self.transport.abort()

    def _make_room(self) -> None:
        while self._unproven:
            (oldest, *_) = islice(self._unproven, 1)
            del self._unproven[oldest]
            if oldest.scope is None or ADMITTED not in oldest.scope:
                return oldest.transport.abort()
        return self.transport.abort()

    def _look(self) -> None:
        asked = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        asked = asked or (self.cycle is not None and WAITING in self.cycle.scope)
        unread = self.transport.get_write_buffer_size()
        # one that is used all the time is between two requests most of the time
        idle = not asked and not unread and self.cycle is self._seen and self._body < _LEAST_BODY
        if idle or (unread and unread == self._unread):
            self.transport.abort()
        self._seen, self._unread, self._body = self.cycle, unread, 0
        self._timer = self.loop.call_later(IDLE_S, self._look)


_unproven = WeakKeyDictionary[ServerState, dict[BoundedConnection, None]]()
"""Of each server its connections, the oldest first, less those of which is known that a request on them was admitted."""


def most_connections() -> int:
    """Return how many connections a server has at most: the process has files to open too."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Server(uvicorn.Server):
    """A server whose process keeps its own signal handlers: a stop request must not cut the workers off."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_WAITING)  # asyncio has made it as short as what it takes at a time


async def serve(app: App, listener: socket.socket, until: Awaitable[object]) -> None:
    """Serve `app` until `until` is done. Signals stay with the caller."""
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            http=BoundedConnection,
            backlog=_ACCEPTED,
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
