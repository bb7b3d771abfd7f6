"""Sends files from one process to another through a torch process group, which the two create and keep for later versions.

Both know the files and their sizes (over HTTP, signed). The sender sends their bytes end to end, in parts of at most PART bytes, and gets one
byte back. Both exchange their store's entries over HTTP too, so that only gloo, or NCCL, listens, at an address that no other process knows.
Each stage (rendezvous, a part, the last byte) has `stage_s` seconds. A process that dies, stops or is lost with its node costs the other one at
most that time, and twice that where a kept group is broken.

    receiver                            sender
    Pair(rank RECEIVER).own_rendezvous()
                 -- version, that -->
                                        Pair(rank SENDER).add_rendezvous(that), send_files() in a thread, own_rendezvous()
                <-- sizes, that --
    add_rendezvous(that), receive_files()
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hpcrl.data.weight_files import bytes_of, layout, write_at
from hpcrl.faults import fault

SENDER, RECEIVER = 0, 1
PART = 64 << 20
Files = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by the name of their file; a file has them in the order of `layout`."""

_POLL_S = 0.0005
_UNIQUE_ID = 128  # bytes, NCCL_UNIQUE_ID_BYTES of nccl.h
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
c10d = cast(Any, dist)  # what torch makes process groups of has no declared types


def sender(rank: int) -> str:
    """Return the name of a rank of the trainer as one that sends weights, as whom it is asked."""
    return f"weights-{rank}"


def sizes_of(files: Files) -> dict[str, int]:
    """Return the bytes of each file."""
    return {
        name: len(layout(tensors)[0]) + sum(tensor.nbytes for tensor in tensors.values())
        for name, tensors in files.items()
    }


