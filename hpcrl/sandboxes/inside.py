"""First process of a sandbox, which prepares its namespaces and starts programs in it. hpcrl/sandboxes/sandbox.py starts it.

Its standard input is a socket of its owner. A request is one message, with the descriptors that belong to it, and is handled by a child. The
first descriptor is a socket for the answer; when its other end is closed, the program ends. When the owner is gone, this process ends, and
with it all others.

It imports nothing but the standard library, all of it before the image is its root: afterwards an import could find a file of the image.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from typing import IO, Any, NoReturn

from hpcrl.envs.sandbox import namespaces, seccomp
from hpcrl.envs.sandbox.supervisor import end_children
from hpcrl.errors import DataError
from hpcrl.sandboxes.fuse_layer import DOES_NOT_START, serve_layers
from hpcrl.sandboxes.trees import MOST_DEEP, ChosenPaths, TreeBounds, Whiteouts, read_tree, write_tree

LONGEST_MESSAGE = 128 << 10
LOOK_S = 0.5
"""Between two looks at the memory of all processes."""

LONGEST_STILL_S = 5.0
"""Of a time limit counts between two looks: a job may be suspended, and a snapshot stops programs."""

OPEN_FILES = 4096
NOT_FOUND, NOT_STARTED = 127, 126

USER_NAMESPACES, OVERLAY, TMPFS, PROC, FUSE, FUSE_OVERLAYFS = (
    "user namespaces",
    "overlayfs",
    "tmpfs with user attributes",
    "a /proc of its own",
    "/dev/fuse",
    "a fuse-overlayfs that starts",
)
"""What a sandbox needs of its node."""

_NO_ATTRIBUTES = "tmpfs keeps no user attributes"
_LACKING = {
    DOES_NOT_START: FUSE_OVERLAYFS,
    _NO_ATTRIBUTES: TMPFS,
    "mount of overlay": OVERLAY,
    "mount of proc": PROC,
    FUSE: FUSE,
}
_PASSING = {
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.EBUSY,
    errno.EIO,
    errno.ENOENT,
    errno.ESTALE,
    errno.ENOTCONN,
}

_PDEATHSIG, _DUMPABLE, _CHILD_SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 36, 38
_READ_ALL = 1 << 2  # CAP_DAC_READ_SEARCH: files of mode 0 are a part of a snapshot
_MOST_DESCRIPTORS, _PIECE = 4, 1 << 16
_SET_INTERFACE, _UP = 0x8914, 0x41
_DEVICES = "null", "zero", "full", "random", "urandom", "tty"
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_OWN = namespaces.NO_SUID | namespaces.NO_DEVICES
# terminals are counted for the node, and what inotify has for its user: one sandbox could take those of all others
_MOST_TERMINALS = 64
_MOST_OF_USER = {"max_inotify_instances": 16, "max_inotify_watches": 1 << 16}
# what the buffers of sockets have is memory of no process; sizes in bytes: least, at first, most
_MOST_SOCKETS = 4096
_OF_TCP = {"tcp_rmem": "4096 131072 212992", "tcp_wmem": "4096 16384 212992"}

_libc = CDLL(None, use_errno=True)
Message = Mapping[str, Any]


def main() -> None:
    """Prepare a sandbox as the first message asks, and answer requests in it."""
    # its end is the end; _PDEATHSIG would be that of the thread which began this
    owner = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # no child has the socket: its other end learns of the end at once
        os.dup2(nothing.fileno(), 0)
    settings, descriptors = receive(owner)
    if settings is None:  # the owner was killed before it had asked
        os._exit(0)
    try:
        upper, layers = _prepare(settings, descriptors), None
        if settings["fuse_overlayfs"]:
            layers = serve_layers(settings["fuse_overlayfs"], settings["place"], settings["memory"])
        namespaces.leave(namespaces.PROCESSES)
        if child := os.fork():
            owner.close()
            if os.wait()[0] != child:  # nothing serves its files any more
                os.kill(child, signal.SIGKILL)
                os.wait()
            os._exit(0)
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        _enter(settings)
    except (OSError, DataError) as error:
        send(owner, _reason(error))
        os._exit(1)
    send(owner, {})
    _First(owner, upper, layers, settings).serve()


def _reason(error: OSError | DataError) -> Message:
    """Return why there is no sandbox: a snapshot that is `wrong` for every node, what this node `lacks`, or what may pass."""
    if isinstance(error, DataError):
        return {"error": str(error), "wrong": True}
    if error.errno in _PASSING:
        return {"error": str(error)}
    return {
        "error": str(error),
        "lacks": next((lacks for text, lacks in _LACKING.items() if text in str(error)), USER_NAMESPACES),
    }


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and the descriptors that came with it; None where the other end is closed."""
    try:
        content, descriptors, _, _ = socket.recv_fds(channel, LONGEST_MESSAGE, _MOST_DESCRIPTORS)
    except ConnectionResetError:  # it was killed with a message that it had not read
        return None, []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return json.loads(content) if content else None, descriptors


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
        socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def _prepare(settings: Message, descriptors: Sequence[int]) -> int:
    """Enter the namespaces, and fill a filesystem in memory with the upper directory of the overlay; return its descriptor."""
    namespaces.unshare(0, 0, network=settings["network"])
    options = f"size={settings['disk']},nr_inodes={settings['files']},mode=700"
    namespaces.mount("tmpfs", settings["place"], "tmpfs", _OWN, options)
    os.chdir(settings["place"])
    os.umask(0o022)
    for name in ("lower", "upper", "work", "root", "dev", "shm"):
        os.mkdir(name, 0o755)
    os.chmod("shm", 0o1777)
    namespaces.mount(settings["image"], "lower", None, namespaces.BIND)
    upper = os.open("upper", os.O_RDONLY | os.O_DIRECTORY)
    if not settings["fuse_overlayfs"]:
        _expect_attributes(upper)
    for descriptor in descriptors:
        with os.fdopen(descriptor, "rb") as snapshot:
            _unpack(snapshot, upper, TreeBounds(settings["disk"], settings["files"]), _whiteouts(settings))
    return upper


