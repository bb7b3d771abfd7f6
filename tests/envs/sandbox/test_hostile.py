"""Programs that want to harm: each system call that nobody needs, and by its class each way out that was found or thought of; what comes of it.

In both ways of being confined: with namespaces, and by Landlock and seccomp alone, as where the kernel lets users make no namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hpcrl.envs.sandbox import landlock, seccomp
from hpcrl.envs.tools import python as python_program
from hpcrl.envs.tools.python import lacking, run_python
from tests.envs.sandbox.material import CALL, without_namespaces

pytestmark = pytest.mark.skipif(not seccomp.available(), reason="no seccomp")

PATIENCE_S = 60.0  # other tests have the cores
REFUSED = "refused"  # EPERM, EACCES
HIDDEN = "hidden"  # ENOENT: it is not there
HELD = "held"  # a limit holds
DONE = "done"


_OUTCOMES = """
import errno
KINDS = {errno.EPERM: "refused", errno.EACCES: "refused", errno.EROFS: "refused", errno.EXDEV: "refused", errno.ENOENT: "hidden",
         errno.ENOTDIR: "hidden", errno.EMFILE: "held", errno.EFBIG: "held", errno.ENOSPC: "held", errno.ENOMEM: "held"}
def outcome(code):
    try:
        exec(code, {})
        return "done"
    except OSError as error:
        return KINDS.get(error.errno, repr(error))
    except (RuntimeError, MemoryError) as error:
        return "held"
    except ValueError as error:  # what Python's resource says
        return "refused" if "not allowed to raise" in str(error) else repr(error)
"""


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "namespaces" and any("namespaces" in what for what in lacking()):
        pytest.skip("no user namespaces")
    if request.param == "landlock" and landlock.version() < 1:
        pytest.skip("no Landlock")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "landlock":
            patch.setattr(python_program, "_COMMAND", [*without_namespaces(), *python_program._COMMAND])
        yield request.param


def outcomes(codes: Mapping[str, str]) -> dict[str, str]:
    """Run programs one after the other in one process and return what came of each."""
    tried = {name: CALL + code for name, code in codes.items()}
    ran = run_python(
        f"{_OUTCOMES}\nimport json\nfor name, code in {tried!r}.items():\n    print(json.dumps([name, outcome(code)]), flush=True)",
        PATIENCE_S,
    )
    found = dict(json.loads(line) for line in ran.output.splitlines() if line.startswith("["))
    assert found.keys() == codes.keys(), ran
    return found


def test_what_is_readable_stays_as_it_is_below_a_directory_of_any_name(tmp_path: Path) -> None:
    if any("namespaces" in what for what in lacking()):
        pytest.skip("no user namespaces")
    place, readable = tmp_path / "jos\u00e9's data", tmp_path / "readable"
    place.mkdir()
    readable.mkdir()
    code = """
import sys
from hpcrl.envs.sandbox import namespaces
namespaces.enter(sys.argv[1], ["/dev/null", sys.argv[2]], 1 << 20, 100)
open(sys.argv[2] + "/x", "w")
"""
    done = subprocess.run([sys.executable, "-c", code, place, readable], capture_output=True, text=True, check=False)
    assert "Read-only file system" in done.stderr, done
    assert not list(readable.iterdir())


def test_every_call_that_is_not_needed_is_refused(way: str) -> None:  # noqa: ARG001
    column = seccomp._MACHINES[os.uname().machine][0]
    known = seccomp._numbers(seccomp._FREE + seccomp._OF_FILES + seccomp._CHECKED, column)
    # the kernel asks no filter about uretprobe and uprobe of x86-64, and ends who calls them from elsewhere than a probe
    others = sorted(set(range(600)) - set(known.values()) - {335, 336})
    ran = run_python(f"""
import ctypes
libc, odd = ctypes.CDLL(None, use_errno=True), []
for number in {others}:
    ctypes.set_errno(0)
    if (libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1):
        odd.append(number)
