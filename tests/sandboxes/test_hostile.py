"""Programs that want to harm: out of the sandbox, against its limits, against the process that serves it, and against what reads its files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from hpcrl.envs.sandbox import seccomp
from hpcrl.sandboxes.sandbox import Output, Sandbox, SandboxError, SandboxLimits
from tests.envs.sandbox.material import CALL
from tests.sandboxes.material import PATIENCE_S, found_fuse_overlayfs

Start = Callable[..., Sandbox]

both_kinds = pytest.mark.parametrize(
    "fuse_overlayfs", [False, True], indirect=True, ids=["overlayfs", "fuse-overlayfs"]
)
"""Of a test that is cheap enough for `make test`."""


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.faults_slow)], ids=["overlayfs", "fuse-overlayfs"])
def fuse_overlayfs(request: pytest.FixtureRequest) -> str:
    return found_fuse_overlayfs() if request.param else ""


_OUTCOMES = """
import errno, json
KINDS = {errno.EPERM: "refused", errno.EACCES: "refused", errno.EROFS: "refused", errno.ENOSYS: "refused", errno.ENOENT: "hidden", errno.ESRCH: "hidden", errno.EAFNOSUPPORT: "hidden"}
def outcome(code):
    try:
        exec(code, {})
        return "done"
    except OSError as error:
        return KINDS.get(error.errno, repr(error))
"""


def python(sandbox: Sandbox, code: str, seconds: float = PATIENCE_S) -> Output:
    return sandbox.run(["python3", "-I", "-S", "-c", code], seconds)


def outcomes(sandbox: Sandbox, codes: Mapping[str, str]) -> dict[str, str]:
    tried = {name: CALL + code for name, code in codes.items()}
    ran = python(
        sandbox,
        f"{_OUTCOMES}\nfor name, code in {tried!r}.items(): print(json.dumps([name, outcome(code)]), flush=True)",
    )
    found = dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith(b"["))
    assert found.keys() == codes.keys(), ran
    return found


def test_no_other_system_call_is_made(start: Start) -> None:
    column = seccomp._MACHINES[os.uname().machine][0]
    tables = seccomp._FREE + seccomp._OF_FILES + seccomp._OF_PROGRAMS + seccomp._CHECKED_OF_PROGRAMS + seccomp._OWNERS
    known = set(seccomp._numbers(tables, column).values())
    others = sorted(set(range(600)) - known - {335, 336})  # which end a caller that is no probe of the kernel's
    ran = python(start(), f"""
import ctypes
libc, odd = ctypes.CDLL(None, use_errno=True), []
for number in {others}:
    ctypes.set_errno(0)
    if (libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1 if number < 424 else 38):
        odd.append(number)
