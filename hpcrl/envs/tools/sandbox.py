"""Runs a stranger's Python program with limits; python -I sandbox.py < PROGRAM

The limits are the kernel's, set by the process itself before the program begins, and hold for good: no other process and no thread,
no network, no signals to others (seccomp); no file but the interpreter's is read, and none written outside the working directory
(Landlock, Linux 5.13); processor time, memory and the size of a file (setrlimit). It needs no privileges and imports nothing of
hpcrl. A kernel that lacks one of the first two goes without; `missing` tells.
"""

import ctypes
import linecache
import os
import platform
import resource
import signal
import sys
import traceback
import types
from collections.abc import Sequence

SECONDS = 10
"""Processor time."""

MEMORY = 2**30
"""Bytes of address space."""

FILE = 16 * 2**20
"""Bytes of one file."""

_PDEATHSIG, _NO_NEW_PRIVILEGES, _SECCOMP, _GET_SECCOMP, _FILTER = 1, 38, 22, 21, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all machines
_EPERM = 1
# Names of linux/landlock.h: execute, write_file, read_file, read_dir, then remove and make of each kind, refer, truncate.
_READ_FILE, _READ_DIR, _FILE_RIGHTS = 0b1 | 0b100, 0b1000, 0b111 | 1 << 14
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/null")

# Machine -> its number (linux/audit.h), and the system calls that are refused: clone, clone3, fork, vfork, socket, io_uring_setup,
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open, pidfd_send_signal, ptrace, process_vm_writev, setrlimit,
# prlimit64, unshare, setns.
_REFUSED = {
    "x86_64": (0xC000003E, (56, 435, 57, 58, 41, 425, 62, 200, 234, 129, 297, 434, 424, 101, 311, 160, 302, 272, 308)),
    "aarch64": (0xC00000B7, (220, 435, 198, 425, 129, 130, 131, 138, 240, 434, 424, 117, 271, 164, 261, 97, 268)),
}
_X32 = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> list[str]:
    """Return what this kernel cannot keep a program from."""
    found = []
    if platform.machine() not in _REFUSED or _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) < 0:
        found.append("starting processes and opening connections (no seccomp)")
    if _landlock_version() < 1:
        found.append("reading and writing the files of your account (no Landlock)")
    return found


def confine() -> None:
    """Limit this process for good; it may write in its working directory only."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if version := max(0, _landlock_version()):
        _keep_to(os.getcwd(), version)
    if platform.machine() in _REFUSED and _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0:
        _refuse(*_REFUSED[platform.machine()])


def _landlock_version() -> int:
    return _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def _keep_to(directory: str, version: int) -> None:
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    handled = ctypes.c_uint64(rights)
    rules = _libc.syscall(ctypes.c_long(_CREATE_RULESET), ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in {*_READABLE, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        if os.path.exists(path):
            _allow(rules, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    _allow(rules, "/dev/null", rights & _FILE_RIGHTS)
    _allow(rules, directory, rights)
    if _libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("directory", ctypes.c_int32)]

    beneath = Beneath(rights, os.open(path, os.O_PATH | os.O_CLOEXEC))
    number, kind = ctypes.c_long(_ADD_RULE), ctypes.c_int(1)
    if _libc.syscall(number, ctypes.c_int(rules), kind, ctypes.byref(beneath), ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), f"landlock_add_rule: {path}")
    os.close(beneath.directory)


def _refuse(machine: int, calls: Sequence[int]) -> None:
    """Let these system calls fail with EPERM, by a program of the classic Berkeley packet filter."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000 | _EPERM
    checks = [(equal, len(calls) - number, 0, call) for number, call in enumerate(calls)]
    program = [
        (load, 0, 0, 4),  # the machine
        (equal, 1, 0, machine),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
        (at_least, len(checks) + 1, 0, _X32),
        *checks,
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("start", ctypes.POINTER(Instruction))]

    instructions = (Instruction * len(program))(*(Instruction(*line) for line in program))
    whole = Program(len(program), instructions)
    if _libc.prctl(_SECCOMP, _FILTER, ctypes.byref(whole), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def main() -> None:
    source = sys.stdin.buffer.read().decode(errors="replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # what dataclasses and pickle look into
    linecache.cache["<code>"] = (len(source), None, [f"{line}\n" for line in source.splitlines()], "<code>")
    confine()
    try:
        exec(compile(source, "<code>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  whatever the program raises is its own
        own = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this file
        traceback.print_exception(type(error), error, own)
        sys.exit(1)


if __name__ == "__main__":
    main()
