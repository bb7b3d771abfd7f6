"""Who may call the controller, and whom its clients believe: a stranger on its node sees every request, and answers where it has died."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from hpcrl.controller.schema import NAME, Schema
from hpcrl.errors import RunError
from hpcrl.rundir.layout import Run
from hpcrl.runtime import http_server
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.http_server import Guard, Route, Signed, bind, serve
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.token import NONCE, SIGNATURE, AttemptKey, Seen, Sender, read_token
from tests.controller.test_api import make_run

BODY = json.dumps({"worker": "rollout-0"}).encode()


class Echo:
    """A controller of one route, which counts."""

    def __init__(self, run: Run) -> None:
        self.calls, self.run, self._over = list[Any](), run, threading.Event()
        listener = bind("127.0.0.1")
        self.address = listener.getsockname()[:2]
        self.url = f"http://127.0.0.1:{self.address[1]}"
        app = Guard({"/leave": Route(self._leave, Schema({"worker": NAME}))}, Signed(read_token(run), run.name, 1))
        over = asyncio.to_thread(self._over.wait)
        self._thread = threading.Thread(target=lambda: asyncio.run(serve(app, listener, over)), daemon=True)
        self._thread.start()
        StatusWriter(run, "controller", 1).write("serving", url=self.url)

    async def _leave(self, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(body)
        return {"calls": len(self.calls)}

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    with closing(Echo(make_run(tmp_path / "project" / "run"))) as echo:
        yield echo


def signed(run: Run, path: str = "/leave", body: bytes = BODY, token: str = "secret") -> dict[str, str]:
    return Sender(AttemptKey.of(token, run.name, 1)).headers(path, body)


def test_what_is_signed_is_answered_once_and_the_answer_is_signed(echo: Echo) -> None:
    sender = Sender(AttemptKey.of("secret", echo.run.name, 1))
    headers = sender.headers("/leave", BODY)
    answer = httpx.post(f"{echo.url}/leave", content=BODY, headers=headers)
    assert answer.json() == {"calls": 1}
    assert sender.is_answer(headers[NONCE], 200, answer.content, answer.headers)
    assert not sender.is_answer(headers[NONCE], 200, b'{"calls":2}', answer.headers)
    assert not sender.is_answer(headers[NONCE], 400, answer.content, answer.headers)
    again = httpx.post(f"{echo.url}/leave", content=BODY, headers=headers)
    assert (again.status_code, len(echo.calls)) == (401, 1)
    unknown = httpx.post(f"{echo.url}/nothing", content=BODY, headers=sender.headers("/nothing", BODY))
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ({}, 409),
        ({"token": "wrong"}, 401),
        ({"path": "/claim"}, 401),
        ({"body": BODY.replace(b"0", b"1")}, 401),
        ({"headers": {SIGNATURE: ""}}, 401),
        ({"headers": {NONCE: "other-1"}}, 401),
        ({"headers": {"x-hpcrl-run": "other"}}, 409),
        ({"headers": {"x-hpcrl-attempt": "2"}}, 409),
    ],
    ids=str,
)
def test_what_is_not_signed_so_changes_nothing(echo: Echo, what: dict[str, Any], status: int) -> None:
    other = {name: value for name, value in what.items() if name != "headers"}
    headers = {**signed(echo.run, **other), **what.get("headers", {})} if what else {}
    answer = httpx.post(f"{echo.url}/leave", content=BODY, headers=headers)
    assert (answer.status_code, echo.calls) == (status, [])
    assert SIGNATURE not in answer.headers, "a stranger could show it to others"


class Stranger(BaseHTTPRequestHandler):
    """Listens at the address of a controller that has died, and says what it likes."""

    heard: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        answer = b'{"stop": "finished", "version": null, "unwanted": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.send_header(SIGNATURE, self.headers[SIGNATURE])
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_stranger_at_its_address_learns_nothing_and_is_not_believed(echo: Echo) -> None:
    """What it hears has no token, and the next attempt takes nothing of it."""
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        StatusWriter(echo.run, "controller", 2).write("serving", url=f"http://127.0.0.1:{server.server_port}")
        refused = r"is not the controller of attempt 2: .* not signed with the token of run"
        with closing(ControllerClient(echo.run, 2, patience_s=1)) as controller:
            try:
                with pytest.raises(RunError, match=refused):
                    controller.call("leave", worker="rollout-0")
                controller.leave("rollout-0")
            finally:
                server.shutdown()
    assert len(Stranger.heard) >= 2
    for path, headers, body in Stranger.heard:
        assert "secret" not in f"{path}{headers}{body}"
        sent = {name: value for name, value in headers.items() if name.startswith("x-hpcrl")}
        for attempt in ("1", "2"):
            answer = httpx.post(echo.url + path, content=body, headers=sent | {"x-hpcrl-attempt": attempt})
            assert answer.status_code in (401, 409)
    assert echo.calls == []


def test_requests_may_overtake_each_other() -> None:
    seen = Seen()
    assert all(seen.is_new(f"a-{number}") for number in (3, 1, 2, 300, 45))
    assert not any(seen.is_new(f"a-{number}") for number in (3, 1, 2, 300, 45, 44))
    assert seen.is_new("b-1")
    assert not any(map(seen.is_new, ["", "a", "a-", "a-x", "a-²", "a-" + "9" * 30]))
    for number in range(10_000):
        assert seen.is_new(f"c-{number}")
    assert len(seen._recent["c"]) <= 256


def test_a_connection_on_which_nothing_is_asked_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    with closing(Echo(make_run(tmp_path / "project" / "run"))) as echo, ExitStack() as stack:
        silent, half, slow = (stack.enter_context(socket.create_connection(echo.address, 10)) for _ in range(3))
        half.sendall(b"POST /leave HTTP/1.1\r\nhost: x\r\n")
        fields = "".join(f"{name}: {value}\r\n" for name, value in signed(echo.run).items())
        slow.sendall(f"POST /leave HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n{fields}\r\n{{".encode())
        answer = httpx.post(f"{echo.url}/leave", content=BODY, headers=signed(echo.run))
        assert answer.json() == {"calls": 1}
        began = time.monotonic()
        for connection in (silent, half, slow):
            assert connection.recv(1) == b""
        assert time.monotonic() - began < 9


def test_a_connection_that_is_used_all_the_time_stays(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is between two requests whenever somebody looks: a request that crosses its end on the way is lost."""
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    with closing(http.client.HTTPConnection(*echo.address, timeout=10)) as connection:
        connection.connect()
        connection.auto_open = 0
        for number in range(40):
            connection.request("POST", "/leave", BODY, signed(echo.run))
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())) == (200, {"calls": number + 1})
            time.sleep(0.05)
