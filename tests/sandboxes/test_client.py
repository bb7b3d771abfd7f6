"""The client of sandboxes: what environments ask, over real servers; full ones, dead ones, and sandboxes that are lost."""

from __future__ import annotations

import base64
import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpcrl.envs.base import GIVEN_UP
from hpcrl.envs.tools import sandboxes as client
from hpcrl.envs.tools.http import Fixed
from hpcrl.envs.tools.sandboxes import RunResult, SandboxClient, Sandboxes, SandboxLost
from hpcrl.errors import SandboxError, ServiceError
from tests.sandboxes.material import PATIENCE_S, TOKEN


def sandboxes_of(*addresses: str, client: str = "") -> Sandboxes:
    servers = [Fixed(address, TOKEN) for address in addresses]
    return Sandboxes(lambda: servers, client)


def test_a_sandbox_of_an_environment(serving: Callable[..., Any]) -> None:
    with serving() as node:
        sandboxes = sandboxes_of(node._url)
        one = sandboxes.start("tiny")
        one.write("/a/program", b"#!/bin/sh\necho out; echo err >&2; cat; exit 3\n", 0o755)
        assert one.run(["/a/program"], PATIENCE_S, input=b"in\n") == RunResult(3, "", b"out\nin\n", b"err\n")
        assert (
            one.run(["sh", "-c", 'echo "$A $PWD"'], 9.0, environment={"A": "b"}, directory="/etc").stdout == b"b /etc\n"
        )
        assert one.run(["sleep", "600"], 0.2).ended == "time"
        assert one.run(["sh", "-c", "echo 1234"], PATIENCE_S, most=5) == RunResult(0, "", b"1234\n", b"")
        assert one.run(["sh", "-c", "echo 1234; sleep 600"], PATIENCE_S, most=4) == RunResult(
            None, "output", b"1234", b""
        )
        assert one.read("/a/program").startswith(b"#!/bin/sh")
        for wrong in (lambda: one.read("/nothing"), lambda: one.write("relative", b""), lambda: one.run([], 1.0)):
            with pytest.raises(SandboxError) as refused:
                wrong()
            assert "127.0.0.1" not in str(refused.value), "a policy may be shown it"
        digest = one.snapshot()
        one.end()
        one.end()
        with pytest.raises(SandboxLost):
            one.run(["sh", "-c", "echo"], 1.0)
        again = sandboxes.start("tiny", snapshot=digest)
        assert again.read("/a/program").startswith(b"#!/bin/sh")
        again.end()


def test_what_no_server_starts_is_an_error_at_once(serving: Callable[..., Any]) -> None:
    with serving() as node:
        for wrong, said in (({"image": "other"}, "no image"), ({"image": "tiny", "network": True}, "have no network")):
            with pytest.raises(SandboxError, match=said) as refused:
                sandboxes_of(node._url).start(**wrong)
            assert "127.0.0.1" not in str(refused.value)


def test_full_and_dead_servers_are_passed_over(serving: Callable[..., Any]) -> None:
    dead = "http://127.0.0.1:9"
    with serving(most=1) as node, pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", dead)
        sandboxes = sandboxes_of(dead, node._url)
        one = sandboxes.start("tiny")
        with pytest.raises(ServiceError, match="no sandbox of image 'tiny' within 1 s"):
            sandboxes.start("tiny", wait_s=1.0)
        one.end()
        sandboxes.start("tiny").end()
        with pytest.raises(ServiceError, match="no server is there"):
            sandboxes_of().start("tiny", wait_s=0.0)


def test_a_call_that_was_given_up_takes_no_place(serving: Callable[..., Any]) -> None:
    """It asked for minutes, and then had the place of a sample that goes on."""
    with serving(most=1) as node:
        sandboxes, given_up = sandboxes_of(node._url), threading.Event()
        one = sandboxes.start("tiny")

        def wait() -> None:
            GIVEN_UP.set(given_up.is_set)
            sandboxes.start("tiny", wait_s=PATIENCE_S)

        with ThreadPoolExecutor() as threads:
            waits = threads.submit(wait)
            time.sleep(0.2)
            assert not waits.done()
            given_up.set()
            with pytest.raises(ServiceError, match="nobody waits"):
                waits.result()
        one.end()


def test_a_lease_is_renewed_as_long_as_its_client_is_there(serving: Callable[..., Any]) -> None:
    with serving(lease_s=6.0) as node:  # renewed each third of it, also where other tests have the cores
        kept, forgotten = sandboxes_of(node._url).start("tiny"), sandboxes_of(node._url).start("tiny")
        del forgotten
        deadline = time.monotonic() + PATIENCE_S
        while node.ask("/health", "GET").json()["running"] == 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert kept.run(["sh", "-c", "echo on"], PATIENCE_S).stdout == b"on\n"
        kept.end()


def test_a_worker_that_has_restarted_gets_the_places_of_the_one_that_was_killed(serving: Callable[..., Any]) -> None:
    with serving(most=3) as node:
        killed, other = sandboxes_of(node._url, client="rollout-0"), sandboxes_of(node._url, client="rollout-1")
        nameless = sandboxes_of(node._url)
        lost, stays, unowned = killed.start("tiny"), other.start("tiny"), nameless.start("tiny")
        restarted = sandboxes_of(node._url, client="rollout-0")
        one = restarted.start("tiny", wait_s=0.0)
        with pytest.raises(SandboxLost):
            lost.expect()
        with pytest.raises(
            ServiceError, match="3 sandboxes of at most 3"
        ):  # an earlier process takes no place of a later one
            killed.start("tiny", wait_s=0.0)
        for kept in (one, stays, unowned):
            kept.expect()
            kept.end()


def test_a_sandbox_of_a_server_that_has_ended_is_lost(serving: Callable[..., Any]) -> None:
    with serving() as node:
        one: SandboxClient = sandboxes_of(node._url).start("tiny")
    with pytest.raises(SandboxLost):
        one.read("/etc/release")
    one.end()


def test_output_of_one_byte_a_line_costs_its_bytes() -> None:
    """A program of a policy may write so, for as long as its tests run."""
    line = json.dumps({"stdout": base64.b64encode(b"x").decode()}).encode() + b"\n"
    content = 10_000 * line + b'{"code": 0, "ended": ""}\n'
    tracemalloc.start()
    try:
        last, stdout, stderr = client._output(content)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (last["code"], stdout, stderr) == (0, 10_000 * b"x", b"")
    assert most < len(content)
    for damaged in (b"[1]\n", b"7\n", b'{"stdout": 7}\n', b"[" * 100_000):
        with pytest.raises(client._UNREADABLE):
            client._output(damaged)