def _sync_files(upper: int, merged: int, only: ChosenPaths, prefix: str = "") -> None:
    """Sync each file of a directory of the upper layer by its name in the sandbox: syncfs returns before FUSE has written mapped memory."""
    flags, device = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, os.fstat(merged).st_dev
    with os.scandir(upper) as listing:
        entries = list(listing)
    for entry in entries:
        is_file, path = entry.is_file(follow_symlinks=False), prefix + entry.name
        if not is_file and (path.count("/") == MOST_DEEP or not entry.is_dir(follow_symlinks=False)):
            continue
        if not only.has(path) and (is_file or not only.leads(path)):
            continue
        with suppress(FileNotFoundError, NotADirectoryError):  # whiteouts, and what they hide
            shown = os.open(entry.name, flags, dir_fd=merged)
            try:
                if os.fstat(shown).st_dev != device:
                    continue
                if is_file:
                    os.fsync(shown)
                    continue
                below = os.open(entry.name, flags | os.O_DIRECTORY, dir_fd=upper)
                try:
                    _sync_files(below, shown, only, f"{path}/")
                finally:
                    os.close(below)
            finally:
                os.close(shown)


def _whiteouts(settings: Message) -> Whiteouts:
    return Whiteouts.FILES if settings["fuse_overlayfs"] else Whiteouts.DEVICES


def _expect_attributes(upper: int) -> None:
    try:
        os.setxattr(upper, "user.overlay.test", b"y")
        os.removexattr(upper, "user.overlay.test")
    except OSError as error:
        raise OSError(error.errno, f"this kernel's {_NO_ATTRIBUTES}, which Linux 6.6 has added") from error


def _unpack(snapshot: IO[bytes], upper: int, bounds: TreeBounds, whiteouts: Whiteouts) -> None:
    try:
        read_tree(snapshot, upper, bounds, upper=whiteouts)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DataError(f"the snapshot has more than {bounds.size} bytes or {bounds.entries} files") from error


def _enter(settings: Message) -> None:
    """Make the overlay the root of all files, and give up what this process may do in its namespaces."""
    if not settings["fuse_overlayfs"]:
        namespaces.mount("overlay", "root", "overlay", _OWN, "lowerdir=lower,upperdir=upper,workdir=work,userxattr")
    for name in ("dev", "proc"):
        if not stat.S_ISDIR(os.lstat(f"root/{name}").st_mode):
            raise DataError(f"/{name} is no directory in this snapshot")
    _make_devices()
    namespaces.mount("dev", "root/dev", None, namespaces.BIND | namespaces.RECURSIVE)
    # no program may replace a device that the next request opens
    namespaces.mount(None, "root/dev", None, namespaces.REMOUNT | namespaces.BIND | namespaces.READ_ONLY | _OWN)
    namespaces.mount("shm", "root/dev/shm", None, namespaces.BIND)
    namespaces.mount("proc", "root/proc", "proc", _OWN | namespaces.NO_PROGRAMS)
    for name, most in _MOST_OF_USER.items():
        _write_text(f"root/proc/sys/user/{name}", str(most))
    for name, sizes in () if settings["network"] else _OF_TCP.items():
        _write_text(f"root/proc/sys/net/ipv4/{name}", sizes)
    namespaces.change_root("root")
    if not settings["network"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SET_INTERFACE, struct.pack("16sH22x", b"lo", _UP))
    _libc.sethostname(b"sandbox", 7)
    for place in (sys.path, sys.path_hooks, sys.meta_path):  # an import would run a file of the image
        place.clear()
    namespaces.drop_capabilities(but=_READ_ALL)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # nothing of /proc/1 is for the programs of the sandbox


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _make_devices() -> None:
    for name in _DEVICES:
        os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_WRONLY))
        namespaces.mount(f"/dev/{name}", f"dev/{name}", None, namespaces.BIND)
    for name in ("pts", "shm"):
        os.mkdir(f"dev/{name}")
    options = f"newinstance,ptmxmode=0666,mode=0620,max={_MOST_TERMINALS}"
    namespaces.mount("devpts", "dev/pts", "devpts", namespaces.NO_SUID | namespaces.NO_PROGRAMS, options)
    for name, target in _LINKS.items():
        os.symlink(target, f"dev/{name}")


