"""Sandboxes on this machine, for commands: a server of their own on 127.0.0.1, asked as the servers of a run are."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcrl.config.sections.slurm import SandboxesConfig
from hpcrl.envs.tools.http import Fixed
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.errors import ServiceError
from hpcrl.runtime.http_server import Bearer, bind
from hpcrl.runtime.scratch import Scratch
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.node import NodeSandboxes
from hpcrl.sandboxes.probe import expect_sandboxes
from hpcrl.sandboxes.sandbox import SandboxLimits, limits_of
from hpcrl.sandboxes.server import serve_sandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore

_ADDRESS = "127.0.0.1"
_LEASE_S = 600.0
COLLECT_S = 600.0
"""Between two removals of snapshots that no sandbox uses."""


@contextmanager
def local_sandboxes(
    root: Path, most: int, *, network: bool | Sequence[str] = False, limits: SandboxLimits | None = None
) -> Iterator[Sandboxes]:
    """Serve sandboxes of the images of a root of runs, from the first one that is asked for; all end with the block, and their snapshots with
    them. Threads that still wait for one get a ServiceError then.

    Args:
        most: sandboxes at a time.
        network: whether each image may have the network of this machine, or the names of those that may.
        limits: of each sandbox.
    """
    lock, servers, over = threading.Lock(), list[Fixed](), threading.Event()
    with ExitStack() as stack:

        def serving() -> list[Fixed]:
            with lock:
                if over.is_set():
                    raise ServiceError("the sandboxes of this command have ended")
                if not servers:
                    servers.append(stack.enter_context(_serving(root, most, network, limits)))
            return servers

        try:
            yield Sandboxes(serving)
        finally:
            with lock:
                over.set()


@contextmanager
def configured_sandboxes(asked: SandboxesConfig, root: str | Path | None) -> Iterator[Sandboxes | None]:
    """Serve the sandboxes of a configuration on this machine, as many as one of its nodes has; yields None where it asks for none.

    Args:
        root: of runs, whose images they have.

    Raises:
        SandboxError: this machine, or this user, has no sandboxes.
    """
    if root is None or not (most := asked.most_of_a_node):
        yield None
        return
    expect_sandboxes()
    with local_sandboxes(Path(root), most, network=asked.network, limits=limits_of(asked)) as sandboxes:
        yield sandboxes


@contextmanager
def _serving(root: Path, most: int, network: bool | Sequence[str], limits: SandboxLimits | None) -> Iterator[Fixed]:
    fuse_overlayfs = expect_sandboxes()
    images, token = ImageStore(root), secrets.token_urlsafe(32)
    named = [image.name for image in images.list()] if network is True else network or []
    scratch, listener = Scratch("snapshots"), bind(_ADDRESS)
    snapshots = SnapshotStore(scratch.path / "kept")
    node = NodeSandboxes(images, snapshots, most, _LEASE_S, limits, named, fuse_overlayfs)
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    serve = serve_sandboxes(node, Bearer(token), listener, _collected(snapshots, over))
    thread = threading.Thread(target=loop.run_until_complete, args=(serve,), name="sandboxes")
    thread.start()
    try:
        yield Fixed(f"http://{_ADDRESS}:{listener.getsockname()[1]}", token)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
        scratch.remove()


async def _collected(snapshots: SnapshotStore, over: asyncio.Event) -> None:
    """Wait for the end, and remove old snapshots meanwhile: an evaluation makes one in each turn."""
    end = asyncio.create_task(over.wait())
    while not (await asyncio.wait([end], timeout=COLLECT_S))[0]:
        try:
            await asyncio.to_thread(snapshots.collect, tuple)
        except OSError as error:
            print(f"snapshots that no sandbox uses stay for now: {error}", file=sys.stderr, flush=True)
