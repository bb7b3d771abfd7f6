"""What tests of sandboxes share: a small image of this machine's own programs, and an ordinary user where the tests are root's."""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.envs.sandbox import seccomp
from hpcrl.sandboxes import sandbox
from tests.paths import ROOT

PATIENCE_S = 60.0  # other tests have the cores
_USER = 54321
_READ_ALL = 1 << 2  # CAP_DAC_READ_SEARCH: the interpreter of the tests may be in root's home
_PROGRAMS = ("sh", "cat", "ls", "sleep", "ln", "rm", "mkdir", "mkfifo", "env", "tty", "stty", "chown", "tar")
_MODULES = "ctypes, encodings.ascii, encodings.idna, encodings.latin_1, errno, fcntl, io, json, mmap, os, resource, select, signal, site, socket, stat, struct, subprocess, sys, termios, threading, time"


TOKEN = "s3cret"


class Client:
    """Asks a server with one key."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {key}"}

    def ask(self, path: str, method: str = "POST", /, **body: Any) -> httpx.Response:
        content = json.dumps(body).encode() if method == "POST" else b""
        return httpx.request(method, self._url + path, content=content, headers=self._headers, timeout=PATIENCE_S)

    def start(self, **body: Any) -> Client:
        answer = self.ask("/start", image="tiny", **body)
        assert answer.status_code == 200, answer.text
        return Client(self._url, answer.json()["key"])

    def run(self, text: str, seconds: float = PATIENCE_S, **more: Any) -> tuple[dict[str, Any], str]:
        """Run a shell's command; return how it ended, and what it wrote."""
        *pieces, last = self.ask("/exec", command=["sh", "-c", text], seconds=seconds, **more).text.splitlines()
        contents = [base64.b64decode(content) for piece in pieces for content in json.loads(piece).values()]
        return json.loads(last), b"".join(contents).decode()

    def stream(self, text: str, seconds: float = 600.0) -> Any:
        body = json.dumps({"command": ["sh", "-c", text], "seconds": seconds})
        return httpx.stream("POST", f"{self._url}/exec", content=body, headers=self._headers, timeout=PATIENCE_S)


@contextmanager
def ordinary(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process, and those that it starts, be an ordinary user's. Skips where the kernel lets none make namespaces."""
    groups = os.getgroups()
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_USER, _USER, 0)
        os.setresuid(_USER, _USER, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        kept = (ctypes.c_uint32 * 6)()
        header = ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0))
        libc.capget(header, ctypes.byref(kept))
        kept[0] = _READ_ALL
        assert libc.capset(header, ctypes.byref(kept)) == 0
        reached = ["sh", "-c", 'exec "$0" -c ""', sys.executable]  # without the capability of this process
        if subprocess.run(reached, capture_output=True, check=False).returncode != 0:
            other = shutil.which("python3", path="/usr/bin:/usr/local/bin")
            if other is None:
                pytest.skip("ordinary users have no Python here")
            patch.setattr(sandbox, "_COMMAND", [other, *sandbox._COMMAND[1:]])
    try:
        if subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("ordinary users make no user namespaces here")
        yield
    finally:
        if os.getresuid()[2] == 0:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups(groups)


def found_fuse_overlayfs() -> str:
    """Return the path of fuse-overlayfs. Skips where it, or its device, is missing."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("users may not open /dev/fuse here")
    return shutil.which("fuse-overlayfs") or pytest.skip("fuse-overlayfs is not installed here")


_OF_ATTRIBUTES = "setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7"
_OF_DEVICES = "mknodat:259:33"
_OLDER = """
import ctypes, errno, os, sys
sys.path.insert(0, sys.argv[1])
from hpcrl.envs.sandbox import seccomp
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
seccomp._install(eval(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def on_older_kernel() -> list[str]:
    """Return what begins a sandbox as a kernel before 6.6 and 5.8 answers: without user attributes in memory, and devices of ordinary users."""
    column, _ = seccomp._MACHINES[os.uname().machine]
    lines: list[tuple[int, int, int, int]] = [(seccomp._LOAD, 0, 0, 0)]
    for number in seccomp._numbers(_OF_ATTRIBUTES, column).values():
        lines += [(seccomp._EQUAL, 0, 1, number), (seccomp._RETURN, 0, 0, seccomp._DO_NOTHING | errno.ENOTSUP)]
    (number,) = seccomp._numbers(_OF_DEVICES, column).values()
    lines += [
        (seccomp._EQUAL, 0, 3, number),
        (seccomp._LOAD, 0, 0, seccomp._low(2)),
        (seccomp._ANY_BIT, 0, 1, stat.S_IFCHR),
    ]
    lines += [(seccomp._RETURN, 0, 0, seccomp._REFUSE), (seccomp._RETURN, 0, 0, seccomp._ALLOW)]
    return [sandbox._COMMAND[0], "-I", "-S", "-c", _OLDER, str(ROOT), repr(lines), *sandbox._COMMAND]


def python_of_users() -> str:
    """Return the Python that the ordinary user of the tests has. Skips where it cannot import the packages of this one."""
    python = sandbox._COMMAND[0]
    shown = subprocess.run([python, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, check=True)
    if shown.stdout.decode().strip() != str(tuple(map(int, sys.version_info[:2]))):
        pytest.skip("the Python of ordinary users cannot import these packages")
    return python


def make_rootfs(path: Path, more: Sequence[str] = ()) -> Path:
    """Make a directory of an image with some programs of this machine, a small Python among them, and their libraries.

    Args:
        more: programs beside `_PROGRAMS`.
    """
    for name in ("bin", "dev", "proc", "tmp", "etc"):
        (path / name).mkdir(parents=True)
    (path / "etc" / "release").write_text("tiny\n")
    files = {f"/bin/{name}": os.path.realpath(_found(name)) for name in (*_PROGRAMS, *more)}
    python = os.path.realpath(_found("python3"))
    listing = (
        f"import {_MODULES}; [print(m.__file__) for m in list(sys.modules.values()) if getattr(m, '__file__', None)]"
    )
    listed = subprocess.run([python, "-I", "-S", "-c", listing], capture_output=True, text=True, check=True).stdout
    files |= {name: name for name in [python, *listed.splitlines()]}
    binaries = [name for name in files.values() if not name.endswith(".py")]
    needed = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    files |= {name: name for name in re.findall(r"(/\S+)\s+\(0x", needed)}
    for target, source in files.items():
        place = path / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    (path / "bin" / "python3").symlink_to(python)
    return path


def count_processes(word: str) -> int:
    """Return how many processes have a word in their command line; owners of sandboxes, which read their input, do not count."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            line = path.read_bytes()
            found += word.encode() in line and b"sys.stdin" not in line
    return found


def _found(program: str) -> str:
    return shutil.which(program, path="/usr/bin:/bin") or pytest.skip(f"no {program} here")
