"""The files of a sandbox by fuse-overlayfs (https://github.com/containers/fuse-overlayfs), on nodes whose own overlayfs cannot hold them.

It is a program of the node, which answers what programs of a stranger ask of their files. So it is confined too: it reads and changes the
files of the sandbox, reads the system's libraries, and sees nothing else of the node. It has a pid namespace of its own, beside that of the
sandbox, whose programs neither see nor signal it.

Other ways were weighed. Without attributes overlayfs cannot replace a directory, and Linux 4.18 lets no user mount it. Copies of an image need
its size in memory for each sandbox. Disks bound a directory by project quotas only, which administrators set.

Changes are kept as `.wh.` files, for an older kernel keeps neither devices of ordinary users nor attributes in memory.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from contextlib import suppress
from ctypes import CDLL
from typing import NoReturn

from hpcrl.envs.sandbox import namespaces, seccomp

_DEVICE = "/dev/fuse"
_SYSTEM = "/usr", "/lib", "/lib64", "/etc/ld.so.cache"
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: programs have files open whose mode is 0
_ANY_FILE = 1 << 1 | 1 << 2
_PDEATHSIG, _NO_NEW_PRIVILEGES = 1, 38
_OWN = namespaces.NO_SUID | namespaces.NO_DEVICES
# a write is in memory when it returns, or fails: no error comes later, and a snapshot finds it
_OPTIONS = "lowerdir=/lower,upperdir=/upper,workdir=/work,writeback=0,noacl,noxattrs=1,threaded=0"
DOES_NOT_START = "does not start"
_SYSTEM_ONLY = (
    "it finds libraries in /usr, /lib and /lib64 only: install the system's package, with libfuse 3.3 or newer"
)
_MOST_SAID = 500
_ENVIRONMENT = {"FUSE_OVERLAYFS_DISABLE_OVL_WHITEOUT": "1"}

_libc = CDLL(None, use_errno=True)


def serve_layers(program: str, place: str, memory: int) -> int:
    """Mount the layers as `root`, and start the process that serves them; return a descriptor of its status, as of /proc.

    A child of this process ends with the one that serves, and both end with this process.

    Args:
        program: path of fuse-overlayfs.
        place: the working directory, a mounted one that has `lower`, `upper`, `work` and `root`.
        memory: bytes that it may have.

    Raises:
        OSError: this node does not let its user do that. It may be raised in the new processes.
    """
    try:
        device = os.open(_DEVICE, os.O_RDWR)
    except FileNotFoundError as error:
        raise OSError(errno.ENODEV, f"there is no {_DEVICE}") from error
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,default_permissions"
    namespaces.mount(_DEVICE, "root", "fuse", _OWN, options)
    (read, write), (said, errors) = os.pipe(), os.pipe()
    if os.fork() == 0:
        _start(program, place, memory, device, write, errors)
    # who else has the device would keep requests waiting when that process is gone
    for descriptor in (device, write, errors):
        os.close(descriptor)
    served = os.read(read, 32)
    os.close(read)
    if not served:
        os._exit(1)  # the child has sent the reason
    _expect_files(program, said)
    os.close(said)
    return os.open(f"/proc/{int(served)}/status", os.O_RDONLY)


def _expect_files(program: str, said: int) -> None:
    """Wait until the program serves files. Raises OSError, with what it has written to `said`, where it ends before."""
    try:
        os.statvfs("root")
    except OSError as error:
        os.set_blocking(said, False)
        with suppress(BlockingIOError):
            if text := os.read(said, _MOST_SAID).decode(errors="replace").split():
                raise _not_started(program, " ".join(text)) from error
        raise OSError(error.errno, f"{program} ended before it served files: {error}") from error


def _not_started(program: str, why: str) -> OSError:
    return OSError(errno.ENOEXEC, f"{program} {DOES_NOT_START} ({why}); {_SYSTEM_ONLY}")


def _start(program: str, place: str, memory: int, device: int, write: int, errors: int) -> NoReturn:
    """Start the process that serves, write its number, and wait for its end."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    namespaces.leave(namespaces.PROCESSES)
    served = os.fork()
    if served == 0:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL)
        _serve(program, place, memory, device, errors)
    os.write(write, b"%d" % served)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.wait()
    os._exit(0)


def _serve(program: str, place: str, memory: int, device: int, errors: int) -> NoReturn:
    """Become fuse-overlayfs, confined for good."""
    opened = os.open(program, os.O_RDONLY)  # where it lies is not seen any more
    namespaces.leave(namespaces.MOUNTS)
    namespaces.unmount("root")  # it would wait for itself
    os.mkdir("proc")
    namespaces.mount("proc", "proc", "proc", _OWN | namespaces.NO_PROGRAMS)
    namespaces.show(filter(os.path.exists, _SYSTEM), place)
    namespaces.change_root(place)
    for name, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),  # it starts no process and no thread
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(name, (most, most))
    namespaces.drop_capabilities(_ANY_FILE, kept=_ANY_FILE)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    seccomp.refuse_dangerous()
    os.set_inheritable(os.dup(1), True)  # its end is seen by that
    os.dup2(0, 1)
    os.dup2(errors, 2)  # read until it serves; later writes fail, and end nothing
    os.set_inheritable(device, True)
    try:
        # libfuse takes what is mounted already since 3.3
        os.execve(opened, [program, "-f", "-o", _OPTIONS, f"/dev/fd/{device}"], _ENVIRONMENT)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOEXEC):  # its loader, or what interprets it, is elsewhere
            raise _not_started(program, str(error)) from error
        raise
