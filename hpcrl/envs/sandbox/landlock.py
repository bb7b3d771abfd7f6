"""The files that a confined program may use, by Landlock (Linux 5.13, man 7 landlock)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all machines
# Names of linux/landlock.h: execute, write_file, read_file, read_dir, then remove and make of each kind, refer, truncate.
_READ_FILE, _READ_DIR, _FILE_RIGHTS = 0b1 | 0b100, 0b1000, 0b111 | 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of Landlock that this kernel has, less than 1 where it has none."""
    return _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def keep_to(directory: str, readable: Iterable[str]) -> None:
    """Let this process write into the directory only, and read only what is `readable` beside it, for good; no_new_privs must be set.

    Raises:
        OSError: the kernel takes no rules.
    """
    rights = (1 << {1: 13, 2: 14}.get(version(), 15)) - 1
    handled = ctypes.c_uint64(rights)
    rules = _libc.syscall(ctypes.c_long(_CREATE_RULESET), ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    readonly = ((path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)) for path in readable)
    _allow(rules, [*readonly, ("/dev/null", rights & _FILE_RIGHTS), (directory, rights)])
    if _libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, beneath: Iterable[tuple[str, int]]) -> None:
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("directory", ctypes.c_int32)]

    for path, rights in beneath:
        rule = Beneath(rights, os.open(path, os.O_PATH | os.O_CLOEXEC))
        number, kind = ctypes.c_long(_ADD_RULE), ctypes.c_int(1)
        if _libc.syscall(number, ctypes.c_int(rules), kind, ctypes.byref(rule), ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule: {path}")
        os.close(rule.directory)
