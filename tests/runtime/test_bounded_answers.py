"""What somebody answers at the address of a controller or of a trainer's rank that has died: bounded in bytes and time, and taken by nobody."""

from __future__ import annotations

import functools
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpcrl.errors import RunError
from hpcrl.rollout.weights.receive import Receiver
from hpcrl.runtime import bounded_answers
from hpcrl.runtime.bounded_answers import BoundedClient, NoAnswer
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.process_status import StatusWriter
from tests.controller.test_api import make_run

Says = Callable[[BaseHTTPRequestHandler], object]


@functools.cache
def bomb() -> bytes:
    return gzip.compress(bytes(200 << 20))


@pytest.fixture(scope="module", autouse=True)
def _compressed() -> None:
    """Compress it before a client waits for it, and in no process that only collects tests."""
    bomb()


@contextmanager
def stranger(says: Says) -> Iterator[str]:
    """Listen as somebody who answers with `says`; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            with suppress(OSError):
                says(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def packed(handler: BaseHTTPRequestHandler) -> None:
    handler.send_header("content-encoding", "gzip")
    handler.send_header("content-length", str(len(bomb())))
    handler.end_headers()
    handler.wfile.write(bomb())


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 16))


def drips(handler: BaseHTTPRequestHandler) -> None:
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def drips_its_head(handler: BaseHTTPRequestHandler) -> None:
    handler.flush_headers()
    while True:
        handler.wfile.write(b"a: b\r\n")
        time.sleep(0.05)


def announces(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")


def is_silent(handler: BaseHTTPRequestHandler) -> None:
    del handler
    time.sleep(20)


def has_endless_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.flush_headers()
    while True:
        handler.wfile.write(b"a: b\r\n")


def asked_of(url: str, seconds: float = 30.0, content: bytes = b"{}") -> bytes:
    with closing(BoundedClient()) as http:
        return http.post(f"{url}/turn", content, {}, seconds).content


def test_what_is_packed_stays_packed() -> None:
    with stranger(packed) as url:
        assert asked_of(url) == bomb()


def test_an_answer_has_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answers, "MOST_BYTES", 1 << 20)
    with stranger(endless) as url, pytest.raises(RunError, match="sends more than 1 MiB"):
        asked_of(url)


@pytest.mark.parametrize("says", [drips, drips_its_head, announces, is_silent])
def test_an_answer_has_a_bound_of_time(says: Says) -> None:
    began = time.monotonic()
    with stranger(says) as url, pytest.raises(NoAnswer, match=r"no whole answer within 0\.5 s"):
        asked_of(url, seconds=0.5)
    assert time.monotonic() - began < 15


def test_a_list_of_headers_has_a_bound() -> None:
    with stranger(has_endless_headers) as url, pytest.raises(NoAnswer):
        asked_of(url)


def test_a_request_that_is_not_read_has_a_bound_of_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(NoAnswer, match="no whole answer"):
        asked_of(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.5, bytes(64 << 20))


@pytest.mark.parametrize(("closes", "connections"), [(False, 1), (True, 3)])
def test_connections_are_kept_while_the_server_keeps_them(closes: bool, connections: int) -> None:
    clients = set[object]()

    def answers(handler: BaseHTTPRequestHandler) -> None:
        clients.add(handler.client_address)
        handler.send_header("content-length", "0")
        handler.end_headers()
        handler.close_connection = closes

    with stranger(answers) as url, closing(BoundedClient()) as http:
        for _ in range(3):
            assert http.post(f"{url}/turn", b"{}", {}, 30.0).status == 200
            time.sleep(0.3)
        assert len(clients) == connections
    with pytest.raises(NoAnswer, match="refused"):
        asked_of(url)


def test_clients_of_controller_and_trainer_take_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answers, "MOST_BYTES", 1 << 20)
    run = make_run(tmp_path / "project" / "run")
    for says, why in ((packed, "is not the controller"), (endless, "sends more than 1 MiB")):
        with stranger(says) as url, closing(ControllerClient(run, 1, patience_s=5.0)) as controller:
            StatusWriter(run, "controller", 1).write("serving", url=url)
            with pytest.raises(RunError, match=why):
                controller.call("lease", worker="rollout-0")
            controller.leave("rollout-0")
            with pytest.raises(RunError, match=why.replace("the controller", "no rank|is no rank")):
                Receiver(run, 1, False, "127.0.0.1", 5.0)._ask("run/trainer", url, {})
