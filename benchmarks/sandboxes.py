"""How many sandboxes a node starts in which time, how long a program in one takes beside the others, and what their server answers when it is full.

    python benchmarks/sandboxes.py ROOTFS [--sandboxes 200] [--threads 8] [--calls 5] [--fuse-overlayfs /usr/bin/fuse-overlayfs]

ROOTFS is a directory with the files of a Linux that has /bin/sh, such as of `debootstrap --variant=minbase`; call it as an ordinary user. Prints one line of
JSON, and with --fuse-overlayfs a second one for sandboxes whose files that program serves; times are in milliseconds, at the client.
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
from functools import partial
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
_FILES = {
    "write_2000": "mkdir /many && cd /many && i=0 && while [ $i -lt 2000 ]; do echo $i > $i && i=$((i+1)); done",
    "list_image": "ls -lR /usr /many > /dev/null",
    "list_image_again": "ls -lR /usr /many > /dev/null",
    "read_2000": "cat /many/* > /dev/null",
    "remove_2000": "rm -r /many",
}
"""What installing a package, and looking at a repository, does to many small files."""


def main(rootfs: Path, number: int, threads: int, calls: int, fuse_overlayfs: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        images = ImageStore(Path(folder))
        images.add("rootfs", rootfs, temporary=Path(folder))
        limits = SandboxLimits(memory=256 << 20, disk=64 << 20)
        snapshots = SnapshotStore(Path(folder) / "snapshots")
        node = NodeSandboxes(images, snapshots, number, 600.0, limits, fuse_overlayfs=fuse_overlayfs)
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
        assert shell(one, "echo on") == b"on\n"

    def shell(one: SandboxClient, text: str) -> bytes:
        ran = one.run(["sh", "-c", text], 300.0)
        assert ran.code == 0, ran
        return ran.stdout

    first, taken = timed(lambda: sandboxes.start("rootfs"))  # which unpacks the image
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        started = list(pool.map(lambda _: timed(lambda: sandboxes.start("rootfs", wait_s=600.0)), range(number - 1)))
        seconds, running = time.perf_counter() - begun, [first, *(one for one, _ in started)]
        alone = [timed(lambda: echo(first))[1] for _ in range(calls)]
        files = {name: round(timed(partial(shell, first, text))[1]) for name, text in _FILES.items()}
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
        "files": files,
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
    parser.add_argument("--fuse-overlayfs", default="")
    asked = parser.parse_args()
    for program in dict.fromkeys(("", asked.fuse_overlayfs)):
        print(json.dumps(main(asked.rootfs, asked.sandboxes, asked.threads, asked.calls, program)), flush=True)
