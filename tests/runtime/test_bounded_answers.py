"""What somebody answers at the address of a controller or of a trainer's rank that has died: bounded in bytes and time, and taken by nobody."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from hpcrl.errors import RunError
from hpcrl.rollout.weights.receive import Receiver
from hpcrl.runtime import bounded_answers
from hpcrl.runtime.bounded_answers import post
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.process_status import StatusWriter
from tests.controller.test_api import make_run

Says = Callable[[BaseHTTPRequestHandler], object]
BOMB = gzip.compress(bytes(200 << 20))


@contextmanager
def stranger(says: Says) -> Iterator[str]:
    """Listen as somebody who answers with `says`; yield the address."""

    class Handler(BaseHTTPRequestHandler):
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
    handler.send_header("content-length", str(len(BOMB)))
    handler.end_headers()
    handler.wfile.write(BOMB)


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 16))


def drips(handler: BaseHTTPRequestHandler) -> None:
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def asked_of(url: str, seconds: float = 30.0) -> bytes:
    with httpx.Client(trust_env=False) as http:
        return post(http, f"{url}/turn", b"{}", {}, seconds).content


def test_what_is_packed_stays_packed() -> None:
    with stranger(packed) as url:
        assert asked_of(url) == BOMB


def test_an_answer_has_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answers, "MOST_BYTES", 1 << 20)
    with stranger(endless) as url, pytest.raises(RunError, match="sends more than 1 MiB"):
        asked_of(url)


def test_an_answer_has_a_bound_of_time() -> None:
    began = time.monotonic()
    with stranger(drips) as url, pytest.raises(httpx.ReadTimeout, match="not all of the answer"):
        asked_of(url, seconds=1.0)
    assert time.monotonic() - began < 20


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