class _First:
    """The process 1 of a sandbox: starts a child for each request, ends those without a parent, and bounds the memory of all.

    Args:
        upper: descriptor of the directory of changes.
        layers: that of the status of a process outside which serves the files.
    """

    def __init__(self, owner: socket.socket, upper: int, layers: int | None, settings: Message) -> None:
        self._owner, self._upper, self._settings = owner, upper, settings
        # a path from the root would wait for what serves the files, which programs can keep busy
        self._proc, self._layers = os.open("/proc", os.O_RDONLY), layers
        self._snapshot: int | None = None

    def serve(self) -> NoReturn:
        wake, look_at = _wake_at_ended_children(), 0.0
        while True:
            seconds = None if self._reap() else max(0.0, look_at - time.monotonic())
            ready, _, _ = select.select([self._owner, wake], [], [], seconds)
            if wake in ready:
                os.read(wake, _PIECE)
            if seconds is not None and time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                used = _memory_used(self._proc, self._layers)
                many = not self._settings["network"] and _sockets_used(self._proc) > _MOST_SOCKETS
                if many or used > self._settings["memory"]:
                    send(self._owner, {"memory": used})
                    self._kill_all()
            if self._owner in ready:
                message, descriptors = receive(self._owner)
                if message is None:
                    os._exit(0)
                self._handle(message, descriptors)

    def _reap(self) -> bool:
        """Wait for children that have ended; return whether there are no others."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if ended == self._snapshot:
                    self._snapshot = None
                    _signal_all(signal.SIGCONT)
            return False
        return True

    def _kill_all(self) -> None:
        """Kill all other processes, and wait until they have ended: what a dying one has counts as memory."""
        _signal_all(signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        self._snapshot = None

    def _handle(self, message: Message, descriptors: Sequence[int]) -> None:
        if message["do"] == "kill":
            return self._kill_all()
        if message["do"] == "answer":
            with socket.socket(fileno=descriptors[0]) as control:
                return send(control, {})
        if message["do"] == "snapshot":
            _signal_all(signal.SIGSTOP)
        child = os.fork()
        if child == 0:
            self._become(message, descriptors)
        if message["do"] == "snapshot":
            self._snapshot = child
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _become(self, message: Message, descriptors: Sequence[int]) -> NoReturn:
        """Do what is asked as a process of its own, which then ends."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._owner.close()
        control, streams = socket.socket(fileno=descriptors[0]), descriptors[1:]
        try:
            if message["do"] == "exec":
                answer = _execute(message, control, streams, self._settings)
            elif message["do"] == "snapshot":
                with os.fdopen(streams[0], "wb") as out:
                    bounds = TreeBounds(self._settings["disk"], self._settings["files"])
                    merged = os.open("/", os.O_RDONLY)
                    # what is written to mapped memory
                    if self._settings["fuse_overlayfs"]:
                        _sync_files(self._upper, merged, ChosenPaths(message["only"]))
                    else:
                        _libc.syncfs(merged)
                    write_tree(self._upper, out, bounds, upper=_whiteouts(self._settings), only=message["only"])
                answer = {}
            else:
                os.close(self._upper)
                _confine(self._settings)
                answer = _FILES[message["do"]](message, streams[0])
        except (OSError, DataError) as error:
            answer = {"error": str(error)}
        try:
            _wait_for_end_without_files()
            send(control, answer)
        finally:
            os._exit(0)


def _wait_for_end_without_files() -> None:
    """Return where files can be read; else what has failed because of that has no result, and this process waits for the end of the sandbox."""
    try:
        os.statvfs("/")  # which asks what serves them
    except OSError:
        while True:
            signal.pause()