print(odd)
""")  # fmt: skip
    assert (ran.stdout, ran.stderr) == (b"[]\n", b"")


REFUSED = {
    "ptrace": "call('ptrace', 16, 1, 0, 0)",
    "be traced": "call('ptrace', 0, 0, 0, 0)",
    "read memory": "call('process_vm_readv', 1, None, 0, None, 0, 0)",
    "mount": "call('mount', b'/', b'/tmp', None, 4096, None)",
    "mount a new filesystem": "call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
    "writable devices": "call('mount', None, b'/dev', None, 4096 | 32, None)",
    "unmount": "call('umount2', b'/proc', 2)",
    "pivot root": "call('pivot_root', b'/', b'/tmp')",
    "chroot": "os.chroot('/tmp')",
    "user namespace": "call('unshare', 0x10000000)",
    "user namespace of a child": "call('syscall', 56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)",
    "new clone": "call('syscall', 435, 0, 0)",
    "namespace of the first process": "call('setns', os.open('/proc/self/ns/mnt', 0), 0)",
    "module": "call('init_module', 0, 0, b'')",
    "keys": "call('syscall', 250 if os.uname().machine == 'x86_64' else 219, 0, 0, 0, 0, 0)",
    "bpf": "call('syscall', 321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0)",
    "io_uring": "call('syscall', 425, 1, 0)",
    "userfaultfd": "call('syscall', 323 if os.uname().machine == 'x86_64' else 282, 0)",
    "memory without a name": "os.memfd_create('x')",
    "memory in a pipe": "call('syscall', 278 if os.uname().machine == 'x86_64' else 75, os.pipe()[1], None, 0, 0)",
    "descriptor of another": "call('syscall', 438, os.pidfd_open(1), 0, 0)",
    "file by handle": "call('open_by_handle_at', -100, None, 0)",
    "device": "os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))",
    "whiteout": "os.mknod('/tmp/gone', 0o20666, 0)",
    "host name": "call('sethostname', b'x', 1)",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0.0)",
    "reboot": "call('reboot', 0)",
    "vsock": "import socket; socket.socket(40)",
    "netlink": "import socket; socket.socket(16, 3)",
    "packets": "import socket; socket.socket(17, 3)",
    "raw": "import socket; socket.socket(2, 3, 1)",
    "crypto": "import socket; socket.socket(38, 5)",
    "input of a terminal": "import fcntl; fcntl.ioctl(os.openpty()[1], 0x5412, b'x')",
    "more processes": "call('setrlimit', 6, (ctypes.c_uint64 * 2)(9999, 9999))",
    "core pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')",
    "more of inotify": "open('/proc/sys/user/max_inotify_instances', 'w').write('128')",
    "sysrq": "open('/proc/sysrq-trigger', 'w').write('b')",
    "memory of the first": "open('/proc/1/mem', 'rb')",
    "environment of the first": "open('/proc/1/environ', 'rb').read()",
    "root of the first": "os.listdir('/proc/1/root/')",
    "directory of the first": "os.listdir('/proc/1/cwd/')",
    "descriptors of the first": "os.listdir('/proc/1/fd')",
    "a device of its own": "os.symlink('/etc/release', '/dev/mine')",
    "another terminal": "os.remove('/dev/ptmx')",
    "disks": "open('/dev/vda', 'rb')",
    "kernel log": "open('/dev/kmsg', 'rb')",
    "kill outside": "os.kill({outside}, 9)",
    "kill the host's group": "os.killpg({outside}, 9)",
    "process of the host": "os.listdir('/proc/{outside}')",
    "secret": "open({secret!r}).read()",
    "secret by dots": "open('/..' * 40 + {secret!r}).read()",
    "secret by root": "open('/proc/self/root' + {secret!r}).read()",
    "secret by a link": "os.symlink({secret!r}, '/tmp/to'); open('/tmp/to').read()",
}  # fmt: skip


@pytest.mark.parametrize("network", [False, True])
@both_kinds
def test_ways_out_are_closed(start: Start, user: Path, network: bool, fuse_overlayfs: str) -> None:
    secret = user / "secret"
    secret.write_text("s3cret")
    codes = {
        name: code.replace("{outside}", str(os.getpid())).replace("{secret!r}", repr(str(secret)))
        for name, code in REFUSED.items()
    }
    if fuse_overlayfs:
        del codes["whiteout"]  # it removes what the program itself could remove
    found = outcomes(start(network=network), codes)
    assert {name: came for name, came in found.items() if came not in ("refused", "hidden")} == {}
    assert secret.read_text() == "s3cret"


def test_what_ordinary_programs_do_works(start: Start, fuse_overlayfs: str) -> None:
    codes = {
        "thread": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "program": "import subprocess; assert subprocess.run(['sh', '-c', 'ls / | cat'], stdout=-1).returncode == 0",
        "session": "os.fork() or (os.setsid(), os._exit(0))",
        "owner": "open('/tmp/x', 'w').close(); os.chown('/tmp/x', 33, 33); os.setgroups([1, 2])",
        "pair": "import socket; socket.socketpair()",
        "socket file": "import socket; socket.socket(1).bind('/tmp/socket')",
        "kernel without a log, for useradd": "import errno, socket\ntry: socket.socket(16, 3, 9)\nexcept OSError as error: assert error.errno == errno.EAFNOSUPPORT",
        "shared memory": "open('/dev/shm/x', 'w').write('x')",
        "random": "open('/dev/urandom', 'rb').read(8)",
        "terminal": "os.openpty()",
        "attribute": "os.setxattr('/tmp', 'user.mine', b'1')",
        "signal by descriptor": "import signal; signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0)",
        "timer": "import signal; signal.setitimer(0, 0)",
    }
    if fuse_overlayfs:
        del codes["attribute"]  # which the memory of older kernels does not keep
    one = start()
    assert outcomes(one, codes) == dict.fromkeys(codes, "done")
    packed = one.run(
        [
            "sh",
            "-c",
            "cd /tmp && tar cf - --owner=daemon:33 --group=x:34 /etc 2>/dev/null | tar xf - && cat etc/release",
        ],
        PATIENCE_S,
    )
    assert (packed.stdout, packed.stderr) == (b"tiny\n", b"")


def test_a_fork_bomb(start: Start) -> None:
    one = start(SandboxLimits(processes=40))
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    ran = python(one, bomb, 1.0)
    assert ran.ended == "time"
    assert one.run(["sh", "-c", "echo on"], PATIENCE_S).stdout == b"on\n"
    escaped = "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: os.setsid(); time.sleep(600)\n        n += 1\nexcept OSError: print(n, flush=True)"
    many = python(one, escaped)
    assert 20 < int(many.stdout) < 40
    one.kill()


def test_a_memory_bomb_of_several_processes(start: Start) -> None:
    one = start(SandboxLimits(memory=64 << 20))
    alone = python(one, "try: x = bytearray(80 << 20)\nexcept MemoryError: print('held')")
    assert alone.stdout == b"held\n"
    one.write("/kept", b"kept")
    several = """
