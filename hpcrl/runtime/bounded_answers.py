"""Sends requests to servers of a run, and bounds each answer in bytes and the whole request in time.

Another program may have the port of a dead server and answer anything. A client whose timeouts count for each read would wait for ever for a
header that comes byte by byte. An event loop, as services have, bounds it too, and costs four times the CPU per call.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpcore

from hpcrl.errors import RunError

MOST_BYTES = 256 << 20
"""Of an answer: work of the controller has the prompts of many groups, with their images."""
_KEEP_S = 5.0
_FAILURES = (
    httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol
)  # fmt: skip


class NoAnswer(Exception):
    """A server gave no answer, or not all of it in time."""


class BoundedAnswer(NamedTuple):
    """An answer as it came: what is compressed stays so.

    Attributes:
        headers: by their names in lower case.
    """

    status: int
    content: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        return json.loads(self.content)


class BoundedClient:
    """HTTP client that keeps its connections; threads may share it."""

    def __init__(self) -> None:
        self._connections = httpcore.ConnectionPool(
            max_connections=None, keepalive_expiry=_KEEP_S, network_backend=_Network()
        )

    def post(self, url: str, content: bytes, headers: Mapping[str, str], seconds: float) -> BoundedAnswer:
        """Return the answer to a request.

        Args:
            url: http.
            seconds: for all of it.

        Raises:
            NoAnswer: there is none, or not all of it in time.
            RunError: it is larger than MOST_BYTES.
        """
        deadline, body = time.monotonic() + seconds, bytearray()
        timeout = dict.fromkeys(("connect", "read", "write"), deadline)
        plain = {**headers, "accept-encoding": "identity"}
        try:
            with self._connections.stream(
                "POST", url, headers=list(plain.items()), content=content, extensions={"timeout": timeout}
            ) as answer:
                for part in answer.iter_stream():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise RunError(f"what answers at {url} sends more than {MOST_BYTES >> 20} MiB, and is refused")
        except httpcore.TimeoutException as error:
            raise NoAnswer(f"no whole answer within {seconds:g} s") from error
        except _FAILURES as error:
            raise NoAnswer(str(error)) from error
        given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers}
        return BoundedAnswer(answer.status, bytes(body), given)

    def close(self) -> None:
        self._connections.close()


class _Network(httpcore.NetworkBackend):
    """Connections over TCP. The timeouts of their requests are moments of time.monotonic."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        assert timeout is not None
        del local_address, socket_options  # the client sets none
        with _failing_as(httpcore.ConnectTimeout, httpcore.ConnectError):
            connection = socket.create_connection((host, port), _left(timeout))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(connection)


class _Connection(httpcore.NetworkStream):
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        assert timeout is not None
        with _failing_as(httpcore.ReadTimeout, httpcore.ReadError):
            self._socket.settimeout(_left(timeout))
            return self._socket.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        assert timeout is not None
        with _failing_as(httpcore.WriteTimeout, httpcore.WriteError):
            self._socket.settimeout(_left(timeout))
            self._socket.sendall(buffer)  # whose timeout bounds all of it

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """Return for `is_readable` whether a connection that was idle has ended."""
        if info != "is_readable":
            return None
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _left(moment: float) -> float:
    """Return the seconds until a moment."""
    if (seconds := moment - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


@contextmanager
def _failing_as(late: type[Exception], broken: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise late from error
    except OSError as error:
        raise broken(str(error)) from error
