"""Serves a report that follows runs: its page on one address of this machine, behind a token, with content that is read again while a
browser shows it."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hpcrl.errors import HpcrlError, RunError
from hpcrl.observe.report.content import Decoder, content_of
from hpcrl.observe.report.page import page
from hpcrl.rundir.layout import Run
from hpcrl.runtime.token import same

_EVERY_S = 3.0
_MOST_CONNECTIONS = 32
_STRANGER_S, _READER_S = 5.0, 60.0  # that a connection may be idle, before it has shown the token and afterwards
_FULL_S = 0.2


class LiveReport:
    """The server of a report. Raises RunError where the port is taken.

    Attributes:
        url: what a browser opens, the token in it.
    """

    def __init__(self, runs: Sequence[Run], decoder: Decoder, port: int) -> None:
        self._contents, self._token = _Contents(runs, decoder), secrets.token_urlsafe(24)
        contents, token = self._contents, self._token

        class Handler(_Handler):
            def __init__(self, *arguments: Any) -> None:
                self.contents, self.token = contents, token
                super().__init__(*arguments)

        try:
            self._server = _Server(("127.0.0.1", port), Handler)
        except OSError as error:
            raise RunError(f"127.0.0.1:{port} cannot be served: {error.strerror}; choose another --port") from error
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/?token={token}"

    def serve(self) -> None:
        """Answer until `close`, or KeyboardInterrupt."""
        self._server.serve_forever()

    def close(self) -> None:
        """End `serve`, which another thread is in."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A server whose connections are bounded in number: each is a thread and a descriptor, and anybody on the machine can open some."""

    daemon_threads = True
    request_queue_size = 2 * _MOST_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection; OSError, after a while, where there is no room or no descriptor for it: it stays in the queue."""
        if not self._room.acquire(timeout=_FULL_S):
            raise OSError("too many connections")
        try:
            return super().get_request()
        except OSError:
            self._room.release()
            time.sleep(_FULL_S)
            raise

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._room.release()


class _Contents:
    """Contents of the runs' reports, read again at most every few seconds, and only on request."""

    def __init__(self, runs: Sequence[Run], decoder: Decoder) -> None:
        self._runs, self._decoder = runs, decoder
        self._lock = threading.Lock()
        self._known: dict[bool, tuple[float, list[dict[str, Any]]]] = {}

    def newest(self, with_samples: bool) -> list[dict[str, Any]]:
        with self._lock:
            read, known = self._known.get(with_samples, (float("-inf"), []))
            if time.monotonic() - read > _EVERY_S:
                known = [content_of(run, self._decoder, with_samples=with_samples) for run in self._runs]
                self._known[with_samples] = time.monotonic(), known
            return known


class _Handler(BaseHTTPRequestHandler):
    contents: _Contents
    token: str
    protocol_version = "HTTP/1.1"
    timeout = _STRANGER_S

    def setup(self) -> None:
        super().setup()
        # `timeout` is that of one read, and a header may come byte by byte
        self._proving = threading.Timer(_STRANGER_S, self._end)
        self._proving.daemon = True
        self._proving.start()

    def finish(self) -> None:
        self._proving.cancel()
        super().finish()

    def _end(self) -> None:
        with suppress(OSError):  # it has ended by itself
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        words = parse_qs(asked.query)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or words.get("token", [""])[0]
        if not same(given, self.token):
            self.close_connection = True
            return self._answer(
                HTTPStatus.FORBIDDEN, "text/plain", "open the whole address that `hpcrl report` printed\n"
            )
        self._proving.cancel()
        self.connection.settimeout(_READER_S)
        try:
            if asked.path == "/":
                return self._answer(HTTPStatus.OK, "text/html", page(self.contents.newest(True), live=True))
            if asked.path == "/content":
                found = self.contents.newest("samples" in words)
                return self._answer(HTTPStatus.OK, "application/json", json.dumps(found, allow_nan=False))
        except HpcrlError as error:  # a file that is damaged; the next look may find it whole
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing else here\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the browser has gone
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the lines would hold the token."""