print(len({others}), odd)
""")
    assert ran.output == f"{len(others)} []\n"
    assert len(others) > 400


PROCESSES = {
    "fork": "os.fork()",
    "bomb": "while True: os.fork()",
    "vfork": "call('vfork')",
    "thread": "import threading; threading.Thread(target=print).start()",
    "spawn": "import subprocess; subprocess.run(['sleep', '30'])",
    "posix_spawn": "os.posix_spawn('/bin/sleep', ['sleep', '30'], {})",
    "multiprocessing": "import multiprocessing as m; m.Process(target=print).start()",
    "exec": "os.execv('/bin/true', ['true'])",
    "fexec": "os.execve(os.open('/bin/true', os.O_RDONLY), ['true'], {})",
    "new session": "os.setsid()",
    "other group": "os.setpgid(0, 0)",
    "user namespace": "call('unshare', 0x10000000)",
    "back to the host": "call('setns', 0, 0)",
    "personality": "call('personality', 0x0040000)",
    "subreaper": "call('prctl', 36, 1, 0, 0, 0)",
    "outlive the parent": "call('prctl', 1, 0, 0, 0, 0)",
    "new privileges": "call('prctl', 38, 0, 0, 0, 0)",
    "a second filter": "call('prctl', 22, 1, 0, 0, 0)",
    "dumpable": "call('prctl', 4, 1, 0, 0, 0)",
    "root": "os.setuid(0)",
    "another user": "os.setresuid(1, 1, 1)",
    "groups": "os.setgroups([0])",
}

SIGNALS = {
    "kill the parent": "os.kill(os.getppid() or -1, 9)",
    "kill its group": "os.kill(0, 9)",
    "kill all": "os.kill(-1, 9)",
    "kill init": "os.kill(1, 9)",
    "killpg": "os.killpg(os.getpgrp() or 1, 9)",
    "tgkill": "call('tgkill', 1, 1, 9)",
    "pidfd": "os.pidfd_open(1)",
    "queue": "call('sigqueue', 1, 9, 0)",
    "owner of a pipe": "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, 1)",
    "group that owns a pipe": "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, -1)",
    "owner, extended": "import fcntl; fcntl.fcntl(os.pipe()[0], 15, b'\\0' * 8)",
    "signal of a pipe": "import fcntl; fcntl.fcntl(os.pipe()[0], 10, 9)",
    "asynchronous pipe": "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | 0x2000)",
    "asynchronous by ioctl": "import fcntl; fcntl.ioctl(os.pipe()[0], 0x5452, b'\\1\\0\\0\\0')",
    "owner by ioctl": "import fcntl; fcntl.ioctl(os.pipe()[0], 0x8901, b'\\1\\0\\0\\0')",
    "lease": "import fcntl; fcntl.fcntl(os.open('f', os.O_CREAT | os.O_RDWR), 1024, 1)",
    "notify": "import fcntl; fcntl.fcntl(os.open('.', os.O_RDONLY), 1026, 1)",
    "inotify": "call('inotify_init')",
    "timer of another": "call('timer_create', 0, None, ctypes.byref(ctypes.c_void_p()))",
}

OTHERS = {
    "ptrace": "call('ptrace', 16, 1, 0, 0)",
    "read memory": "call('process_vm_readv', 1, None, 0, None, 0, 0)",
    "write memory": "call('process_vm_writev', 1, None, 0, None, 0, 0)",
    "nice all": "os.setpriority(os.PRIO_USER, 0, 19)",
    "nice": "os.nice(1)",
    "scheduler": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "affinity": "os.sched_setaffinity(1, [0])",
    "io priority": "call('syscall', 251 if os.uname().machine == 'x86_64' else 30, 1, 0, 0)",
    "limits of another": "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (1, 1))",
    "own limits": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 64))",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0.0)",
    "adjust the clock": "call('adjtimex', None)",
    "host name": "call('sethostname', b'x', 1)",
    "swap": "call('swapoff', b'/x')",
    "reboot": "call('reboot', 0)",
    "kernel log": "call('klogctl', 3, None, 0)",
    "keys": "call('syscall', 250 if os.uname().machine == 'x86_64' else 219, 0, 0, 0, 0, 0)",
    "bpf": "call('syscall', 321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0)",
    "perf": "call('syscall', 298 if os.uname().machine == 'x86_64' else 241, 0, 0, 0, 0, 0)",
    "userfaultfd": "call('syscall', 323 if os.uname().machine == 'x86_64' else 282, 0)",
    "io_uring": "call('syscall', 425, 1, 0)",
}

NETWORK = {
    "tcp": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "ipv6": "import socket; socket.socket(socket.AF_INET6)",
    "unix": "import socket; socket.socket(socket.AF_UNIX)",
    "raw": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "import socket; socket.socket(16, socket.SOCK_RAW)",
    "vsock": "import socket; socket.socket(40)",
    "url": "import urllib.request as u, urllib.error\ntry: u.urlopen('http://127.0.0.1')\nexcept urllib.error.URLError as error: raise error.reason",
    "name": "import socket\ntry: socket.getaddrinfo('localhost', 80, socket.AF_INET)\nexcept socket.gaierror: raise PermissionError(1, 'name')\nraise PermissionError(1, 'no connection follows')",
    "a pair of another kind": "import socket; socket.socketpair(socket.AF_INET)",
    "datagram to a path": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '/run/systemd/notify')",
    "message to a path": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendmsg([b'x'], [], 0, '/run/systemd/notify')",
    "bind": "import socket; socket.socketpair()[0].bind('s')",
    "connect": "import socket; socket.socketpair()[0].connect('s')",
    "listen": "import socket; socket.socketpair()[0].listen()",
}

MEMORY = {
    "much": "bytearray(4 * 2**30)",
    "little by little": "x = []\nwhile True: x.append(bytearray(2**26))",
    "mapped": "import mmap; mmap.mmap(-1, 2 * 2**30)",
    "memfd": "os.memfd_create('x')",
    "secret memory": "call('syscall', 447, 0)",
    "shared memory": "call('shmget', 0, 1 << 20, 0o1600)",
    "semaphores": "call('semget', 0, 1, 0o1600)",
    "messages": "call('msgget', 0, 0o1600)",
    "posix shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=1 << 20)",
    "posix semaphore": "from multiprocessing import Lock; Lock()",
    "posix queue": "call('syscall', 240 if os.uname().machine == 'x86_64' else 180, b'q', 66, 0o600, 0)",
    "dev shm": "open('/dev/shm/x', 'w')",
    "locked": "call('mlock', ctypes.create_string_buffer(1 << 20), 1 << 20)",
    "large pipes": "import fcntl; fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "many pipes": "x = []\nwhile True: x.append(os.pipe())",
    "many sockets": "import socket\nx = []\nwhile True: x.append(socket.socketpair())",
    "huge file": "f = open('big', 'wb')\nwhile True: f.write(b'x' * 2**20)",
}


@pytest.mark.parametrize(
    ("codes", "differing"),
    [
        (PROCESSES, {"thread": HELD}),
        (SIGNALS, {}),
        (OTHERS, {}),
        (NETWORK, {}),
        (
            MEMORY,
            dict.fromkeys(["much", "little by little", "mapped", "many pipes", "many sockets", "huge file"], HELD),
        ),
    ],
    ids=["processes", "signals", "others", "network", "memory"],
)
def test_what_is_refused(way: str, codes: dict[str, str], differing: dict[str, str]) -> None:
    found = outcomes(codes)
    expected = dict.fromkeys(codes, REFUSED) | differing
    hidden = {
        name for name, came in found.items() if came == HIDDEN and way == "namespaces"
    }  # what is not there is refused as well
    assert {name: came for name, came in found.items() if name not in hidden} == {
        name: came for name, came in expected.items() if name not in hidden
    }
    assert hidden <= {"dev shm", "posix shared memory", "posix semaphore"}


def test_files_of_the_account_are_neither_seen_nor_changed(way: str, tmp_path: Path) -> None:  # noqa: ARG001
    secret, place = tmp_path / "secret", str(tmp_path)
    secret.write_text("s3cret")
    secret.chmod(0o600)
    os.utime(secret, (1, 1))
    before = secret.stat()
    path = repr(str(secret))
    codes = {
        "read": f"open({path}).read()",
        "write": f"open({path}, 'w')",
        "append": f"open({path}, 'a')",
        "remove": f"os.remove({path})",
        "truncate": f"os.truncate({path}, 0)",
        "rename": f"os.rename({path}, 'here')",
        "rename over": f"open('mine', 'w').close(); os.rename('mine', {path})",
        "link": f"os.link({path}, 'here')",
        "read a link": f"os.symlink({path}, 'to'); open('to').read()",
        "write a link": f"os.symlink({path}, 'to2'); open('to2', 'w')",
        "remove by descriptor": f"os.unlink('secret', dir_fd=os.open({place!r}, os.O_PATH)); print()",
        "list": f"os.listdir({place!r})",
        "make a directory": f"os.mkdir({str(tmp_path / 'new')!r})",
        "make a file": f"open({str(tmp_path / 'file')!r}, 'w')",
        "mode": f"os.chmod({path}, 0o666)",
        "mode by descriptor": f"os.fchmod(os.open({path}, os.O_PATH), 0o666)",
        "mode of the standard input": "os.fchmod(0, 0o666)",
        "owner": f"os.chown({path}, 0, 0)",
        "times": f"os.utime({path}, (9, 9))",
        "attribute": f"os.setxattr({path}, 'user.x', b'1')",
        "remove an attribute": f"os.removexattr({path}, 'user.x')",
        "node": "os.mknod('zero', 0o20666, os.makedev(1, 5))",
        "queue": "os.mkfifo('queue')",
        "environment of the parent": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "memory of the parent": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        "own environment": "open('/proc/self/environ', 'rb').read()",
        "root by proc": f"open('/proc/self/root' + {path})",
        "passwords": "open('/etc/passwd').read()",
        "devices": "open('/dev/mem', 'rb')",
        "terminal": "open('/dev/tty', 'w')",
        "up": "open('../../../../../etc/passwd').read()",
        "interpreter": f"open({os.__file__!r}, 'a')",
        "library": "open('/usr/lib/x', 'w')",
        "tree": f"import shutil; shutil.rmtree({place!r})",
        "mount": "call('mount', b'/', b'.', None, 4096, None)",
        "unmount": "call('umount2', b'/', 2)",
        "new root": "os.chroot('.')",
        "handle": "call('name_to_handle_at', -100, b'/', None, None, 0)",
        "quota": "call('syscall', 179 if os.uname().machine == 'x86_64' else 60, 0, 0, 0, 0)",
        "core": "import resource as r; r.setrlimit(r.RLIMIT_CORE, (1, 1))",
    }
    found = outcomes(codes)
    assert set(found.values()) <= {REFUSED, HIDDEN}, found
    after = secret.stat()
    assert secret.read_text() == "s3cret"
    assert (after.st_mode, after.st_mtime, after.st_ino, after.st_uid) == (
        before.st_mode, before.st_mtime, before.st_ino, before.st_uid,
    )  # fmt: skip
    assert sorted(tmp_path.iterdir()) == [secret]
    assert os.stat(os.devnull).st_mode & 0o777 == 0o666


def test_what_a_program_leaves_is_removed(
    way: str,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    codes = [
        "import os\nos.mkdir('closed', 0)\nos.umask(0o777); os.mkdir('too'); open('file', 'w').close()",
        "import os\nfor _ in range(1100):\n    os.mkdir('d'); os.chdir('d')",
        "import os\nfor n in range(50): os.symlink('/', f'to{n}')",
        "open('-rf', 'w').close(); open('* \\n', 'w').close()",
    ]
    for code in codes:
        assert not run_python(code).failed, code
    assert not list(tmp_path.iterdir())
    assert Path("/usr").is_dir()


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "it took more than 1 s"),
        ("import time; time.sleep(60)", "it took more than 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "it took more than 1 s"),
        ("import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass", "it took more than 1 s"),
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
        ("import os; os.abort()", "signal SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
    ],
)  # fmt: skip
def test_nothing_is_left_of_what_does_not_end(
    way: str,  # noqa: ARG001
    code: str,
    ended: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # told by its processes, whoever is their parent
    started = time.monotonic()
    ran = run_python(code, 1.0 if "1 s" in ended else PATIENCE_S)
    assert (ran.failed, ran.ended) == (True, ended)
    while any(str(tmp_path).encode() in _environment(path) for path in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() - started < PATIENCE_S
        time.sleep(0.05)
    assert time.monotonic() - started < PATIENCE_S


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_two_programs_see_nothing_of_each_other(way: str) -> None:
    one = run_python("import os; open('mine', 'w').close(); print(os.getcwd())").output.strip()
    assert outcomes({"other": f"os.listdir({one!r})"})["other"] in (REFUSED, HIDDEN)
    found = run_python("import os; print(os.getpid(), os.getppid())").output.split()
    if way == "namespaces":
        assert found == ["2", "1"]


def test_what_a_node_lacks_is_told(way: str) -> None:
    lacking.cache_clear()
    try:
        assert [what.partition(" (")[0] for what in lacking()] == (
            [] if way == "namespaces" else ["filling the disk and seeing names of files"]
        )
    finally:
        lacking.cache_clear()
