"""The sandboxes of a node: a bounded number, each with a key and a lease, over images that are unpacked once."""

from __future__ import annotations

import errno
import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TypeVar

from hpcrl.envs.tools.python import discard_tree
from hpcrl.errors import DataError, SandboxError
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.runtime.scratch import Scratch
from hpcrl.sandboxes.images import Image, ImageStore
from hpcrl.sandboxes.inside import LONGEST_STILL_S
from hpcrl.sandboxes.sandbox import Sandbox, SandboxLimits
from hpcrl.sandboxes.snapshots import SnapshotStore

R = TypeVar("R")

MOST_REQUESTS = 4
"""Of a sandbox at a time."""

_ENDING = 32
_NO_ROOM = errno.ENOSPC, errno.EDQUOT
_ENDS = "the server of this node ends; ask another node"


class NodeFull(SandboxError):
    """A node has as many sandboxes as it may."""


class UnknownKey(SandboxError):
    """No sandbox of a node has a key, or not any more."""


class Busy(SandboxError):
    """A sandbox has as many requests at a time as it may."""


@dataclass(frozen=True)
class Client:
    """The process that starts a sandbox.

    Attributes:
        name: which it keeps after a restart; empty: it is started once.
        started: its start, in seconds since the epoch.
    """

    name: str = ""
    started: float = 0.0

    def replaces(self, other: Client) -> bool:
        return bool(self.name) and self.name == other.name and self.started > other.started


@dataclass
class Leased:
    """A sandbox whose client has to be heard of before `until`, by the clock of the node; one in use has no end.

    Attributes:
        image: digest of its image.
        begun_with, made: the snapshot with which it has begun, and the last one that was made of it; empty: none.
    """

    sandbox: Sandbox
    image: str
    client: Client
    until: float
    begun_with: str = ""
    users: int = 0
    made: str = ""


