"""A sandbox on this node: programs of a stranger over the files of an image, in namespaces, with limits and without privileges.

Its programs change nothing outside: what they write is in memory and goes with it. Files are read and written by a process inside, so that
no link of the sandbox is followed outside.
"""

from __future__ import annotations

import json
import math
import os
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hpcrl.errors import DataError, SandboxError
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.sandboxes import inside
from hpcrl.sandboxes.inside import LONGEST_MESSAGE, LONGEST_STILL_S, receive, send

if TYPE_CHECKING:
    from hpcrl.config.sections.slurm import SandboxesConfig

_ROOT = str(Path(inside.__file__).parents[2])
_START = f"import sys; sys.path.insert(0, {_ROOT!r}); from {inside.__name__} import main; main()"
_COMMAND = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _START]
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_START_S, _TRANSFER_S, _GRACE_S, _LEFT_S = 120.0, 120.0, 2.0, 20.0
_PIECE, _MOST_PIECES = 1 << 16, 64
ORDINARY_USER = "an ordinary user"
_ENDED = "the sandbox has ended"
_TERMINAL = 24, 80  # rows and columns
_GB = 1 << 30
_END_OF_INPUT = b"\x04"


class SandboxEnded(SandboxError):
    """A sandbox has ended."""


class NoSandboxes(SandboxError):
    """A node, or its user, has no sandboxes, however often one is asked for.

    Attributes:
        lacks: what of docs/sandboxes.md, as of hpcrl/sandboxes/inside.py.
    """

    def __init__(self, message: str, lacks: str = "") -> None:
        super().__init__(message)
        self.lacks = lacks


@dataclass(frozen=True)
class SandboxLimits:
    """SandboxLimits of a sandbox, of all its programs together.

    Attributes:
        memory: bytes of their memory; above it all are killed.
        disk: bytes of the files that they change, which are in the node's memory too.
        files: how many files, directories and links they make.
        processes: and threads, at a time.
    """

    memory: int = 2 << 30
    disk: int = 2 << 30
    files: int = 200_000
    processes: int = 256


def limits_of(asked: SandboxesConfig) -> SandboxLimits:
    """Return the limits that a configuration asks for."""
    return SandboxLimits(int(asked.memory_gb * _GB), int(asked.disk_gb * _GB), asked.files, asked.processes)


@dataclass(frozen=True)
class Ended:
    """What became of a program.

    Attributes:
        code: its exit code, 128 and the number of the signal that ended it; None where it was ended.
        ended: why it was ended: time, memory, output, cancelled, or killed by another program of the sandbox; else empty.
    """

    code: int | None
    ended: str = ""


@dataclass(frozen=True)
class Output:
    """What a program has written: the end of a program, with all that it wrote, or the beginning of it.

    Attributes:
        code, ended: as of `Ended`.
        stderr: empty with a terminal, which has one stream.
    """

    code: int | None
    ended: str
    stdout: bytes
    stderr: bytes


