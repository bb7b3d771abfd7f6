"""Engines that somebody else started: who may use one, what proves that it is the right one, and that it says what an own one does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.engines.vllm.address import Address, Listen
from hpcrl.engines.vllm.middleware import LEASE_S, Leases
from hpcrl.engines.vllm.remote import Remote, RemoteOptions, check_network
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import ConfigError, EngineError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.runtime.scratch import Scratch
from hpcrl.runtime.token import make_secret, read_secret
from tests.paths import QUICKSTART
from tests.rollout.engines.test_contract import assert_close
from tests.rollout.material import (
    LONG_PROMPT,
    MAX_MODEL_LEN,
    START_S,
    as_version,
    group_of,
    make_model,
    options,
    probe_of,
    publish,
    served,
    wait_for,
)

WHOLE = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_lease_is_one_clients_until_it_is_silent() -> None:
    leases = Leases()
    first = leases.take("run a", 0.0)
    assert first
    assert leases.holds(first, 50.0)
    assert leases.take("run b", 50.0 + LEASE_S - 1) is None
    assert leases.owner == "run a"
    again = leases.take("run a", 60.0)
    assert again not in (None, first), "its worker was started again"
    assert not leases.holds(first, 61.0)
    other = leases.take("run b", 60.0 + LEASE_S)
    assert other
    assert not leases.holds(again or "", 200.0)
    leases.end(first)
    assert leases.holds(other, 200.0), "a lease that has ended ends no other"
    leases.end(other)
    assert leases.take("run c", 200.0)
    assert not Leases().holds("", 0.0)


def test_a_key_comes_from_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_secret(path)
    key = read_secret(path, "the.setting")
    assert len(key) == 64
    make_secret(path)
    assert read_secret(path, "the.setting") == key, "what is there stays"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"the\.setting: .*key can be read by others; run `chmod 600"):
        read_secret(path, "the.setting")
    path.chmod(0o600)
    for wrong in ("", "two words", "ключ"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"the\.setting: expected one line"):
            read_secret(path, "the.setting")
    with pytest.raises(ConfigError, match=r"the\.setting: .*none cannot be read"):
        read_secret(tmp_path / "none", "the.setting")


def test_a_key_crosses_no_public_network_in_the_clear() -> None:
    for url in ("http://127.0.0.1:8000", "http://10.1.2.3:8000", "http://[::1]:8000", "https://8.8.8.8:8000"):
        check_network(Address(url))
    with pytest.raises(ConfigError, match=r"is 8\.8\.8\.8, no address of a private network.*use https"):
        check_network(Address("http://8.8.8.8:8000"))


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"remote_ca_file: expected a file of certificates in PEM"):
        Remote(asking(Address("https://127.0.0.1:1", ca_file=tmp_path / "ca.pem"), None))


def asking(address: Address, key_file: Path | None, owner: str = "rollout-0 of tested", **more: Any) -> RemoteOptions:
    given = {"model": None, "max_model_len": MAX_MODEL_LEN, "trains": True, **more}
    return RemoteOptions(address, owner, key_file, **given)


def refusal(options: RemoteOptions, seconds: float = 2.5) -> str:
    with pytest.raises(EngineError) as caught:
        Remote(options).wait_ready(seconds)
    return str(caught.value)


def certificate(folder: Path) -> tuple[Path, Path]:
    names = folder / "certificate.pem", folder / "private.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engine",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(names[0]), "-keyout", str(names[1])],
        check=True, capture_output=True,
    )  # fmt: skip
    return names


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Address, Path, list[Path]]]:
    """A server over TLS that works for one client at a time, its address and key, and models that it can be."""
    folder = tmp_path_factory.mktemp("remote")
    models = [make_model(folder / str(seed), seed) for seed in (0, 2)]
    make_secret(folder / "key")
    pem, private = certificate(folder)
    listen = Listen("127.0.0.1", free_port(), pem, private)
    given = replace(options(str(models[0]), folder / "key"), run_name="", listen=listen)
    with served(given, folder / "engine.log") as server:
        yield server, Address(server.address.url, ca_file=pem), folder / "key", models


@pytest.mark.slow
def test_it_says_what_an_own_engine_does(
    shared: tuple[Server, Address, Path, list[Path]], server: Server, tmp_path: Path
) -> None:
    _, address, key_file, models = shared
    weights = publish(models[1], tmp_path / "v000001", 1, probe=probe_of(models[1]))

    async def play(launched: Launched) -> list[list[int]]:
        engine = launched.connect(replica="rollout-0")
        try:
            await engine.update_weights(weights)
            assert await engine.probe(weights, "float32", None) is not None
            said = await engine.generate(LONG_PROMPT, 4, 3, WHOLE)
            for one in said:
                assert one.versions == [1] * 40
                assert_close(one, models[1], LONG_PROMPT)
            assert await engine.load() is not None
            return [one.token_ids for one in said]
        finally:
            await engine.close()

    remote = Remote(asking(address, key_file))
    remote.wait_ready(START_S)
    assert asyncio.run(play(remote)) == asyncio.run(play(server))


@pytest.mark.slow
def test_one_client_at_a_time(shared: tuple[Server, Address, Path, list[Path]]) -> None:
    server, address, key_file, models = shared
    first, second = Remote(asking(address, key_file)), Remote(asking(address, key_file, "rollout-0 of another"))
    first.wait_ready(START_S)
    with pytest.raises(EngineError, match=r"remote_urls\): it works for rollout-0 of tested, for 2 s"):
        second.wait_ready(2.0)
    again = Remote(asking(address, key_file))
    again.wait_ready(5.0)

    async def play() -> None:
        old, new = first.connect(), again.connect()
        with pytest.raises(EngineError, match=r"409\): .*started anew, or works for somebody else"):
            await old.generate(LONG_PROMPT, 1, 3, WHOLE)
        assert not await _changes(old), "nor does it change the weights of others"
        await new.update_weights(as_version(models[0], 0))
        await old.close()
        await new.generate(LONG_PROMPT, 1, 3, WHOLE)
        await new.close()

    async def end_at_once() -> None:
        await second.connect().close()

    async def _changes(engine: Engine) -> bool:
        try:
            await engine.update_weights(as_version(models[0], 0))
        except EngineError:
            return False
        return True

    asyncio.run(play())
    second.wait_ready(5.0)
    asyncio.run(end_at_once())
    assert server.alive()


@pytest.mark.slow
def test_what_may_not_be_used_is_refused(
    shared: tuple[Server, Address, Path, list[Path]], tmp_path: Path, models: list[Path]
) -> None:
    server, address, key_file, own = shared
    wrong = tmp_path / "wrong"
    make_secret(wrong)
    assert "it refuses the key of generator.inference_engine.remote_key_file" in refusal(asking(address, wrong))
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(asking(Address(address.url), key_file))
    assert f"takes {MAX_MODEL_LEN} tokens" in refusal(asking(address, key_file, max_model_len=MAX_MODEL_LEN + 1))
    said = refusal(asking(address, key_file, trains=False, model=str(models[1])))
    assert f"it serves {own[0]}, and {models[1]} is evaluated" in said
    key = key_file.read_text().strip().encode()
    for pid in group_of(server.pid):
        for name in ("cmdline", "environ"):
            assert key not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert key not in (key_file.parent / "engine.log").read_bytes()


@contextmanager
def plain_server(model: Path, log: Path, *more: str) -> Iterator[str]:
    """Start vLLM's own server, as somebody without hpcrl would."""
    port, scratch = free_port(), Scratch("engine")
    command = [
        sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-batched-tokens", "2048", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(256 << 20), *more,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(scratch.path), "VLLM_HOST_IP": "127.0.0.1", "TORCHDYNAMO_DISABLE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()  # killed, it would leave a semaphore in /dev/shm
        try:
            wait_for(lambda: process.poll() is not None and not group_of(process.pid), 60, "the server does not end")
        finally:
            for left in group_of(process.pid):
                os.kill(left, signal.SIGKILL)
            process.wait()
            scratch.remove()


@pytest.mark.slow
def test_a_plain_server_is_for_evaluation_alone(models: list[Path], tmp_path: Path) -> None:
    with plain_server(models[0], tmp_path / "engine.log", "--enable-scale-out") as url:
        evaluates = asking(Address(url), None, trains=False, model=str(models[0]))
        remote = Remote(evaluates)
        remote.wait_ready(START_S)

        async def play() -> None:
            engine = remote.connect()
            for said in await engine.generate(LONG_PROMPT, 2, 3, WHOLE):
                assert_close(said, models[0], LONG_PROMPT)
            await engine.close()

        asyncio.run(play())
        assert "it is no server of hpcrl's, so nobody can prove" in refusal(asking(Address(url), None), 20)
        assert f"it serves {models[0]}, and other is evaluated" in refusal(replace(evaluates, model="other"), 20)


class WithoutTokens(BaseHTTPRequestHandler):
    """Another server of OpenAI's protocol, whose route for tokens is missing."""

    def do_GET(self) -> None:
        models = {"data": [{"id": "m", "root": "m", "max_model_len": MAX_MODEL_LEN}]}
        self._answer(200 if self.path == "/v1/models" else 404, models)

    def do_POST(self) -> None:
        self._answer(404, {})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_without_the_route_of_tokens_is_told_which_option_it_lacks() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), WithoutTokens) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        address = Address(f"http://127.0.0.1:{server.server_port}")
        try:
            said = refusal(asking(address, None, trains=False, model="m"))
            assert "start it with `vllm serve MODEL --enable-scale-out`" in said
            assert "it is no server of hpcrl's" in refusal(asking(address, None))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], r"--host: expected one address of this machine"),
        (["--host", "8.8.8.8"], r"no address of a private network"),
        (["--certificate", "c.pem"], "both --certificate and --private-key"),
        (["--key-file", "no/such/folder/key"], "--key-file: no/such/folder/key cannot be made"),
        (["generator.inference_engine.backend=transformers"], 'expected "vllm", the only engine that serves others'),
    ],
)
def test_what_an_engine_outside_of_runs_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = [] if "--key-file" in words else ["--key-file", "key"]
    assert main(["engine", str(QUICKSTART), "generator.inference_engine.backend=vllm", *own, *words]) == 2
    assert re.search(said, capsys.readouterr().err)
