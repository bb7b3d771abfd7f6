"""Namespaces for programs: files, processes, network and shared memory of their own, which go with them (man 7 namespaces).

They need no privileges where the kernel lets users make user namespaces; many do.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from typing import NoReturn

MOUNTS, PROCESSES, _NEW_NETWORK = 0x20000, 0x20000000, 0x40000000
_NEW = 0x10000000 | MOUNTS | 0x8000000 | 0x4000000 | 0x2000000
"""CLONE_NEWUSER, NEWNS, NEWIPC, NEWUTS and NEWCGROUP."""

_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS = (_FLAGS[name] for name in ("ro", "nosuid", "nodev", "noexec"))
REMOUNT, BIND, RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG, _DROP_FROM_BOUNDS = 1, 24
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
    unshare(os.geteuid(), os.getegid(), network=False)
    leave(PROCESSES)
    mount("tmpfs", directory, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,nr_inodes=1k,mode=755")
    show(readable, directory)
    os.makedirs(directory + directory, exist_ok=True)
    options = f"size={size},nr_inodes={files},mode=700"
    mount("tmpfs", directory + directory, "tmpfs", NO_SUID | NO_DEVICES, options)
    mount(None, directory, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    change_root(directory)
    os.chdir(directory)
    nothing = os.open(os.devnull, os.O_RDONLY)  # the other one is of a mount that can be written to
    os.dup2(nothing, 0)
    os.close(nothing)


def unshare(user: int, group: int, *, network: bool) -> None:
    """Give this process namespaces of its own, but none of processes. No mount of it is seen outside.

    Args:
        user, group: its ids inside, the only ones there.
        network: whether it keeps the node's network.

    Raises:
        OSError: the kernel does not let this user do that.
    """
    outside = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW if network else _NEW | _NEW_NETWORK), "unshare")
    maps = (("setgroups", "deny"), ("uid_map", f"{user} {outside[0]} 1"), ("gid_map", f"{group} {outside[1]} 1"))
    for name, text in maps:
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    mount(None, "/", None, RECURSIVE | _PRIVATE)


def leave(namespace: int) -> None:
    """Leave the namespace of MOUNTS for a copy of it, or let the next child be the first of one of PROCESSES; that of users is this process's own.

    Raises:
        OSError: the kernel does not let this user do that.
    """
    _check(_libc.unshare(namespace), "unshare")


def show(paths: Iterable[str], directory: str) -> None:
    """Let files and directories be seen below a mounted directory, read-only, as is all that is mounted there."""
    for path in paths:
        _show(path, directory + path)
    _make_read_only(directory)


def unmount(directory: str) -> None:
    """Unmount a filesystem; what is open of it stays. Raises OSError, which names it."""
    _check(_libc.umount2(os.fsencode(directory), _DETACH), f"umount2 of {directory}")


def change_root(directory: str) -> None:
    """Make a mounted directory the root; what was mounted elsewhere cannot be reached by names any more."""
    os.chdir(directory)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


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


def drop_capabilities(but: int = 0, kept: int = 0) -> None:
    """Give up what the maker of a user namespace may do in it; its programs get nothing back when they start another.

    Args:
        but: capabilities that this process keeps, a bit for each, of the first 32.
        kept: those of them that a program has which this process starts.
    """
    capability = 0
    while kept >> capability & 1 or _libc.prctl(_DROP_FROM_BOUNDS, capability, 0, 0, 0) == 0:
        capability += 1
    sets = (ctypes.c_uint32 * 6)(but, but)  # effective and permitted
    _check(_libc.capset(ctypes.byref((ctypes.c_uint32 * 2)(_CAPABILITIES, 0)), ctypes.byref(sets)), "capset")


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
    mount(path, where, None, BIND | RECURSIVE)


def _make_read_only(root: str) -> None:
    """Make all mounts below read-only; the kernel lets nobody drop flags that they have."""
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = [line.split()[4:6] for line in file]
    for place, flags in mounts:
        place = os.fsdecode(place.decode("unicode_escape").encode("latin-1"))  # blanks are octal numbers
        if place.startswith(f"{root}/"):
            kept = sum(_FLAGS.get(flag, 0) for flag in flags.decode().split(","))
            device = 0 if place.startswith(f"{root}/dev/") else NO_DEVICES
            mount(None, place, None, REMOUNT | BIND | READ_ONLY | NO_SUID | device | kept)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a filesystem, or change a mount (man 2 mount). Raises OSError, which names both."""
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    what = f"mount of {source or kind or 'nothing'} at {target}"
    _check(_libc.mount(*given[:3], ctypes.c_ulong(flags), given[3]), what)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
