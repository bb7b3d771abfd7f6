"""Runs a stranger's Python program, the process's standard input, with limits.

The limits are set by the process itself before the program begins, and hold for good. Namespaces: files, processes, network and shared
memory of its own, an empty directory in memory that goes with it. Landlock: no file but the interpreter's is read, and none written outside
that directory. Seccomp: only those system calls that computing needs. setrlimit: processor time, memory, the size and number of open files.

It imports nothing but the standard library: Python's start is most of what a program takes.
"""

from __future__ import annotations

import linecache
import os
import resource
import signal
import sys
import traceback
import types
from ctypes import CDLL

from hpcrl.envs.sandbox import landlock, namespaces, seccomp

SECONDS = 10
"""Processor time."""

MEMORY = 2**30
"""Bytes of address space."""

FILE = 16 * 2**20
"""Bytes of one file."""

DIRECTORY, FILES = 64 * 2**20, 4096
"""Bytes and number of all files; where there are no namespaces nobody counts them."""

OPEN = 128
"""Open files, pipes and the like at a time."""

_PDEATHSIG, _NO_NEW_PRIVILEGES = 1, 38


def confine() -> list[str]:
    """Limit this process for good, as far as this kernel can; return what it cannot keep it from. It may write in its working directory only."""
    libc = CDLL(None)
    libc.prctl(_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    directory, readable, lacking = os.getcwd(), _readable(), list[str]()
    try:
        namespaces.enter(directory, readable, DIRECTORY, FILES)
    except OSError as error:
        lacking.append(f"filling the disk and seeing names of files (no user namespaces: {error.strerror})")
    else:
        namespaces.go_on_as_child()
        namespaces.drop_capabilities()
    _set_limits()
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # which Landlock and seccomp ask for
    hidden = not lacking
    if landlock.version() >= 1:
        landlock.keep_to(directory, readable)
    elif not hidden:
        lacking.append("reading and writing the files of your account (no Landlock)")
    if seccomp.available():
        seccomp.refuse_all_others(attributes=hidden)
    else:
        lacking.append("starting processes, opening connections and signalling others (no seccomp)")
    return lacking


def _readable() -> list[str]:
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/null"]
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    return [path for path in dict.fromkeys(system + python) if os.path.exists(path)]


def _set_limits() -> None:
    for name, soft, hard in (
        (resource.RLIMIT_CPU, SECONDS, SECONDS + 1),
        (resource.RLIMIT_AS, MEMORY, MEMORY),
        (resource.RLIMIT_FSIZE, FILE, FILE),
        (resource.RLIMIT_NOFILE, OPEN, OPEN),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def main() -> None:
    """Run the program; with the argument --lacking list what this kernel cannot keep it from instead, a line each."""
    source = sys.stdin.buffer.read().decode(errors="replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # what dataclasses and pickle look into
    linecache.cache["<code>"] = (len(source), None, [f"{line}\n" for line in source.splitlines()], "<code>")
    lacking = confine()
    if sys.argv[1:] == ["--lacking"]:
        print("\n".join(lacking))
        return
    try:
        exec(compile(source, "<code>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  whatever the program raises is its own
        own = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this file
        traceback.print_exception(type(error), error, own)
        sys.exit(1)
