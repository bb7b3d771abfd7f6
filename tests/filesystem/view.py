"""One node's view of a directory that other nodes see through views of their own: a filesystem (FUSE) over a local directory.

Files that were there, their sizes and listings are remembered by the kernel, as of any network filesystem; names that were not there are
remembered here, because the kernel forgets them otherwise than NFS does. A view also fails, is slow and forbids as its `Behaviour` says.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from tests.filesystem import wire
from tests.filesystem.wire import Op

ROOT = 1
Errors = Mapping[str, tuple[str, float]]


FORBIDDEN: Errors = {
    "LINK": ("EPERM", 1.0), "FSYNCDIR": ("EINVAL", 1.0), "CHMOD": ("EPERM", 1.0), "CHOWN": ("EPERM", 1.0),
    "LOCK": ("ENOLCK", 1.0), "O_DIRECT": ("EINVAL", 1.0),
}  # fmt: skip
"""What some network filesystem or other refuses."""


@dataclass(frozen=True)
class Behaviour:
    """How a view differs from the local directory.

    Attributes:
        names_s: how long a name that was looked up is taken to be the same file, although another node has replaced or removed it.
        absent_s: how long a name that was not there is taken not to be there, although another node has made it.
        attributes_s: how long size and times are taken to be the same.
        close_to_open: whether opening a file forgets its size, and opening a directory the names that were not in it, as with NFS.
        late_listings: whether listings are as old as attributes may be; else a listing shows what is there, as with NFS.
        stale: whether a file that another node has replaced or removed gives ESTALE, and one that this node removes while it has it
            open leaves a `.nfs…` until it is closed.
        types: whether listings tell the types of files.
        metadata_delay_s, data_delay_s: of each operation.
        errors: by operation, an errno and how often, 0 to 1. Operations are those of `Op`, and CHMOD, CHOWN, LOCK, O_DIRECT. WRITEBACK
            is a write that succeeds and is lost: closing or syncing the file tells it, once.
        short: how often a write writes only half of its bytes.
        seed: of what happens at random.
    """

    names_s: float = 0.0
    absent_s: float = 0.0
    attributes_s: float = 0.0
    close_to_open: bool = True
    late_listings: bool = False
    stale: bool = True
    types: bool = True
    metadata_delay_s: float = 0.0
    data_delay_s: float = 0.0
    errors: Errors = field(default_factory=dict)
    short: float = 0.0
    seed: int = 0


@dataclass
class Node:
    """A file that the kernel knows: a descriptor that keeps it, how often the kernel was told of it, by how many handles it is open."""

    descriptor: int
    key: tuple[int, int]
    known: int = 0
    handles: int = 0
    hidden: tuple[int, str] | None = (
        None  # removed while it was open: a descriptor of its directory, and its name there
    )


class View:
    """The operations; each raises OSError where the kernel is to be told an error.

    Args:
        source: descriptor of the local directory.
        notify: tells the kernel something without being asked.
    """

    def __init__(self, source: int, behaviour: Behaviour, notify: Callable[[int, bytes], None]) -> None:
        self._as, self._notify = behaviour, notify
        self._random = random.Random(behaviour.seed)
        self._lock = threading.Lock()
        self._nodes = {ROOT: Node(source, _key(source), known=1)}
        self._by_key = {self._nodes[ROOT].key: ROOT}
        self._last = ROOT
        self._open: dict[int, Node] = {}
        self._listed: dict[int, list[bytes]] = {}
        self._absent: dict[int, dict[str, float]] = defaultdict(dict)  # until when, by directory
        self._lost: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._operations: dict[Op, Callable[[int, memoryview], bytes]] = {
            Op.LOOKUP: self._lookup, Op.GETATTR: self._getattr, Op.SETATTR: self._setattr, Op.READLINK: self._readlink,
            Op.SYMLINK: self._symlink, Op.MKNOD: self._mknod, Op.MKDIR: self._mkdir, Op.UNLINK: self._unlink, Op.RMDIR: self._rmdir,
            Op.RENAME: self._rename, Op.LINK: self._link, Op.OPEN: self._open_file, Op.READ: self._read, Op.WRITE: self._write,
            Op.STATFS: self._statfs, Op.RELEASE: self._release, Op.FSYNC: self._fsync, Op.FLUSH: self._flush, Op.OPENDIR: self._opendir,
            Op.READDIR: self._readdir, Op.RELEASEDIR: self._release, Op.FSYNCDIR: self._fsync, Op.CREATE: self._create,
            Op.SETLK: self._setlk, Op.SETLKW: self._setlk, Op.RENAME2: self._rename2,
        }  # fmt: skip

    @property
    def refuses_locks(self) -> bool:
        return "LOCK" in self._as.errors

    def answer(self, operation: int, node: int, body: memoryview) -> bytes:
        """Return what the kernel is told.

        Raises:
            OSError: it is told this error.
        """
        if operation not in self._operations:
            raise OSError(errno.ENOSYS, "not an operation of this filesystem")
        op = Op(operation)
        delay = self._as.data_delay_s if op in (Op.READ, Op.WRITE) else self._as.metadata_delay_s
        if delay:
            time.sleep(delay)
        self.counts["operations"] += 1
        self._maybe_fail(op.name)
        return self._operations[op](node, body)

    def forget(self, node: int, count: int) -> None:
        with self._lock:
            known = self._nodes[node]
            known.known -= count
            if known.known > 0 or node == ROOT:
                return
            del self._nodes[node], self._by_key[known.key]
            self._absent.pop(node, None)
        os.close(known.descriptor)

    def _happens(self, what: str) -> bool:
        happens = what in self._as.errors and self._random.random() < self._as.errors[what][1]
        if happens:
            self.counts[what] += 1
        return happens

    def _maybe_fail(self, what: str) -> None:
        if self._happens(what):
            raise self._error(what)

    def _error(self, what: str) -> OSError:
        return OSError(getattr(errno, self._as.errors[what][0]), what)

    # ---- nodes

    def _at(self, node: int) -> int:
        """Return the descriptor of a node, unless another view has removed it."""
        descriptor = self._nodes[node].descriptor
        if self._as.stale and os.fstat(descriptor).st_nlink == 0:
            self.counts["stale"] += 1
            raise OSError(errno.ESTALE, "removed or replaced by another node")
        return descriptor

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._at(node)}"

    def _known(self, parent: int, name: str) -> Node | None:
        """Return the node at a name, if the kernel knows it."""
        with_path = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
        try:
            return self._nodes.get(self._by_key.get(_key(with_path), 0))
        finally:
            os.close(with_path)

    def _made(self, node: int, name: str) -> bytes:
        """Return the entry of what this node has made."""
        self._absent[node].pop(name, None)
        return self._entry(self._at(node), name)

    def _entry(self, parent: int, name: str) -> bytes:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
        key = _key(descriptor)
        with self._lock:
            number = self._by_key.get(key)
            if number is None:
                self._last = number = self._last + 1
                self._nodes[number], self._by_key[key] = Node(descriptor, key), number
            else:
                os.close(descriptor)
            node = self._nodes[number]
            node.known += 1
        (names, names_ns), (seconds, ns) = wire.split(self._as.names_s), wire.split(self._as.attributes_s)
        return wire.ENTRY_OUT.pack(number, 0, names, seconds, names_ns, ns) + wire.attributes(os.fstat(node.descriptor))

    def _lookup(self, node: int, body: memoryview) -> bytes:
        (name,), parent, absent = wire.names(body), self._at(node), self._absent[node]
        if time.monotonic() < absent.get(name, 0.0):
            if _is_there(parent, name):
                self.counts["late"] += 1
            raise OSError(errno.ENOENT, "it was not there a moment ago")
        try:
            return self._entry(parent, name)
        except FileNotFoundError:
            absent[name] = time.monotonic() + self._as.absent_s
            raise

    # ---- attributes

    def _attributes(self, descriptor: int) -> bytes:
        seconds, ns = wire.split(self._as.attributes_s)
        return wire.ATTR_OUT.pack(seconds, ns, 0) + wire.attributes(os.fstat(descriptor))

    def _getattr(self, node: int, _body: memoryview) -> bytes:
        return self._attributes(self._at(node))

    def _setattr(self, node: int, body: memoryview) -> bytes:
        what, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = (
            wire.SETATTR.unpack_from(body)
        )
        path = self._path(node)
        if what & wire.SET_MODE:
            self._maybe_fail("CHMOD")
            os.chmod(path, stat.S_IMODE(mode))
        if what & (wire.SET_UID | wire.SET_GID):
            self._maybe_fail("CHOWN")
            os.chown(path, uid if what & wire.SET_UID else -1, gid if what & wire.SET_GID else -1)
        if what & wire.SET_SIZE:
            os.truncate(handle if what & wire.SET_HANDLE else path, size)
        if what & (wire.SET_ATIME | wire.SET_MTIME):
            before, now = os.stat(path), time.time_ns()
            told = {wire.SET_ATIME: atime * 10**9 + atime_ns, wire.SET_MTIME: mtime * 10**9 + mtime_ns}
            told |= {
                at: now
                for at, flag in ((wire.SET_ATIME, wire.SET_ATIME_NOW), (wire.SET_MTIME, wire.SET_MTIME_NOW))
                if what & flag
            }
            old = {wire.SET_ATIME: before.st_atime_ns, wire.SET_MTIME: before.st_mtime_ns}
            os.utime(path, ns=(*[(told if what & at else old)[at] for at in (wire.SET_ATIME, wire.SET_MTIME)],))
        return self._attributes(self._at(node))

    def _statfs(self, _node: int, _body: memoryview) -> bytes:
        of = os.fstatvfs(self._nodes[ROOT].descriptor)
        counts = (of.f_blocks, of.f_bfree, of.f_bavail, of.f_files, of.f_ffree)
        return wire.STATFS_OUT.pack(*counts, of.f_bsize, of.f_namemax, of.f_frsize, 0)

    # ---- names

    def _readlink(self, node: int, _body: memoryview) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._at(node)))

    def _symlink(self, node: int, body: memoryview) -> bytes:
        name, target = wire.names(body)
        os.symlink(target, name, dir_fd=self._at(node))
        return self._made(node, name)

    def _mknod(self, node: int, body: memoryview) -> bytes:
        mode, device, _, _ = wire.MKNOD.unpack_from(body)
        (name,) = wire.names(body[wire.MKNOD.size :])
        os.mknod(name, mode, device, dir_fd=self._at(node))
        return self._made(node, name)

    def _mkdir(self, node: int, body: memoryview) -> bytes:
        mode, _ = wire.MKDIR.unpack_from(body)
        (name,) = wire.names(body[wire.MKDIR.size :])
        os.mkdir(name, mode, dir_fd=self._at(node))
        return self._made(node, name)

    def _unlink(self, node: int, body: memoryview) -> bytes:
        (name,) = wire.names(body)
        if not self._hidden(self._at(node), name):
            os.unlink(name, dir_fd=self._at(node))
        return b""

    def _rmdir(self, node: int, body: memoryview) -> bytes:
        os.rmdir(wire.names(body)[0], dir_fd=self._at(node))
        return b""

    def _rename(self, node: int, body: memoryview) -> bytes:
        (folder,) = wire.RENAME.unpack_from(body)
        return self._move(node, folder, *wire.names(body[wire.RENAME.size :]))

    def _rename2(self, node: int, body: memoryview) -> bytes:
        folder, flags, _ = wire.RENAME2.unpack_from(body)
        if flags:
            raise OSError(errno.EINVAL, "a rename with flags")
        return self._move(node, folder, *wire.names(body[wire.RENAME2.size :]))

    def _move(self, node: int, folder: int, old: str, new: str) -> bytes:
        source, target = self._at(node), self._at(folder)
        with suppress(FileNotFoundError):
            self._hidden(target, new)
        os.rename(old, new, src_dir_fd=source, dst_dir_fd=target)
        self._absent[folder].pop(new, None)
        return b""

    def _hidden(self, parent: int, name: str) -> bool:
        """Give a file that is open here, and about to go, another name until it is closed; return whether it was so."""
        node = self._known(parent, name)
        if not self._as.stale or node is None or not node.handles or os.fstat(node.descriptor).st_nlink > 1:
            return False
        if stat.S_ISDIR(os.fstat(node.descriptor).st_mode):
            return False
        if node.hidden:
            raise OSError(errno.EBUSY, "a file that is open here")
        other = f".nfs{node.key[1]:016x}"
        os.rename(name, other, src_dir_fd=parent, dst_dir_fd=parent)
        node.hidden = os.dup(parent), other
        return True

    def _link(self, node: int, body: memoryview) -> bytes:
        (source,) = wire.LINK.unpack_from(body)
        (name,) = wire.names(body[wire.LINK.size :])
        os.link(self._path(source), name, dst_dir_fd=self._at(node), follow_symlinks=True)
        return self._made(node, name)

    # ---- content

    def _handle(self, node: int, descriptor: int) -> int:
        with self._lock:
            self._open[descriptor] = self._nodes[node]
            self._nodes[node].handles += 1
        return descriptor

    def _opened(self, node: int, flags: int) -> bytes:
        if flags & os.O_DIRECT:
            self._maybe_fail("O_DIRECT")
        # where to append is the kernel's business: it takes the size that it remembers
        flags &= ~(os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        handle = self._handle(node, os.open(self._path(node), flags))
        if self._as.close_to_open:
            self._notify(wire.NOTICE_INODE, wire.INODE.pack(node, -1, 0))
        return wire.OPEN_OUT.pack(handle, 0, 0)

    def _open_file(self, node: int, body: memoryview) -> bytes:
        return self._opened(node, wire.OPEN.unpack_from(body)[0])

    def _create(self, node: int, body: memoryview) -> bytes:
        flags, mode, _, _ = wire.CREATE.unpack_from(body)
        (name,) = wire.names(body[wire.CREATE.size :])
        made = os.open(name, (flags & (os.O_EXCL | os.O_TRUNC)) | os.O_CREAT | os.O_WRONLY, mode, dir_fd=self._at(node))
        os.close(made)
        entry = self._made(node, name)
        return entry + self._opened(wire.ENTRY_OUT.unpack_from(entry)[0], flags)

    def _read(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = wire.READ.unpack_from(body)
        self._at(node)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = wire.READ.unpack_from(body)
        self._at(node)
        if self._as.short and self._random.random() < self._as.short:
            self.counts["short"] += 1
            size = max(1, size // 2)
        if self._happens("WRITEBACK"):
            self._lost.add(handle)
            return wire.WRITE_OUT.pack(size, 0)
        start = wire.READ.size
        return wire.WRITE_OUT.pack(os.pwrite(handle, body[start : start + size], offset), 0)

    def _fsync(self, node: int, body: memoryview) -> bytes:
        os.fsync(wire.HANDLE.unpack_from(body)[0])
        return self._flush(node, body)

    def _flush(self, node: int, body: memoryview) -> bytes:
        (handle,) = wire.HANDLE.unpack_from(body)
        if handle in self._lost:
            self._lost.discard(handle)
            self._notify(wire.NOTICE_INODE, wire.INODE.pack(node, 0, 0))  # the kernel has what was not written
            raise self._error("WRITEBACK")
        return b""

    def _setlk(self, _node: int, _body: memoryview) -> bytes:
        self._maybe_fail("LOCK")
        return b""

    def _release(self, _node: int, body: memoryview) -> bytes:
        (handle,) = wire.HANDLE.unpack_from(body)
        with self._lock:
            node = self._open.pop(handle)
            node.handles -= 1
            hidden = node.hidden if not node.handles else None
            self._listed.pop(handle, None)
            self._lost.discard(handle)
        os.close(handle)
        if hidden:
            node.hidden = None
            folder, name = hidden
            with suppress(FileNotFoundError):  # with the whole directory, by another node
                os.unlink(name, dir_fd=folder)
            os.close(folder)
        return b""

    def _opendir(self, node: int, _body: memoryview) -> bytes:
        if self._as.close_to_open:
            self._absent.pop(node, None)
        handle = self._handle(node, os.open(self._path(node), os.O_RDONLY | os.O_DIRECTORY))
        return wire.OPEN_OUT.pack(handle, wire.CACHE_DIR | wire.KEEP_CACHE if self._as.late_listings else 0, 0)

    def _readdir(self, _node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = wire.READ.unpack_from(body)
        if offset == 0:
            with os.scandir(handle) as found:
                self._listed[handle] = [
                    wire.dirent(entry.name, entry.inode(), _type(entry) if self._as.types else 0, number)
                    for number, entry in enumerate(found, 1)
                ]
        told = b""
        for entry in self._listed.get(handle, [])[offset:]:
            if len(told) + len(entry) > size:
                break
            told += entry
        return told


def _key(descriptor: int) -> tuple[int, int]:
    of = os.fstat(descriptor)
    return of.st_dev, of.st_ino


def _is_there(parent: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _type(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else stat.S_IFREG
