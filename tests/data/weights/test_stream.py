"""Files cross between two processes, and whoever dies or stops costs the other one a stage at most."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.data.weights import stream
from hpcrl.data.weights.stream import RECEIVER, SENDER, Pair, receive_files, send_files, sizes_of

HOST, CPU, STAGE_S = "127.0.0.1", torch.device("cpu"), 1.5
SMALL = 1000
LATE_S = 20.0  # far more than a stage, on a busy machine, and far less than to wait for ever
SERVER = multiprocessing.get_context(
    "forkserver"
)  # a fork of this process would have its threads' locks, and gloo's, without the threads
SERVER.set_forkserver_preload(["hpcrl.data.weights.stream", __name__])


def files() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a.safetensors": {
            "x": torch.randn(300, 40, generator=generator).to(torch.bfloat16), "y": torch.randn(7, generator=generator),
            "empty": torch.empty(0), "scalar": torch.tensor(3.0), "part": torch.randn(10, 10, generator=generator)[:, ::2],
        },
        "b.safetensors": {"z": torch.arange(5000)},
    }  # fmt: skip


def _receive(pipe: Connection, directory: Path, fault: str) -> None:
    os.environ["HPCRL_FAULT"], stream.PART = fault, SMALL
    pair = Pair(CPU, RECEIVER, HOST, STAGE_S)
    try:
        pipe.send(pair.own_rendezvous())
        told = pipe.recv()
        pair.add_rendezvous(told)
        receive_files(pair, sizes_of(files()), directory)
    except RuntimeError as error:
        pipe.send(f"error: {error}")
    else:
        pipe.send("received")
    finally:
        pair.close()


class Receiver:
    """A process that receives."""

    def __init__(self, directory: Path, fault: str = "") -> None:
        self._mine, its = SERVER.Pipe()
        self.process = SERVER.Process(target=_receive, args=(its, directory, fault), daemon=True)
        self.process.start()
        self.told: dict[str, str] = self._heard()

    def add_rendezvous(self, told: dict[str, str]) -> None:
        self._mine.send(told)

    def _heard(self) -> Any:
        return self._mine.recv() if self._mine.poll(LATE_S) else "nothing"

    def said(self) -> str:
        return self._heard()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small parts, and fault points that nobody has passed."""
    monkeypatch.setattr(stream, "PART", SMALL)
    monkeypatch.setattr("hpcrl.faults._passed", Counter())
    yield
    monkeypatch.undo()


def sent(pair: Pair) -> float:
    """Send, and return the seconds until that failed."""
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        send_files(pair, files())
    pair.close()
    return time.monotonic() - began


@pytest.mark.usefixtures("parts")
def test_files_arrive_as_they_would_have_been_written(tmp_path: Path) -> None:
    receiver, pair = Receiver(tmp_path), Pair(CPU, SENDER, HOST, LATE_S)
    receiver.add_rendezvous(pair.own_rendezvous())
    pair.add_rendezvous(receiver.told)
    send_files(pair, files())
    pair.close()
    assert receiver.said() == "received"
    receiver.end()
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == sizes_of(files())
    for name, tensors in files().items():
        found = load_file(tmp_path / name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[each], tensor) for each, tensor in tensors.items())


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    "fault", ["", "weights.receive@2:kill", "weights.receive@3:stop"], ids=["killed first", "killed", "stopped"]
)
def test_a_receiver_costs_its_sender_a_stage_at_most(tmp_path: Path, fault: str) -> None:
    receiver, pair = Receiver(tmp_path, fault), Pair(CPU, SENDER, HOST, STAGE_S)
    if fault:
        receiver.add_rendezvous(pair.own_rendezvous())
    else:
        receiver.end()
    pair.add_rendezvous(receiver.told)
    assert sent(pair) < LATE_S
    receiver.end()


def test_who_is_not_told_of_another_waits_a_stage_at_most() -> None:
    assert sent(Pair(CPU, SENDER, HOST, STAGE_S)) < LATE_S


BUSY = """
import sys, threading, torch
from hpcrl.data.weights.stream import RECEIVER, SENDER, Pair
from hpcrl.runtime.signals import end_process
pairs = [Pair(torch.device("cpu"), rank, "127.0.0.1", 60.0) for rank in (SENDER, RECEIVER)]
told = [pair.own_rendezvous() for pair in pairs]
pairs[0].add_rendezvous(told[1])
pairs[1].add_rendezvous(told[0])
first = threading.Event()
def send():
    while True:
        pairs[0].send(torch.zeros(1 << 20, dtype=torch.uint8))
def receive():
    while True:
        pairs[1].receive(1 << 20)
        first.set()
for one in (send, receive):
    threading.Thread(target=one, daemon=True).start()
first.wait()
print("busy")
end_process(3)
"""


def test_a_process_that_sends_and_receives_ends_as_it_is_told_to() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "busy\n"), done.stderr


def _send(pipe: Connection, when: str, how: signal.Signals) -> None:
    stream.PART = SMALL
    pair = Pair(CPU, SENDER, HOST, 60.0)
    pipe.send(pair.own_rendezvous())
    told = pipe.recv()
    if when == "before":
        os.kill(os.getpid(), how)
    pair.add_rendezvous(told)
    if when == "sending":
        pair.send(next(stream._parts(files()["a.safetensors"])))
    else:
        pair._joined()
    os.kill(os.getpid(), how)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("when", ["before", "met", "sending"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_costs_its_receiver_a_stage_at_most(tmp_path: Path, when: str, how: signal.Signals) -> None:
    mine, its = SERVER.Pipe()
    sender = SERVER.Process(target=_send, args=(its, when, how), daemon=True)
    sender.start()
    told, receiver = mine.recv(), Receiver(tmp_path)
    mine.send(receiver.told)
    began = time.monotonic()
    receiver.add_rendezvous(told)
    assert receiver.said().startswith("error: ")
    assert time.monotonic() - began < LATE_S
    receiver.end()
    sender.kill()
    sender.join()
