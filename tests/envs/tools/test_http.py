"""A service that fails for a while is asked again; one that refuses, or answers in another form, is a clear error."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from itertools import count
from typing import Any

import pytest

from hpcrl.envs.tools.http import ToolService
from hpcrl.errors import ConfigError, ServiceError
from tests.envs.server import Raw, serving

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that fails is asked again after 50 ms, not half a second."""
    monkeypatch.setattr("hpcrl.envs.tools.http._FIRST_WAIT_S", 0.05)


def of(url: str, timeout_s: float = 60.0, patience_s: float = 5.0, token: str | None = None) -> ToolService:
    return ToolService("test service (test.url)", url, timeout_s, patience_s, token)


def test_errors_of_the_server_pass() -> None:
    answers = iter([(500, "down"), (503, "busy"), (429, "slowly"), (200, {"right": [1]})])
    with serving(lambda _: next(answers)) as server:
        assert of(server.url, token="s3cret").post(json={"q": 1}) == {"right": [1]}
    assert [asked.json for asked in server.asked] == [{"q": 1}] * 4
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer s3cret"}


def test_a_service_that_is_not_there_yet() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with pytest.raises(
        ServiceError, match=r"test service \(test.url\) at http://127.0.0.1:\d+/x: .*refused.*, after \d tries in"
    ):
        of(f"http://127.0.0.1:{port}/x", patience_s=0.6).post(json={})


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (404, "no such route", r"it answered 404 '\"no such route\"'"),
        (301, "elsewhere", "it answered 301"),
        (401, "the key s3cret is wrong", "it answered 401 '\"the key … is wrong\"'"),
        (200, b"<html>", "expected JSON, found '<html>'"),
        (200, b"", "expected JSON, found ''"),
        (200, b"[" * 100_000, "expected JSON, found"),
        (200, b"\xff\xfe", "expected JSON"),
        (200, b" " * (33 * 2**20), "an answer of at most 32 MiB"),
    ],
)
def test_what_another_try_cannot_help(status: int, said: Any, words: str) -> None:
    with serving(lambda _: (status, said)) as server, pytest.raises(ServiceError, match=words) as error:
        of(server.url, token="s3cret").post(json={})
    assert len(server.asked) == 1
    assert "s3cret" not in str(error.value)
    assert len(str(error.value)) < 600


def test_the_last_problem_is_told_when_patience_ends() -> None:
    with (
        serving(lambda _: (503, "key s3cret")) as server,
        pytest.raises(ServiceError, match=r"503 '\"key …\"', after \d tr(y|ies) in"),
    ):
        of(server.url, patience_s=0.2, token="s3cret").post(json={})
    with serving(lambda _: (500, "")) as server, pytest.raises(ServiceError, match="after 1 try in 0 s"):
        of(server.url, patience_s=0).post(json={})


def test_a_server_that_hangs_and_one_that_trickles() -> None:
    ended = threading.Event()

    def trickle(out: Any) -> None:
        out.write(HEAD)
        for _ in range(100):
            out.write(b" ")
            out.flush()
            if ended.wait(0.05):
                return

    def hang(_: Any) -> None:
        ended.wait(5)

    def trickle_head(out: Any) -> None:
        out.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            out.write(b"a: b\r\n")
            out.flush()
            if ended.wait(0.05):
                return

    def announce(out: Any) -> None:
        for _ in range(100):
            out.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            out.flush()
            if ended.wait(0.05):
                return

    for write in (hang, trickle, trickle_head, announce):
        with serving(lambda _, write=write: Raw(write)) as server:
            started = time.monotonic()
            with pytest.raises(ServiceError, match=r"no whole answer within 0\.3 s"):
                of(server.url, timeout_s=0.3, patience_s=0).post(json={})
            assert time.monotonic() - started < 3
            ended.set()
        ended.clear()


def test_a_connection_that_breaks_is_tried_again() -> None:
    tries = count()
    with serving(lambda _: Raw(lambda out: out.write(HEAD)) if next(tries) == 0 else (200, 7)) as server:
        assert of(server.url).post(json={}) == 7
    assert len(server.asked) == 2


def test_a_compressed_answer_is_not_unpacked() -> None:
    """Of two layers, 64 KiB would become 64 GiB."""
    packed = gzip.compress(gzip.compress(json.dumps([1]).encode()))

    def sent(_: Any) -> Raw:
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip, gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
        return Raw(lambda out: out.write(head.encode() + packed))

    with serving(sent) as server, pytest.raises(ServiceError, match=r"is compressed \('gzip, gzip'\)"):
        of(server.url).post(json=0)
    assert server.asked[0].headers["accept-encoding"] == "identity"
    assert len(server.asked) == 1


def test_a_redirect_is_not_followed_with_the_token() -> None:
    with serving(lambda _: (200, 1)) as other:
        head = f"HTTP/1.1 307 Elsewhere\r\nlocation: {other.url}\r\ncontent-length: 0\r\n\r\n".encode()
        with serving(lambda _: Raw(lambda out: out.write(head))) as server, pytest.raises(ServiceError, match="307"):
            of(server.url, token="s3cret").post(json={})
    assert not other.asked


def test_which_statuses_are_tried_again_can_be_said() -> None:
    answers = iter([(404, ""), (404, ""), (200, 1)])
    with serving(lambda _: next(answers)) as server:
        assert of(server.url).post(lambda status: status == 404, data={"uuid": "a b", "type": "x"}) == 1
    assert server.asked[0].body == b"uuid=a+b&type=x"


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.envs.tools.requests import _made

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    _made.cache_clear()
    try:
        with serving(lambda _: (200, 1)) as server:
            assert of(server.url).post(json={}) == 1
    finally:
        _made.cache_clear()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host/x", "http://", "bm25:corpus", "http://host:port/x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"test service \(test.url\)"):
        of(url)


def test_secrets_in_an_address_are_not_repeated() -> None:
    with pytest.raises(ServiceError) as error:
        of("http://me:pa55@127.0.0.1:9/x?key=s3cret", patience_s=0).post(json={})
    assert "http://127.0.0.1:9/x:" in str(error.value)
    assert "pa55" not in str(error.value)
    assert "s3cret" not in str(error.value)


def test_connecting_may_take_as_long_as_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.envs.tools import requests

    monkeypatch.setattr(requests, "_CONNECT_S", 0.01)
    requests._made.cache_clear()
    try:
        with socket.socket() as busy, socket.socket() as first, socket.socket() as second:
            busy.bind(("127.0.0.1", 0))
            busy.listen(0)
            for other in (first, second):  # which fill its queue
                other.setblocking(False)
                other.connect_ex(busy.getsockname())
            with pytest.raises(ServiceError, match=r"no whole answer within 0\.2 s"):
                of(f"http://127.0.0.1:{busy.getsockname()[1]}", timeout_s=0.2, patience_s=0).post(json={})
    finally:
        requests._made.cache_clear()
