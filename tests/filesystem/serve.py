"""Mount a view of a local directory and serve it until standard input ends: `python -m tests.filesystem.serve SOURCE PLACE BEHAVIOUR`.

PLACE may be SOURCE: its content is then seen through the view by all who share this process's mounts. BEHAVIOUR is JSON, the
attributes of `tests.filesystem.view.Behaviour`. "mounted" is printed once it is, or "refused" and why; at the end, as JSON, how often what happened.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import sys
import threading

from tests.filesystem import wire
from tests.filesystem.view import Behaviour, View
from tests.filesystem.wire import Op

THREADS = 8
DETACH = 2  # of umount2
_LIBC = ctypes.CDLL(None, use_errno=True)


def _mounted(connection: int, place: str) -> None:
    options = f"fd={connection},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if _LIBC.mount(b"view", os.fsencode(place), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)


class Server:
    """Answers the kernel's requests on several threads."""

    def __init__(self, connection: int, source: int, behaviour: Behaviour) -> None:
        self._connection = connection
        self._view = View(source, behaviour, self._notify)
        self.counts = self._view.counts

    def run(self) -> None:
        """Answer until the view is unmounted."""
        request = bytearray(wire.MAX_WRITE + 4096)
        while True:
            try:
                length = os.readv(self._connection, [request])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # the request was taken back
                    continue
                raise
            _, operation, number, node, *_ = wire.IN.unpack_from(request)
            self._answer(operation, number, node, memoryview(request)[wire.IN.size : length])

    def _answer(self, operation: int, number: int, node: int, body: memoryview) -> None:
        if operation == Op.FORGET:
            self._view.forget(node, *wire.FORGET.unpack_from(body))
        elif operation == Op.BATCH_FORGET:
            for at in range(8, len(body) - 15, 16):
                self._view.forget(*wire.FORGET_ONE.unpack_from(body, at))
        elif operation == Op.INIT:
            self._send(number, 0, self._init())
        elif operation != Op.INTERRUPT:
            try:
                self._send(number, 0, self._view.answer(operation, node, body))
            except OSError as error:
                self._send(number, error.errno or errno.EIO, b"")

    def _init(self) -> bytes:
        wanted = ["async_read", "big_writes", *(["posix_locks", "flock_locks"] if self._view.refuses_locks else [])]
        flags = sum(wire.INIT_FLAGS[name] for name in wanted)
        return wire.INIT_OUT.pack(*wire.VERSION, wire.MAX_WRITE, flags, 12, 10, wire.MAX_WRITE, 1, 0, 0, 0)

    def _send(self, number: int, error: int, content: bytes) -> None:
        try:
            os.writev(self._connection, [wire.OUT.pack(wire.OUT.size + len(content), -error, number), content])
        except OSError as gone:
            if gone.errno != errno.ENOENT:  # who asked was killed
                raise

    def _notify(self, code: int, content: bytes) -> None:
        try:
            os.writev(self._connection, [wire.OUT.pack(wire.OUT.size + len(content), code, 0), content])
        except OSError as unknown:
            if unknown.errno != errno.ENOENT:  # the kernel does not know it yet
                raise


def main() -> int:
    source, place, behaviour = sys.argv[1:]
    os.umask(0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    below = os.open(source, os.O_PATH | os.O_DIRECTORY)
    try:
        connection = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        _mounted(connection, place)
    except OSError as error:
        print(f"refused: {error}", flush=True)
        return 1
    server = Server(connection, below, Behaviour(**json.loads(behaviour)))
    for _ in range(THREADS):
        threading.Thread(target=server.run, daemon=True).start()
    print("mounted", flush=True)
    sys.stdin.read()
    _LIBC.umount2(os.fsencode(place), DETACH)
    print(json.dumps(server.counts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
