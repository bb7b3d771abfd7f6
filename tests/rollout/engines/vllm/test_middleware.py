"""No route of the server answers without the run's token."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.engines.vllm.middleware import RUN_NAME as RUN_NAME_VARIABLE
from hpcrl.engines.vllm.middleware import TOKEN_FILE, TokenRequired
from hpcrl.engines.vllm.server import Server
from hpcrl.runtime.token import bearer
from tests.rollout.material import RUN_NAME, TOKEN, group_of

# What openapi.json leaves out, and what is not there at all.
UNLISTED = ["/metrics", "/docs", "/redoc", "/openapi.json", "/collective_rpc", "/update_weights", "/no/such/route", "/"]
REFUSED = {
    "no token": {},
    "wrong token": bearer("wrong", RUN_NAME),
    "prefix of the token": bearer(TOKEN[:-1], RUN_NAME),
    "run of another": bearer(TOKEN, "another"),
    "no scheme": {"authorization": TOKEN},
}


def client(server: Server, given: dict[str, str]) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(server.socket))
    return httpx.Client(transport=transport, base_url="http://engine", headers=given, timeout=60)


def routes(server: Server) -> list[tuple[str, str]]:
    with client(server, bearer(TOKEN, RUN_NAME)) as http:
        listed = http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in listed.items() for method in methods]


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_every_route_refuses(server: Server, given: dict[str, str]) -> None:
    known = routes(server)
    dangerous = {
        "/collective_rpc",
        "/update_weights",
        "/pause",
        "/inference/v1/generate",
        "/tokenize",
        "/v1/models",
        "/health",
    }
    assert dangerous <= {path for _, path in known}
    with client(server, given) as http:
        for method, path in known + [(method, path) for path in UNLISTED for method in ("GET", "POST", "OPTIONS")]:
            answer = http.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 401, f"{method} {path}: {answer.status_code} {answer.text[:200]}"


def test_the_token_opens(server: Server) -> None:
    with client(server, bearer(TOKEN, RUN_NAME)) as http:
        assert http.get("/health").status_code == 200
    with client(server, {"authorization": f"Bearer {TOKEN}"}) as http:  # the run's name counts where it is given
        assert http.get("/weight_info").status_code == 200


def test_a_head_without_end_is_not_read(server: Server) -> None:
    """Its connections are hpcrl's own, bounded as tests/runtime/test_connections.py has it."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30)
        stranger.connect(str(server.socket))
        stranger.sendall(b"POST /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            stranger.sendall(b"a: b\r\n" * 5_000_000)


def test_websockets_are_refused(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    monkeypatch.setenv(TOKEN_FILE, str(token_file))
    monkeypatch.setenv(RUN_NAME_VARIABLE, RUN_NAME)
    sent: list[Any] = []

    async def unreachable(*_: Any) -> None:
        raise AssertionError("the request got past the middleware")

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        await TokenRequired(unreachable)(
            {"type": "websocket", "headers": [], "path": "/v1/realtime"}, unreachable, send
        )

    asyncio.run(main())
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_token_is_in_no_command_line_or_environment(server: Server) -> None:
    for pid in group_of(server.pid):
        for name in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_only_this_user_reaches_the_sockets(server: Server) -> None:
    assert server.socket.parent.stat().st_mode & 0o077 == 0
    inner = [path for path in server.socket.parent.iterdir() if path.is_socket()]
    assert len(inner) > 1, "vLLM's own sockets lie elsewhere"


def test_nothing_listens_beyond_loopback(server: Server) -> None:
    loopback = ("0100007F", "00000000000000000000000001000000")
    for pid in group_of(server.pid):
        inodes = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address = fields[1].split(":")[0]
                assert fields[9] not in inodes or address in loopback, f"process {pid} has {table} socket {fields[1]}"