class Pair:
    """A sender or a receiver, and the other one as soon as they have met.

    Args:
        device: a GPU, through whose memory the parts go with NCCL, and which is not the other one's; or the CPU, with gloo.
        host: address of this node, at which gloo listens.
    """

    def __init__(self, device: torch.device, rank: int, host: str, stage_s: float) -> None:
        self._device, self._rank, self._stage_s, self._stage = device, rank, stage_s, timedelta(seconds=stage_s)
        self._store, self._received = c10d.HashStore(), set[str]()
        self._store.set_timeout(self._stage)
        self._group: Future[Any] = Future()
        threading.Thread(target=self._meet, args=(host,), name="weights", daemon=True).start()
        self._part: torch.Tensor | None = None
        # not behind what the process has given the GPU to do
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)

    def _meet(self, host: str) -> None:
        try:
            on_cpu = self._device.type == "cpu"
            self._group.set_result(
                _gloo(self._store, self._rank, host, self._stage) if on_cpu else _nccl(self._store, self._rank)
            )
        except RuntimeError as error:
            self._group.set_exception(error)

    def own_rendezvous(self) -> dict[str, str]:
        """Return the entries by which the other process finds this one.

        Raises:
            RuntimeError: torch wrote no entries within the time of a stage.
        """
        if self._device.type == "cuda" and self._rank == RECEIVER:
            return {}  # with NCCL only the first rank has entries, when it begins to send
        deadline = time.monotonic() + self._stage_s
        while not (own := rendezvous_entries(self._store, self._received, of_nccl=self._device.type == "cuda")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"torch gave no address of this process within {self._stage_s:g} s")
            time.sleep(_POLL_S)
        return {key: base64.b64encode(value).decode() for key, value in own.items()}

    def add_rendezvous(self, entries: Mapping[str, str]) -> None:
        """Store the entries of the other process; ValueError where they are malformed."""
        for key, value in entries.items():
            self._received.add(key)
            self._store.set(key, base64.b64decode(value, validate=True))

    def _joined(self) -> Any:
        try:
            return self._group.result(self._stage_s)
        except TimeoutError:
            raise RuntimeError(f"the other process was not there within {self._stage_s:g} s") from None

    def send(self, data: torch.Tensor) -> None:
        """Send a part, [at most PART] uint8 on the CPU."""
        with torch.cuda.stream(self._stream):
            part = data if self._device.type == "cpu" else self._buffer()[: len(data)].copy_(data)
            self._finish(self._joined().send([part], 1 - self._rank, 0))

    def receive(self, length: int) -> torch.Tensor:
        """Return a part of so many bytes, on the CPU, until the next one; errors as of `send`."""
        with torch.cuda.stream(self._stream):
            part = self._buffer()[:length]
            self._finish(self._joined().recv([part], 1 - self._rank, 0))
            return part.cpu()

    def _buffer(self) -> torch.Tensor:
        if self._part is None:
            self._part = torch.empty(PART, dtype=torch.uint8, device=self._device)
        return self._part

    def rest(self) -> None:
        """Keep no memory for parts until the next transfer."""
        self._part = None

    def _finish(self, work: Any) -> None:
        if self._device.type == "cpu":
            work.wait(self._stage)
            return
        deadline = time.monotonic() + self._stage_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a part took longer than {self._stage_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leave; what is on its way is given up."""
        if self._group.done() and self._group.exception() is None:
            with suppress(RuntimeError):  # gloo has no such thing; it closes with its last reference
                self._group.result().abort()


def rendezvous_entries(store: Any, received: Collection[str], *, of_nccl: bool) -> dict[str, bytes]:
    """Return the entries that a process group has written for the other process; empty while its address is missing.

    Args:
        received: keys that the other process has written.
        of_nccl: wait for NCCL's unique id, which torch writes after other entries; with gloo the address is the only entry.
    """
    own = {key: store.get(key) for key in store.list_keys() if key not in received}
    return {} if of_nccl and all(len(value) != _UNIQUE_ID for value in own.values()) else own


def _gloo(store: Any, rank: int, host: str, stage: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = stage
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    return c10d.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Any, rank: int) -> Any:
    """Return a group that lets a failure be: torch's own way is to end the process, and the sender is a trainer."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # after which its watchdog would end the process; a part has a time of its own
    before = os.environ.get(_ERRORS)
    os.environ[_ERRORS] = "0"  # read when the group is made
    try:
        group = c10d.ProcessGroupNCCL(store, rank, 2, options)
    finally:
        os.environ.pop(_ERRORS)
        if before is not None:
            os.environ[_ERRORS] = before
    return group


def send_files(pair: Pair, files: Files) -> None:
    """Send files, and return when the other one has them all; errors as of `Pair.send`."""
    for tensors in files.values():
        for part in _parts(tensors):
            fault("weights.send")
            pair.send(part)
    pair.receive(1)


def receive_files(pair: Pair, sizes: Mapping[str, int], directory: Path) -> None:
    """Write the files that the other one sends.

    Args:
        sizes: of each file, in the order in which they come.
    """
    for name, size in sizes.items():
        with (directory / name).open("wb") as file:
            at = 0
            while at < size:
                part = pair.receive(min(PART, size - at))
                fault("weights.receive")
                write_at(file.fileno(), bytes_of(part), at)
                at += len(part)
    pair.send(torch.zeros(1, dtype=torch.uint8))


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a file with these tensors, [at most PART] uint8 each, all but the last one full; each is there until the next one."""
    head, places = layout(tensors)
    size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    buffer, filled = torch.empty(min(PART, size), dtype=torch.uint8), 0
    pieces = [memoryview(bytearray(head)), *(bytes_of(tensors[name]) for name in places)]
    for piece in pieces:
        data = torch.frombuffer(piece, dtype=torch.uint8) if len(piece) else torch.empty(0, dtype=torch.uint8)
        while len(data):
            count = min(len(buffer) - filled, len(data))
            buffer[filled : filled + count] = data[:count]
            filled, data = filled + count, data[count:]
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