import os, time, mmap
for _ in range(4): os.fork() if _ < 2 else None
x = mmap.mmap(-1, 30 << 20)
for at in range(0, 30 << 20, 4096): x[at] = 1
time.sleep(600)
"""
    ran = python(one, several)
    assert (ran.code, ran.ended) == (None, "memory")
    assert one.read("/kept") == b"kept", "its files stay"
    assert one.run(["sleep", "0"], PATIENCE_S).ended == ""


def test_memory_in_the_buffers_of_sockets(start: Start) -> None:
    """It counts for no process: programs of a sandbox could keep gigabytes there."""
    hoard = """
import os, socket, time
def size(one): return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
first = socket.socket(socket.AF_UNIX)
before = size(first)
first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * before)
first.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
print(size(first) == before, first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), flush=True)
for _ in range(2): os.fork()
kept = [socket.socketpair() for _ in range(1000)]
time.sleep(600)
"""
    one = start()
    ran = python(one, hoard)
    assert (ran.ended, ran.stdout, ran.stderr) == ("memory", b"True 1\n", b"")
    assert one.run(["sleep", "0"], PATIENCE_S).ended == ""


def test_memory_of_the_tables_of_pages(start: Start) -> None:
    one = start(SandboxLimits(memory=64 << 20))
    touch = """
import mmap, time
kept = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
for at in range(0, len(kept), 2 << 20): kept[at]
time.sleep(600)
"""
    assert python(one, touch).ended == "memory"


@both_kinds
def test_a_full_disk(start: Start) -> None:
    one = start(SandboxLimits(disk=4 << 20, files=100))
    found = outcomes(one, {
        "one file": "open('/x', 'wb').write(bytes(5 << 20))",
        "shared memory": "open('/dev/shm/x', 'wb').write(bytes(5 << 20))",
        "sparse": "open('/y', 'wb').truncate(5 << 20)",
        "files": "[open(f'/tmp/{n}', 'w').close() for n in range(200)]",
        "links": "[os.symlink('x', f'/tmp/l{n}') for n in range(200)]",
    })  # fmt: skip
    full = ("OSError(27", "OSError(28", "OSError(12")  # EFBIG, ENOSPC
    assert all(came.startswith(full) for came in found.values()), found


def test_what_the_kernel_counts_for_a_user_is_left_for_other_sandboxes(start: Start) -> None:
    """One program took all terminals of the node, and all that its user may have of inotify."""
    most = """
