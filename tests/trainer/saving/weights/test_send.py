"""Ranks send their files of a version to a node, and a node that gets them from one rank only reads the files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.data.weights import stream
from hpcrl.data.weights.stream import Pair, rendezvous_entries
from hpcrl.rollout.weights.receive import NotReceived, Receiver
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.saving.send import WeightSender

HOST, CPU, STAGE_S = "127.0.0.1", torch.device("cpu"), 20.0
SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def found(two: Any, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("sent") / "found.json"
    two.play([("saving.weights.sending:sent", {"out": str(out), "model": str(model_path)})])
    return json.loads(out.read_text())


def test_a_node_gets_what_two_ranks_send(found: list[dict[str, Any]]) -> None:
    assert [one["same"] for one in found] == [True] * 6
    assert [one["base"] for one in found[:4]] == [False, True, False, True]
    assert [one["senders"] for one in found[:4]] == [2] * 4
    assert [len(one["files"]) for one in found[:4]] == [2] * 4, "each rank has a file of its own"
    assert [found[number]["weights/received"] for number in (0, 1, 3)] == [1.0] * 3
    assert found[1]["weights/fetch_gib"] == found[1]["size"] / 2**30, "and the changes alone"


def test_where_one_rank_does_not_send_the_files_are_read(found: list[dict[str, Any]]) -> None:
    assert found[2]["weights/received"] == 0.0
    assert found[2]["weights/fetch_gib"] == found[2]["size"] / 2**30


def test_an_older_version_is_read_from_its_files(found: list[dict[str, Any]]) -> None:
    assert found[4]["weights/received"] == 0.0


def test_a_late_node_reads_what_changes_are_of_and_is_sent_these(found: list[dict[str, Any]]) -> None:
    assert found[5]["weights/received"] == 1.0
    assert found[5]["weights/fetch_gib"] == (found[2]["size"] + found[3]["size"]) / 2**30


def run_with(tmp_path: Path, token: str) -> Run:
    run = Run(tmp_path / "run")
    write_text(run.token, token, mode=0o600)
    return run


def published(version: int, *urls: str, attempt: int = 1) -> PublishedWeights:
    return PublishedWeights(Path(f"v{version}"), version, {}, 0, attempt=attempt, senders=urls)


def test_who_is_not_sent_to_is_told_why(tmp_path: Path) -> None:
    run = run_with(tmp_path, "secret")
    sender = WeightSender(run, 1, 0, CPU, HOST, STAGE_S)
    sender.offer(4, {"a.safetensors": {"w": torch.ones(3)}})
    receiver, url = Receiver(run, 1, False, HOST, STAGE_S), sender.address()
    for weights, why in (
        (published(3, url), "has version 4, and not 3"),
        (published(4, url, attempt=2), "attempt 2 published it"),
        (published(4), "the trainer sends nothing"),
        (published(4, "http://127.0.0.1:9"), "refused"),
    ):
        began = time.monotonic()
        with pytest.raises(NotReceived, match=why):
            receiver.receive(weights, tmp_path)
        assert time.monotonic() - began < 10
    receiver.receive(published(4, url), tmp_path)
    assert (tmp_path / "a.safetensors").is_file()
    with pytest.raises(NotReceived, match="is no rank of the trainer"):
        receiver.receive(published(4, url, url), tmp_path)  # the second one is another rank
    assert not (tmp_path / "a.safetensors").exists(), "what the first one sent is no version"


def test_nobody_else_is_sent_to(tmp_path: Path) -> None:
    run = run_with(tmp_path, "secret")
    sender = WeightSender(run, 1, 0, CPU, HOST, STAGE_S)
    sender.offer(4, {"a.safetensors": {"w": torch.ones(3)}})
    assert httpx.post(f"{sender.address()}/weights", json={"version": 4, "pair": "a", "told": {}}).status_code == 409
    stranger = run_with(tmp_path / "stranger", "guess")
    with pytest.raises(NotReceived, match="is no rank of the trainer"):
        Receiver(stranger, 1, False, HOST, STAGE_S).receive(published(4, sender.address()), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def listening() -> set[int]:
    """Return the ports at which this process listens."""
    return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("says", "count"), [(b"", 50), (b"\1", 50), (bytes(range(256)) * 16, 20), (b"GET / HTTP/1.1\r\n\r\n", 20)]
)
def test_a_stranger_at_the_port_of_gloo_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes, count: int
) -> None:
    """Half of the connections end, the others are held open; gloo keeps each open file until the pair ends."""
    run, rendezvous = run_with(tmp_path, "secret"), Pair.own_rendezvous
    sender, receiver = WeightSender(run, 1, 0, CPU, HOST, STAGE_S), Receiver(run, 1, False, HOST, STAGE_S)
    before, attacked = listening(), set[int]()
    with ExitStack() as stack:

        def found_out(pair: Pair) -> dict[str, str]:
            own = rendezvous(pair)
            for port in listening() - before - attacked:
                attacked.add(port)
                for number in range(count):
                    stranger = socket.create_connection((HOST, port), 30)
                    stack.enter_context(stranger)
                    with suppress(ConnectionError):
                        stranger.sendall(says)
                    if number % 2:
                        stranger.close()
            return own

        monkeypatch.setattr(Pair, "own_rendezvous", found_out)
        for version in (1, 2):
            receiver.receive(offered(sender, version), tmp_path)
            assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [version] * 3
            await_kept(sender)
    assert len(attacked) == 2, "of both ends"


def test_a_stranger_in_the_place_of_a_receiver_costs_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's numbers of connections are small: who sends them first is taken for the other end, and the version is read from its files."""
    run, rendezvous, before = run_with(tmp_path, "secret"), Pair.own_rendezvous, listening()
    sender, receiver = WeightSender(run, 1, 0, CPU, HOST, 2.0), Receiver(run, 1, False, HOST, 2.0)
    with ExitStack() as stack:

        def taken(pair: Pair) -> dict[str, str]:
            own = rendezvous(pair)
            for port in listening() - before:
                for number in range(4):
                    stranger = stack.enter_context(socket.create_connection((HOST, port), 30))
                    stranger.sendall(struct.pack("<q", number))
            return own

        monkeypatch.setattr(Pair, "own_rendezvous", taken)
        with pytest.raises(NotReceived, match=r"Timed out|within|closed"):
            receiver.receive(offered(sender, 1), tmp_path)
    assert not (tmp_path / "a.safetensors").exists()


