"""How many sandboxes a node starts in which time, how long a program in one takes beside the others, and what their server answers when it is full.

    python benchmarks/sandboxes.py ROOTFS [--sandboxes 200] [--threads 8] [--calls 5]

ROOTFS is a directory with the files of a Linux that has /bin/sh, such as of `debootstrap --variant=minbase`; call it as an ordinary user. Prints one line of
JSON; times are in milliseconds, at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpcrl.envs.tools.http import Fixed
from hpcrl.envs.tools.sandboxes import SandboxClient, Sandboxes
from hpcrl.errors import ServiceError
from hpcrl.runtime.http_server import Bearer, bind
from hpcrl.runtime.memory import resident_with_children
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.node import NodeSandboxes
from hpcrl.sandboxes.sandbox import SandboxLimits
from hpcrl.sandboxes.server import serve_sandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore

_TOKEN = "benchmark"


def main(rootfs: Path, number: int, threads: int, calls: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        images = ImageStore(Path(folder))
        images.add("rootfs", rootfs, temporary=Path(folder))
        limits = SandboxLimits(memory=256 << 20, disk=64 << 20)
        node = NodeSandboxes(images, SnapshotStore(Path(folder) / "snapshots"), number, 600.0, limits)
        listener, stop = bind("127.0.0.1"), threading.Event()

        async def until() -> None:
            while not stop.is_set():
                await asyncio.sleep(0.1)

        server = threading.Thread(target=lambda: asyncio.run(serve_sandboxes(node, Bearer(_TOKEN), listener, until())))
        server.start()
        peer = Fixed("http://{}:{}".format(*listener.getsockname()[:2]), _TOKEN)
        try:
            return measure(Sandboxes(lambda: [peer]), number, threads, calls)
        finally:
            stop.set()
            server.join()


def measure(sandboxes: Sandboxes, number: int, threads: int, calls: int) -> dict[str, Any]:
    def echo(one: SandboxClient) -> None:
        assert one.run(["sh", "-c", "echo on"], 300.0).stdout == b"on\n"

    first, taken = timed(lambda: sandboxes.start("rootfs"))  # which unpacks the image
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        started = list(pool.map(lambda _: timed(lambda: sandboxes.start("rootfs", wait_s=600.0)), range(number - 1)))
        seconds, running = time.perf_counter() - begun, [first, *(one for one, _ in started)]
        alone = [timed(lambda: echo(first))[1] for _ in range(calls)]
        together = [t for _, t in pool.map(lambda one: timed(lambda: echo(one)), running * calls)]
        try:
            sandboxes.start("rootfs", wait_s=0.0)
            full = "it starts another one"
        except ServiceError as error:
            full = str(error).rpartition("answered ")[2]
        memory = resident_with_children()
        ends = [t for _, t in pool.map(lambda one: timed(one.end), running)]
    return {
        "first_start": round(taken),
        "starts": percentiles([t for _, t in started]),
        "starts_per_s": round((number - 1) / seconds, 1),
        "exec_alone": percentiles(alone),
        "exec_together": percentiles(together),
        "end": percentiles(ends),
        "resident_gib": round(memory / 2**30, 2),
        "full": full,
    }


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return act(), 1e3 * (time.perf_counter() - begun)


def percentiles(values: list[float]) -> dict[str, int]:
    ordered = sorted(values)
    return {f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)]) for share in (50, 99)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rootfs", type=Path)
    for name, default in (("sandboxes", 200), ("threads", 8), ("calls", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(json.dumps(main(asked.rootfs, asked.sandboxes, asked.threads, asked.calls)))