def _wake_at_ended_children() -> int:
    """Return a descriptor that can be read when a child has ended."""
    wake, write = os.pipe()
    for end in (wake, write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def _signal_all(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(-1, number)


def _memory_used(proc: int, layers: int | None) -> int:
    """Return the bytes of memory of all processes but this one, and of that whose status is `layers`; what several share counts for each."""
    used = 0
    if layers is not None:
        with suppress(ProcessLookupError):  # it has ended, as this one will
            used = _memory_of(os.pread(layers, _PIECE, 0))
    for name in filter(str.isdigit, os.listdir(proc)):
        with suppress(OSError), open(os.open(f"{name}/status", os.O_RDONLY, dir_fd=proc), "rb") as file:
            used += _memory_of(file.read()) if name != "1" else 0  # in bytes: a name need not be text
    return used


def _sockets_used(proc: int) -> int:
    """Return how many sockets there are, in whose buffers programs could keep memory that counts for no process."""
    with open(os.open("1/net/sockstat", os.O_RDONLY, dir_fd=proc), "rb") as file:
        return int(file.readline().split()[2])


def _memory_of(status: bytes) -> int:
    # tables of pages too: a large map that is only read has nothing else
    lines = (line.split() for line in status.splitlines() if line.startswith((b"RssAnon", b"RssShmem", b"VmPTE")))
    return sum(int(line[1]) for line in lines) << 10


def _execute(message: Message, control: socket.socket, streams: Sequence[int], settings: Message) -> Message:
    """Run a program until it ends, its time is over, or the owner closes `control`; return what became of it."""
    _libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake = _wake_at_ended_children()
    if message["terminal"]:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", *message["terminal"], 0, 0))
        send(control, {}, [master])
        os.close(master)
        streams = [slave] * 3
    program = os.fork()
    if program == 0:
        _begin(message, streams, settings)
    for stream in set(streams):
        os.close(stream)
    left, looked, ended = message["seconds"], time.monotonic(), ""
    while not ended:
        if (code := _ended(program)) is not None:
            return {"code": code, "ended": ""}
        now = time.monotonic()
        left, looked = left - min(now - looked, LONGEST_STILL_S), now
        ready, _, _ = select.select([control, wake], [], [], max(0.0, min(left, LONGEST_STILL_S / 5)))
        if wake in ready:
            os.read(wake, _PIECE)
        ended = "cancelled" if control in ready else "time" if left <= 0 else ""
    end_children()
    return {"code": None, "ended": ended}


def _ended(program: int) -> int | None:
    """Return the exit code of a child, 128 and the number of the signal that ended it, or None while it runs."""
    while (found := os.waitpid(-1, os.WNOHANG))[0] not in (0, program):
        pass
    if found[0] == 0:
        return None
    code = os.waitstatus_to_exitcode(found[1])
    return code if code >= 0 else 128 - code


def _begin(message: Message, streams: Sequence[int], settings: Message) -> NoReturn:
    """Become the program, with a session of its own."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    code = NOT_STARTED
    try:
        os.setsid()
        if message["terminal"]:
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _confine(settings)
        os.chdir(message["directory"])
        os.execvpe(message["command"][0], message["command"], message["environment"])
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        what = message["directory"] if error.filename == message["directory"] else message["command"][0]
        os.write(2, f"{what}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _confine(settings: Message) -> None:
    """Limit this process, and what it starts, for good."""
    for name, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, settings["processes"]),
        (resource.RLIMIT_DATA, settings["memory"]),
        (resource.RLIMIT_FSIZE, settings["disk"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        given = resource.getrlimit(name)[1]  # of the user; none may be raised
        most = most if given == resource.RLIM_INFINITY else min(most, given)
        resource.setrlimit(name, (most, most))
    namespaces.drop_capabilities()
    seccomp.refuse_dangerous()


def _write(message: Message, stream: int) -> Message:
    """Write what comes from a descriptor into a file, with the directories above it."""
    os.makedirs(os.path.dirname(message["path"]), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    target = os.open(message["path"], flags, message["mode"])
    _expect_file(target, message["path"])
    while piece := os.read(stream, _PIECE):
        left = memoryview(piece)
        while left:
            left = left[os.write(target, left) :]
    os.fchmod(target, message["mode"])
    os.close(target)  # before the answer: a program that is open for writing cannot begin
    return {}


def _read(message: Message, stream: int) -> Message:
    """Write a file into a descriptor, at most as many bytes as are asked for, and one more."""
    source, left = os.open(message["path"], os.O_RDONLY | os.O_NONBLOCK), message["most"] + 1
    _expect_file(source, message["path"])
    with suppress(BrokenPipeError), os.fdopen(stream, "wb", 0) as out:
        while left > 0 and (piece := os.read(source, min(left, _PIECE))):
            out.write(piece)
            left -= len(piece)
    return {}


def _expect_file(descriptor: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise DataError(f"{path} is no regular file")


_FILES: dict[str, Callable[[Message, int], Message]] = {"write": _write, "read": _read}