import ctypes, itertools, os
libc = ctypes.CDLL(None)
print(next(n for n in itertools.count() if libc.inotify_init1(0) < 0))
try:
    for n in range(1000): os.openpty()
except OSError:
    pass
print(n)
"""
    ran = python(start(), most)
    assert (ran.stdout.split(), ran.stderr) == ([b"16", b"64"], b"")


def test_reads_and_writes_follow_no_link_outside(start: Start, user: Path) -> None:
    one, secret = start(), user / "outside"
    secret.write_text("mine")
    made = one.run(["sh", "-c", f"mkdir -p {user}; ln -s {secret} /tmp/file; ln -s {user} /tmp/dir; ln -s /proc/1/root /tmp/root; mkfifo /tmp/queue; ln -s /dev/zero /tmp/zero; ln -s /tmp/loop /tmp/loop; ln -s /proc/self/fd/0 /tmp/zero0"], PATIENCE_S)  # fmt: skip
    assert made.stderr == b""
    for path in (
        "/tmp/file",
        f"/tmp/dir/{secret.name}",
        f"/tmp/root{secret}",
        "/tmp/queue",
        "/tmp/zero",
        "/tmp/loop",
        "/proc/1/environ",
    ):
        with pytest.raises(SandboxError):
            one.read(path)
    for path in ("/tmp/root/x", "/tmp/queue", "/dev/null", "/proc/sys/kernel/core_pattern", "/dev/x"):
        with pytest.raises(SandboxError):
            one.write(path, b"x")
    one.write("/tmp/file", b"first")  # which is a file of the sandbox, by the same name
    one.write(f"/tmp/dir/{secret.name}", b"theirs")
    assert one.read(str(secret)) == b"theirs"
    assert secret.read_text() == "mine"


@both_kinds
def test_programs_that_turn_on_what_serves_them(start: Start) -> None:
    one = start()
    killed = python(one, "import os, time; os.kill(os.getppid(), 9); time.sleep(600)")
    assert (killed.code, killed.ended) == (None, "killed")
    outcomes(one, {"first": "os.kill(1, 9)", "stop the first": "os.kill(1, 19)"})
    assert one.run(["sh", "-c", "echo on"], PATIENCE_S).stdout == b"on\n"
    everything = python(one, "import os; os.kill(-1, 9)")
    assert everything.ended == "killed"
    began = time.monotonic()
    stopped = python(one, "import os, time; os.kill(os.getppid(), 19); time.sleep(600)", 0.2)
    assert stopped.ended == "time"
    assert time.monotonic() - began < PATIENCE_S
    assert one.run(["sh", "-c", "echo on"], PATIENCE_S).stdout == b"on\n"


def test_a_transfer_that_is_stopped_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.sandboxes.sandbox._TRANSFER_S", 1.0)
    one = start()

    def put(stream: int) -> None:
        stop = "import os\nfor p in filter(str.isdigit, os.listdir('/proc')):\n    if int(p) not in (1, os.getpid(), os.getppid()): os.kill(int(p), 19)"
        assert python(one, stop).stderr == b""
        with suppress(BrokenPipeError), os.fdopen(stream, "wb") as out:
            out.write(bytes(8 << 20))

    with pytest.raises(SandboxError, match="ended the transfer"):
        one._transfer({"do": "write", "path": "/x", "mode": 0o644}, put, reads=False)
    assert one.run(["sh", "-c", "echo on"], PATIENCE_S).stdout == b"on\n"
