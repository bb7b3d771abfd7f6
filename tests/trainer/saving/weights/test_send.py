"""Ranks send their files of a version to a node, and a node that gets them from one rank only reads the files."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.rollout.weights.receive import NotReceived, Receiver
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.saving.send import WeightSender

HOST, CPU, STAGE_S = "127.0.0.1", torch.device("cpu"), 20.0


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
        (published(4, "http://127.0.0.1:9"), "ConnectError"),
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
    assert httpx.post(f"{sender.address()}/weights", json={"version": 4, "told": {}}).status_code == 409
    stranger = run_with(tmp_path / "stranger", "guess")
    with pytest.raises(NotReceived, match="is no rank of the trainer"):
        Receiver(stranger, 1, False, HOST, STAGE_S).receive(published(4, sender.address()), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_host_that_is_silent_costs_a_stage(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(NotReceived, match="ReadTimeout"):
            Receiver(run_with(tmp_path, "secret"), 1, False, HOST, 1.0).receive(published(4, url), tmp_path)
        assert time.monotonic() - began < 10
