"""An image for the tests of sandboxes, and a place that an ordinary user may write to."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.runtime.http_server import Bearer, bind
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.local import local_sandboxes
from hpcrl.sandboxes.node import NodeSandboxes
from hpcrl.sandboxes.sandbox import Sandbox, SandboxLimits
from hpcrl.sandboxes.server import serve_sandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore
from tests.sandboxes.material import PATIENCE_S, TOKEN, Client, make_rootfs, ordinary


@pytest.fixture(scope="module")
def user() -> Iterator[Path]:
    """Be an ordinary user meanwhile; yields a directory of that user's."""
    with pytest.MonkeyPatch.context() as patch, ordinary(patch):
        path = Path(tempfile.mkdtemp(prefix="hpcrl-test-sandbox-", dir="/tmp"))
        yield path
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def image(user: Path) -> Path:
    return make_rootfs(user / "image")


@pytest.fixture
def scratch(user: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=user))
    yield path
    assert not list(path.iterdir()), "something of a sandbox was left"
    path.rmdir()


@pytest.fixture
def fuse_overlayfs() -> str:
    """Path of the program that serves the files of sandboxes; empty: the kernel does."""
    return ""


@pytest.fixture
def start(image: Path, scratch: Path, fuse_overlayfs: str) -> Iterator[Callable[..., Sandbox]]:
    """Starts sandboxes, which end with the test."""
    started = list[Sandbox]()

    def one(*arguments: Any, **named: Any) -> Sandbox:
        started.append(Sandbox(image, scratch, *arguments, **{"fuse_overlayfs": fuse_overlayfs, **named}))
        return started[-1]

    yield one
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def store(image: Path, user: Path) -> ImageStore:
    store = ImageStore(user / "runs")
    store.add("tiny", image, temporary=user)
    return store


@pytest.fixture(scope="module")
def sandboxes(user: Path) -> Iterator[Sandboxes]:
    """Sandboxes of `user / "root"`, whose image "python" has the files of `user / "rootfs"`."""
    root, temporary = user / "root", user / "temporary"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        ImageStore(root).add("python", make_rootfs(user / "rootfs", ["bash"]))
        with local_sandboxes(root, 3) as served:
            yield served
        assert not list(temporary.iterdir()), "it has left something"


@pytest.fixture
def serving(store: ImageStore, user: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    temporary = user / "temporary"
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    @contextmanager
    def one(most: int = 2, lease_s: float = 600.0, **limits: int) -> Iterator[Client]:
        node = NodeSandboxes(store, SnapshotStore(user / "snapshots"), most, lease_s, SandboxLimits(**limits))
        listener, stop, errors = bind("127.0.0.1"), threading.Event(), list[BaseException]()

        async def until() -> None:
            while not stop.is_set():
                await asyncio.sleep(0.02)

        def serve() -> None:
            try:
                asyncio.run(serve_sandboxes(node, Bearer(TOKEN), listener, until()))
            except BaseException as error:  # noqa: BLE001  the test looks at it
                errors.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Client("http://{}:{}".format(*listener.getsockname()[:2]), TOKEN)
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        assert errors == []
        assert not list(temporary.iterdir()), "it has left something"

    return one
