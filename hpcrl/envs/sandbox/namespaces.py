"""Namespaces for one program: files, processes, network and shared memory of its own, which go with it (man 7 namespaces).

They need no privileges where the kernel lets users make user namespaces; many do.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from typing import NoReturn

_NEW = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS and NEWCGROUP."""

_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
_READ_ONLY, _NO_SUID, _NO_DEVICES = (_FLAGS[name] for name in ("ro", "nosuid", "nodev"))
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG = 1
_CAPABILITIES = 0x20080522  # the version of the structure that is 64 bits wide

_libc = ctypes.CDLL(None, use_errno=True)


def enter(directory: str, readable: Iterable[str], size: int, files: int) -> None:
    """Let this process see nothing but `readable`, which it cannot change, and an empty directory in memory; its children have their own ids.

    Args:
        directory: where the empty one appears; what is there is hidden.
        size: bytes that fit into it.
        files: how many files do.

    Raises:
        OSError: the kernel does not let this user do that.
    """
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", directory, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,nr_inodes=1k,mode=755")
    for path in readable:
        _show(path, directory + path)
    _make_read_only(directory)
    os.makedirs(directory + directory, exist_ok=True)
    options = f"size={size},nr_inodes={files},mode=700"
    _mount("tmpfs", directory + directory, "tmpfs", _NO_SUID | _NO_DEVICES, options)
    _mount(None, directory, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chdir(directory)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir(directory)
    nothing = os.open(os.devnull, os.O_RDONLY)  # the other one is of a mount that can be written to
    os.dup2(nothing, 0)
    os.close(nothing)


def go_on_as_child() -> None:
    """Return in a process that nobody else sees and that sees nobody; its first process waits for it, and this one ends as it does."""
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        _end_like(os.read(read, 8))
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if program := os.fork():
        while (ended := os.wait())[0] != program:
            pass
        os.write(write, b"%d" % ended[1])
        os._exit(0)
    os.close(read)
    os.close(write)


def drop_capabilities() -> None:
    """Give up what the maker of a user namespace may do in it."""
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref((ctypes.c_uint32 * 2)(_CAPABILITIES, 0)), ctypes.byref(nothing)), "capset")


def _end_like(status: bytes) -> NoReturn:
    code = os.waitstatus_to_exitcode(int(status)) if status else -signal.SIGKILL
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _show(path: str, where: str) -> None:
    if os.path.isdir(path):
        os.makedirs(where, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(where), exist_ok=True)
        os.close(os.open(where, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, where, None, _BIND | _RECURSIVE)


def _make_read_only(root: str) -> None:
    """Make all mounts below read-only; the kernel lets nobody drop flags that they have."""
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split()[4:6] for line in file]
    for place, flags in mounts:
        place = place.encode().decode("unicode_escape")
        if place.startswith(f"{root}/"):
            kept = sum(_FLAGS.get(flag, 0) for flag in flags.split(","))
            device = 0 if place.startswith(f"{root}/dev/") else _NO_DEVICES
            _mount(None, place, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | device | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    what = f"mount of {source or kind or 'nothing'} at {target}"
    _check(_libc.mount(*given[:3], ctypes.c_ulong(flags), given[3]), what)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