@dataclass
class SandboxCommand:
    """A program that runs in a sandbox.

    Attributes:
        stdin: descriptor that its input is written to; None where it is closed.
        streams: descriptors of its output, by name: stdout and stderr, or stdout alone where it has a terminal.
        seconds: time after which it is ended, without that for which this process stood still.
        result: what became of it, when `output` is over.
    """

    sandbox: Sandbox
    control: socket.socket
    stdin: int | None
    streams: dict[int, str]
    seconds: float
    begun: float = field(default_factory=time.monotonic)
    result: Ended | None = None

    def __post_init__(self) -> None:
        for descriptor in (self.stdin, *self.streams):
            if descriptor is not None:
                os.set_blocking(descriptor, False)

    def _close_input(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
        self.stdin = None

    def cancel(self) -> None:
        """End the program and its processes."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def output(self, given: bytes = b"", most: float = math.inf) -> Iterator[tuple[str, bytes]]:
        """Yield what it writes, with the name of the stream, until it has ended; what its background processes write later is lost.

        The program is cancelled where the iterator is closed before its end.

        Args:
            given: all of its input.
            most: bytes that are yielded; a program that writes more is ended.
        """
        over = False
        with closing(self._output(given)) as pieces:
            for name, piece in pieces:
                fits = piece[: int(min(most, len(piece)))]
                most -= len(fits)
                if fits:
                    yield name, fits
                if len(fits) < len(piece) and not over:
                    over = True
                    self.cancel()
        if over:
            self.result = Ended(None, "output")

    def _output(self, given: bytes) -> Generator[tuple[str, bytes], None, None]:
        if len(self.streams) == 1:
            given += _typed_end(given)
        left, killed, clock = memoryview(given), False, SuspendAwareClock(LONGEST_STILL_S)
        with closing(self), selectors.DefaultSelector() as selector:
            for stream in (*self.streams, self.control):
                selector.register(stream, selectors.EVENT_READ)
            if self.stdin is not None:
                selector.register(self.stdin, selectors.EVENT_WRITE)
            while self.result is None:
                seconds = self.seconds + (2 if killed else 1) * _GRACE_S - clock.now()
                ready = {key.fd for key, _ in selector.select(max(0.0, min(seconds, LONGEST_STILL_S / 5)))}
                if not ready and seconds <= 0:
                    if killed:
                        raise SandboxError("the sandbox does not end a program; end the sandbox")
                    self.sandbox.kill()  # its supervisor was stopped, or cannot end it
                    killed = True
                if self.stdin in ready:
                    left = self._feed(left, selector)
                over = self.control.fileno() in ready
                # what it wrote last was written before its end was reported
                for stream in [one for one in self.streams if one in ready or over]:
                    yield from self._drain(stream, selector, _MOST_PIECES if over else 1)
                if over:
                    self.result = Ended(None, "time") if killed else self._result()

    def _feed(self, left: memoryview, selector: selectors.BaseSelector) -> memoryview:
        """Write to its input what fits; return what is left of it."""
        assert self.stdin is not None
        with suppress(BrokenPipeError):
            if left and (left := left[os.write(self.stdin, left) :]):
                return left
        selector.unregister(self.stdin)
        self._close_input()
        return memoryview(b"")

    def _drain(self, stream: int, selector: selectors.BaseSelector, most: int) -> Iterator[tuple[str, bytes]]:
        """Yield what a stream holds, at most as many pieces."""
        for _ in range(most):
            try:
                piece = os.read(stream, _PIECE)
            except BlockingIOError:
                return
            except OSError:  # of a terminal that no process has open any more
                piece = b""
            if not piece:
                with suppress(KeyError):
                    selector.unregister(stream)
                return
            yield self.streams[stream], piece

    def _result(self) -> Ended:
        message, _ = receive(self.control)
        if message is not None and "error" not in message:
            return Ended(message["code"], message["ended"])
        if self.sandbox.out_of_memory(self.begun):
            return Ended(None, "memory")
        self.sandbox.expect_answer()
        if message is not None:  # as where its user has too many processes on the node
            raise SandboxError(f"the program did not begin: {message['error']}")
        return Ended(None, "killed")

    def close(self) -> None:
        self._close_input()
        self.control.close()
        for stream in self.streams:
            os.close(stream)
        self.streams = {}


class Sandbox:
    """A sandbox that has started; `end` it. One call at a time, but programs run beside each other.

    Args:
        image: directory of the image's files, which is not changed.
        scratch: directory on the node for a mount point.
        network: whether programs use the node's network, its own services included; else they have none.
        environment, directory: of its programs, where a call names no others.
        snapshot: an uncompressed archive of `snapshot`, with which it begins.
        fuse_overlayfs: path of that program, which is to serve its files; empty: the kernel does.

    Raises:
        NoSandboxes: this node has none.
        DataError: the snapshot cannot be used.
        SandboxError: it does not start now.
    """

    def __init__(
        self,
        image: Path,
        scratch: Path,
        limits: SandboxLimits | None = None,
        *,
        network: bool = False,
        environment: Mapping[str, str] | None = None,
        directory: str = "/",
        snapshot: IO[bytes] | None = None,
        fuse_overlayfs: str = "",
    ) -> None:
        require_ordinary_user()
        self.limits = limits or SandboxLimits()
        self._environment, self._directory = {**_ENVIRONMENT, **(environment or {})}, directory
        self._lock, self._memory_killed = threading.Lock(), float("-inf")
        self._changing = threading.RLock()  # held by a snapshot, while which nothing else begins
        self._place = Path(tempfile.mkdtemp(prefix="sandbox-", dir=scratch))
        with ExitStack() as own:  # is kept once the process has started
            own.callback(self._place.rmdir)
            self._owner, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                own.enter_context(self._owner)
                # all processes of the sandbox but its programs have the other end
                self._alive, held = socket.socketpair()
                with held:
                    own.enter_context(self._alive)
                    self._process = subprocess.Popen(
                        _COMMAND, stdin=other.fileno(), stdout=held.fileno(), env=_ENVIRONMENT, start_new_session=True
                    )
            own.pop_all()
        settings = {"image": str(image), "place": str(self._place), "network": network, **asdict(self.limits)}
        settings["fuse_overlayfs"] = fuse_overlayfs
        reason = "its first process ended"
        try:
            self._send(settings, [snapshot.fileno()] if snapshot else [])
            self._owner.settimeout(_START_S)
            answer, _ = receive(self._owner)
        except (OSError, SandboxError) as error:
            answer, reason = None, f"{reason}, or takes more than {_START_S:g} s: {error}"
        if answer is None or "error" in answer:
            self.end()
            raise _not_started(answer or {"error": reason})
        self._owner.settimeout(None)

    def begin(
        self,
        command: Sequence[str],
        seconds: float,
        *,
        terminal: bool = False,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
    ) -> SandboxCommand:
        """Start a program.

        Args:
            seconds: time after which it is ended, with its processes.
            terminal: whether it has one, in the place of pipes.
        """
        texts = [*command, directory or "", *(environment or {}), *(environment or {}).values()]
        if (
            not command
            or any("\0" in text for text in texts)
            or any("=" in name or not name for name in environment or {})
        ):
            raise DataError("expected a command and variables without a null character or = in a name")
        message = {
            "do": "exec",
            "command": list(command),
            "seconds": seconds,
            "terminal": _TERMINAL if terminal else None,
            "environment": {**self._environment, **(environment or {})},
            "directory": directory or self._directory,
        }
        with self._changing:
            return self._begin(message)

    def _begin(self, message: Mapping[str, Any]) -> SandboxCommand:
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if message["terminal"]:
            with other:
                self._send(message, [other.fileno()])
            control.settimeout(_GRACE_S)
            try:
                _, (master,) = receive(control)
            except (OSError, ValueError) as error:
                control.close()
                self.expect_answer()
                raise SandboxError(f"no terminal for the program: {error}") from error
            control.settimeout(None)
            with ExitStack() as held:
                held.callback(os.close, master)
                typed = os.dup(master)
                held.pop_all()
            return SandboxCommand(self, control, typed, {master: "stdout"}, message["seconds"])
        pairs = _pipes(3)
        theirs, own = [pairs[0][0], pairs[1][1], pairs[2][1]], [pairs[0][1], pairs[1][0], pairs[2][0]]
        streams = {own[1]: "stdout", own[2]: "stderr"}
        program = SandboxCommand(self, control, own[0], streams, message["seconds"])
        try:
            with other:
                self._send(message, [other.fileno(), *theirs])
        except BaseException:
            program.close()
            raise
        finally:
            for end in theirs:
                os.close(end)
        return program

    def run(
        self, command: Sequence[str], seconds: float, *, most: int = 1 << 20, given: bytes = b"", **how: Any
    ) -> Output:
        """Run a program with an input, and return what it writes; it is ended when it writes more than `most` bytes."""
        program, found = self.begin(command, seconds, **how), {"stdout": bytearray(), "stderr": bytearray()}
        for name, piece in program.output(given, most):
            found[name] += piece
        assert program.result
        return Output(program.result.code, program.result.ended, bytes(found["stdout"]), bytes(found["stderr"]))

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file of the sandbox, with the directories above it."""

        def put(stream: int) -> None:
            with suppress(BrokenPipeError), os.fdopen(stream, "wb") as out:
                out.write(content)

        self._transfer({"do": "write", "path": _absolute(path), "mode": mode & 0o777}, put, reads=False)

    def read(self, path: str, most: int = 16 << 20) -> bytes:
        """Return the content of a file of the sandbox. Raises SandboxError where it has more than `most` bytes, or is no regular file."""
        content = bytearray()

        def take(stream: int) -> None:
            with os.fdopen(stream, "rb") as source:
                content.extend(source.read(most + 1))

        self._transfer({"do": "read", "path": _absolute(path), "most": most}, take, reads=True)
        if len(content) > most:
            raise SandboxError(f"{path} has more than {most} bytes")
        return bytes(content)

    def snapshot(self, out: IO[bytes], only: Sequence[str] = ()) -> None:
        """Write what its programs have changed, as a tar archive; they are stopped meanwhile, and nothing else begins.

        Args:
            only: absolute paths; what is at and below them is written; empty: all.
        """

        def take(stream: int) -> None:
            with os.fdopen(stream, "rb") as source:
                while piece := source.read(1 << 20):
                    out.write(piece)

        with self._changing:
            self._transfer({"do": "snapshot", "only": list(only)}, take, reads=True)

    def kill(self) -> None:
        """Kill all its programs; its files stay."""
        self._send({"do": "kill"}, [])

    def out_of_memory(self, since: float) -> bool:
        """Return whether its programs have been killed for their memory since a time, as of `time.monotonic`."""
        with self._lock, suppress(OSError):  # there is no more, or it has ended
            while self._owner.recv(LONGEST_MESSAGE, socket.MSG_DONTWAIT):  # it sends nothing else
                self._memory_killed = time.monotonic()
        return self._memory_killed >= since

    def expect(self) -> None:
        """Raise SandboxEnded where its first process has ended, and with it all others: killed for the node's memory, for instance."""
        watch = select.poll()
        with suppress(ValueError):  # the socket is closed
            watch.register(self._owner, 0)
            if not watch.poll(0):
                return
        raise SandboxEnded(_ENDED)

    def expect_answer(self) -> None:
        """Raise SandboxEnded where its first process does not answer: another one that ended may have done so a moment before it."""
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with control:
            with other:
                self._send({"do": "answer"}, [other.fileno()])
            control.settimeout(_TRANSFER_S)
            try:
                answer, _ = receive(control)
            except TimeoutError:
                answer = None
        if answer is None:
            raise SandboxEnded(_ENDED)

    def end(self) -> None:
        """End the sandbox: its processes have ended then, and nothing of it is left."""
        self._owner.close()  # at which its first process ends, and with it all others and what is mounted
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        watch = select.poll()
        with self._alive, suppress(ValueError):  # it is closed: the sandbox was ended before
            watch.register(self._alive, 0)
            watch.poll(_LEFT_S * 1000)  # what serves its files ends after the first process
        with suppress(FileNotFoundError):
            self._place.rmdir()

    def _transfer(self, message: Mapping[str, Any], move: Any, *, reads: bool) -> None:
        """Ask for what moves bytes through a pipe, and let `move` have the end of it."""
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        own, theirs = (reading, writing) if reads else (writing, reading)
        with control, other:
            try:
                with self._changing:
                    self._send(message, [other.fileno(), theirs])
            except BaseException:
                os.close(own)
                raise
            finally:
                os.close(theirs)
                other.close()
            # a program of the sandbox may stop the process that does it
            late = threading.Timer(_TRANSFER_S, self._kill_late)
            late.start()
            try:
                move(own)
                answer, _ = receive(control)
            finally:
                late.cancel()
        if answer is None or "error" in answer:
            self.expect_answer()
            raise SandboxError(
                (answer or {}).get("error") or "a program of the sandbox, or its limits, ended the transfer"
            )

    def _kill_late(self) -> None:
        with suppress(SandboxEnded):
            self.kill()

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        if len(json.dumps(message)) > LONGEST_MESSAGE:
            raise SandboxError(
                f"a command and its environment have at most {LONGEST_MESSAGE} bytes; write a file instead"
            )
        self.expect()
        with self._lock:
            try:
                send(self._owner, message, descriptors)
            except OSError as error:
                raise SandboxEnded(_ENDED) from error


def require_ordinary_user() -> None:
    """Raise NoSandboxes where this process is root's."""
    if os.geteuid() == 0:
        raise NoSandboxes("sandboxes are for ordinary users: root would be root of the node inside, too", ORDINARY_USER)


def _not_started(answer: Mapping[str, Any]) -> SandboxError | DataError:
    """Return the error of a sandbox whose first process has answered with one."""
    message = f"the sandbox did not start: {answer['error']}"
    if answer.get("wrong"):
        return DataError(message)
    return NoSandboxes(message, answer["lacks"]) if "lacks" in answer else SandboxError(message)


def _pipes(count: int) -> list[tuple[int, int]]:
    """Return pipes. Where there are too many open files for all of them, none stays open."""
    with ExitStack() as held:
        pairs = list[tuple[int, int]]()
        for _ in range(count):
            pairs.append(os.pipe())
            for end in pairs[-1]:
                held.callback(os.close, end)
        held.pop_all()
    return pairs


def _typed_end(given: bytes) -> bytes:
    """Return what ends an input in a terminal: the character of its end, which within a line only sends the line."""
    return _END_OF_INPUT if not given or given.endswith(b"\n") else 2 * _END_OF_INPUT


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise DataError(f"expected an absolute path of the sandbox, found {path!r:.200}")
    return path