def test_a_host_that_is_silent_costs_a_stage(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(NotReceived, match="no whole answer"):
            Receiver(run_with(tmp_path, "secret"), 1, False, HOST, 1.0).receive(published(4, url), tmp_path)
        assert time.monotonic() - began < 10


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ranks of the process groups that this process makes."""
    found, gloo = list[int](), stream._gloo

    def noting(store: Any, rank: int, *more: Any) -> Any:
        found.append(rank)
        return gloo(store, rank, *more)

    monkeypatch.setattr(stream, "_gloo", noting)
    return found


def offered(sender: WeightSender, version: int) -> PublishedWeights:
    sender.offer(version, {"a.safetensors": {"w": torch.full((3,), float(version))}})
    return published(version, sender.address())


def await_kept(sender: WeightSender, names: set[str] | None = None) -> str:
    """Return the name of the one pair that the sender keeps, as soon as it is another than these."""
    deadline = time.monotonic() + 60
    while not (found := sender._kept.keys() - (names or set())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (name,) = found
    return name


def test_a_pair_is_kept_over_versions_and_made_again_where_it_is_lost(tmp_path: Path, made: list[int]) -> None:
    run = run_with(tmp_path, "secret")
    sender, receiver = WeightSender(run, 1, 0, CPU, HOST, STAGE_S), Receiver(run, 1, False, HOST, STAGE_S)
    for version in (1, 2, 3):
        receiver.receive(offered(sender, version), tmp_path)
        assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [version] * 3
        first = await_kept(sender)
    assert len(made) == 2, "one group, with two ends"
    sender._kept.clear()
    receiver.receive(offered(sender, 4), tmp_path)
    assert len(made) == 4, "the sender had lost it"
    second = await_kept(sender)
    assert second != first
    sender._kept[second]._group.result().shutdown()
    sender._kept[second]._group = type(sender._kept[second]._group)()
    sender._kept[second]._group.set_exception(RuntimeError("broken"))
    receiver.receive(offered(sender, 5), tmp_path)
    assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [5] * 3
    assert len(made) == 6, "it was broken"
    assert await_kept(sender) not in {first, second}


def _receive(run: Run, url: str, directory: Path, version: int, pipe: Any) -> None:
    receiver = Receiver(run, 1, False, HOST, STAGE_S)
    receiver.receive(published(version, url), directory)
    pipe.send("received")
    following = pipe.recv()
    os.environ["HPCRL_FAULT"] = "weights.receive:kill"
    receiver.receive(published(following, url), directory)


def test_a_killed_receiver_with_a_kept_pair_costs_its_sender_a_stage_and_the_next_version_nothing(
    tmp_path: Path, made: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, "secret")
    sender = WeightSender(run, 1, 0, CPU, HOST, STAGE_S)
    url = offered(sender, 1).senders[0]
    mine, its = SERVER.Pipe()
    process = SERVER.Process(target=_receive, args=(run, url, tmp_path, 1, its), daemon=True)
    process.start()
    assert mine.poll(120)
    assert mine.recv() == "received"
    await_kept(sender)
    offered(sender, 2)
    with caplog.at_level(logging.WARNING, "hpcrl.trainer.saving.send"):
        mine.send(2)
        process.join(60)
        assert process.exitcode == -9
        died = time.monotonic()
        while "version 2 was not sent" not in caplog.text:
            assert time.monotonic() - died < 3 * STAGE_S
            time.sleep(0.05)
    assert not sender._kept
    Receiver(run, 1, False, HOST, STAGE_S).receive(offered(sender, 3), tmp_path)
    assert load_file(tmp_path / "a.safetensors")["w"].tolist() == [3] * 3
    assert sorted(made) == [stream.SENDER] * 2 + [stream.RECEIVER], "the killed one was another process"


def test_what_nccl_is_found_by_is_its_unique_id_whatever_is_written_before() -> None:
    store = torch.distributed.HashStore()
    store.set("from the other one", b"y" * 128)
    store.set("0/cpu", b"x" * 40)
    assert rendezvous_entries(store, {"from the other one"}, of_nccl=True) == {}
    assert rendezvous_entries(store, {"from the other one"}, of_nccl=False) == {"0/cpu": b"x" * 40}
    store.set("0:1", b"u" * 128)
    assert rendezvous_entries(store, {"from the other one"}, of_nccl=True) == {"0/cpu": b"x" * 40, "0:1": b"u" * 128}
