"""A small HTTP server that honours a protocol, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Raw:
    """An answer that is sent as it is, by a function that writes to the connection."""

    write: Callable[[Any], None]


Answer = Callable[[Asked], tuple[int, Any] | Raw]


@dataclass
class Server:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    """Yield a server whose answers are a status and JSON, or bytes; `ended` is set before it waits for its threads."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            asked = Asked(self.command, self.path, self.headers, body)
            server.asked.append(asked)
            found = answer(asked)
            if isinstance(found, Raw):
                found.write(self.wfile)
                self.close_connection = True
                return
            status, said = found
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_DELETE = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:  # a client that gave up
            pass

    listener = Quiet(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        listener.shutdown()
        thread.join()
        listener.server_close()