class NodeSandboxes:
    """Starts and ends the sandboxes of a node; called from threads. `close` it.

    Args:
        most: sandboxes at a time.
        lease_s: a sandbox ends where nothing was asked of it for this time.
        network: names of the images whose sandboxes may have the node's network.
        fuse_overlayfs: as of `expect_sandboxes`.
    """

    def __init__(
        self,
        images: ImageStore,
        snapshots: SnapshotStore,
        most: int,
        lease_s: float,
        limits: SandboxLimits | None = None,
        network: Collection[str] = (),
        fuse_overlayfs: str = "",
    ) -> None:
        self.most, self.lease_s, self._limits, self._network = most, lease_s, limits or SandboxLimits(), network
        self._fuse_overlayfs = fuse_overlayfs
        self._images, self._snapshots, self._scratch = images, snapshots, Scratch("sandboxes")
        self._held, self._closed = dict[bytes, Leased](), False
        self._starting = dict[bytes, str]()  # the images of those that start; empty: not known yet
        # clients were not heard while this process stood still
        self._lock, self._clock = threading.Condition(), SuspendAwareClock(LONGEST_STILL_S)

    @property
    def running(self) -> int:
        return len(self._held) + len(self._starting)

    def start(
        self, name: str, *, network: bool = False, snapshot: str | None = None, client: Client | None = None
    ) -> str:
        """Start a sandbox of an image, with the changes of a snapshot, and return its key.

        Those of an earlier process of the same client end first: nothing will end them before their leases do.

        Raises:
            NodeFull: there are as many as there may be, or this node ends.
            DataError: there is no such image or snapshot, or the image may not have the network.
            SandboxError: it cannot start on this node.
        """
        if network and name not in self._network:
            allowed = ", ".join(sorted(self._network)) or "none"
            raise DataError(f"sandboxes of image {name!r} have no network; those that may: {allowed}")
        client = client or Client()
        self._end_where(lambda one: client.replaces(one.client))
        digest = _digest(key := secrets.token_urlsafe(32))
        with self._lock:
            if self._closed or self.running >= self.most:
                raise NodeFull(
                    f"this node has {self.running} sandboxes of at most {self.most}; ask another node, or again when one has ended"
                )
            self._starting[digest] = ""
        try:
            image = self._images.find(name)
            with self._lock:
                self._starting[digest] = image.digest
            sandbox = self._with_room(lambda: self._start(image, network, snapshot))
            with self._lock:
                if not self._closed:
                    self._held[digest] = Leased(sandbox, image.digest, client, self._lease_end(), snapshot or "")
                    return key
            sandbox.end()
            raise NodeFull(_ENDS)
        finally:
            with self._lock:
                del self._starting[digest]
                self._lock.notify_all()

    def _expect_open(self) -> None:
        if self._closed:
            raise NodeFull(_ENDS)

    def _start(self, image: Image, network: bool, snapshot: str | None) -> Sandbox:
        scratch = self._scratch.path
        tree = self._images.unpack(image, scratch, self._expect_open)

        def start(changes: IO[bytes] | None) -> Sandbox:
            return Sandbox(
                tree,
                scratch,
                self._limits,
                network=network,
                environment=image.environment,
                directory=image.directory,
                snapshot=changes,
                fuse_overlayfs=self._fuse_overlayfs,
            )

        if snapshot is None:
            return start(None)
        with self._snapshots.opened(snapshot) as changes:
            return start(changes)

    def _with_room(self, act: Callable[[], R]) -> R:
        """Return what `act` returns. Where the disk has no room for it, images that no sandbox uses are removed, and it is called again."""
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                with self._lock:  # a start that begins later unpacks its image again
                    used = {*self._starting.values(), *(one.image for one in self._held.values())}
                    unused = self._images.set_aside(self._scratch.path, used)
                if not unused:
                    raise
                discard_tree(*unused)

    @contextmanager
    def use(self, key: str) -> Iterator[Leased]:
        """Hold a sandbox as long as the block lasts; its lease begins again at the end.

        Raises:
            UnknownKey: no sandbox has the key.
            Busy: it has too many requests at a time.
        """
        with self._lock:
            held = self._of(key)
            if held.users >= MOST_REQUESTS:
                raise Busy(
                    f"this sandbox has {MOST_REQUESTS} requests at a time, its most; ask again when one has ended"
                )
            held.users += 1
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                held.until = self._lease_end()

    def keep(self, key: str, only: Sequence[str] = ()) -> str:
        """Keep a snapshot of a sandbox, with `only` of what is at and below these absolute paths; return its name."""
        with self.use(key) as held:
            held.made = self._with_room(lambda: self._snapshots.put(held.sandbox, only))
            return held.made

    def hold_snapshots(self) -> None:
        """Let the snapshots of sandboxes that are here not become old: one that is lost later may be started again with them."""
        with self._lock:
            names = {name for one in self._held.values() for name in (one.begun_with, one.made) if name}
        for name in names:
            self._snapshots.hold(name)

    def end(self, key: str) -> None:
        """End a sandbox. Raises UnknownKey where no sandbox has the key."""
        with self._lock:
            held = self._of(key)
            del self._held[_digest(key)]
        held.sandbox.end()

    def expect(self, key: str) -> None:
        """Raise UnknownKey where no sandbox has the key."""
        with self._lock:
            self._of(key)

    def _of(self, key: str) -> Leased:
        if (held := self._held.get(_digest(key))) is None:
            raise UnknownKey("no sandbox of this node has this key, or not any more")
        return held

    def end_expired(self) -> int:
        """End the sandboxes whose clients are gone; return how many. It is called every second."""
        with self._lock:
            now = self._clock.now()
        return self._end_where(lambda one: not one.users and one.until < now)

    def _lease_end(self) -> float:
        return self._clock.now() + self.lease_s

    def _end_where(self, gone: Callable[[Leased], bool]) -> int:
        with self._lock:
            digests = [digest for digest, one in self._held.items() if gone(one)]
            ended = [self._held.pop(digest) for digest in digests]
        _end(ended)
        return len(ended)

    def close(self) -> None:
        """End all sandboxes, those that are starting included, and remove what the node has of them; no other starts."""
        with self._lock:
            self._closed, ended = True, list(self._held.values())
            self._held.clear()
        _end(ended)
        with self._lock:  # what a start writes while its directory is removed would stay
            self._lock.wait_for(lambda: not self._starting)
        self._scratch.remove()


def _end(held: Collection[Leased]) -> None:
    """End sandboxes beside each other: one that stands still takes seconds, and somebody waits for a place, or for the end of the job."""
    with ThreadPoolExecutor(_ENDING) as threads:
        list(threads.map(lambda one: one.sandbox.end(), held))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
