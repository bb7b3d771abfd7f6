"""The part of the kernel's FUSE protocol (linux/fuse.h, version 7.31) that serve.py speaks: requests, replies, notices."""

from __future__ import annotations

import os
import stat
from enum import IntEnum
from struct import Struct

VERSION = 7, 31
MAX_WRITE = 1 << 17


class Op(IntEnum):
    """What the kernel asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42
    RENAME2 = 45


# of requests; names that end with a zero byte follow where there are any
IN = Struct("<IIQQIIII")  # length, operation, request, node, uid, gid, pid
FORGET = Struct("<Q")
FORGET_ONE = Struct("<QQ")
GETATTR = Struct("<IIQ")  # flags, -, handle
SETATTR = Struct("<IIQQQQQQ8I")  # what, -, handle, size, lock owner, atime, mtime, ctime, their ns, mode, -, uid, gid
MKNOD = Struct("<IIII")
MKDIR = Struct("<II")
RENAME = Struct("<Q")
RENAME2 = Struct("<QII")
LINK = Struct("<Q")
OPEN = Struct("<II")
CREATE = Struct("<IIII")  # flags, mode, umask, -
READ = Struct("<QQIIQII")  # handle, offset, size
HANDLE = Struct("<Q")  # with which RELEASE, FSYNC and FLUSH begin

# of replies
OUT = Struct("<IiQ")  # length, minus errno, request
INIT_OUT = Struct("<IIIIHHIIHHI28x")
ENTRY_OUT = Struct("<QQQQII")  # node, generation, seconds of name and attributes, their ns; attributes follow
ATTR_OUT = Struct("<QII")  # seconds, ns, -; attributes follow
ATTR = Struct("<6Q10I")
OPEN_OUT = Struct("<QIi")
WRITE_OUT = Struct("<II")
STATFS_OUT = Struct("<5Q4I24x")
DIRENT = Struct("<QQII")  # inode, next offset, length of the name, type; name and padding follow

# of notices
NOTICE_INODE = 2
INODE = Struct("<Qqq")  # node, offset (negative: attributes alone), length

INIT_FLAGS = {"async_read": 1 << 0, "posix_locks": 1 << 1, "big_writes": 1 << 5, "flock_locks": 1 << 10}
GETATTR_HANDLE = 1
SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME, SET_HANDLE, SET_ATIME_NOW, SET_MTIME_NOW = (
    1 << bit for bit in range(9)
)
KEEP_CACHE, CACHE_DIR = 1 << 1, 1 << 3  # of replies to OPEN and OPENDIR


def split(seconds: float) -> tuple[int, int]:
    """Return whole seconds and nanoseconds."""
    return int(seconds), int(seconds % 1 * 1e9)


def attributes(of: os.stat_result) -> bytes:
    times = [divmod(ns, 10**9) for ns in (of.st_atime_ns, of.st_mtime_ns, of.st_ctime_ns)]
    whole, rest = [time[0] for time in times], [time[1] for time in times]
    owner = (of.st_mode, of.st_nlink, of.st_uid, of.st_gid, of.st_rdev, of.st_blksize, 0)
    return ATTR.pack(of.st_ino, of.st_size, of.st_blocks, *whole, *rest, *owner)


def dirent(name: str, inode: int, kind: int, following: int) -> bytes:
    """Return one entry of a listing; `kind` is a file type of `stat`, 0 where the filesystem does not tell."""
    encoded = os.fsencode(name)
    entry = DIRENT.pack(inode, following, len(encoded), stat.S_IFMT(kind) >> 12) + encoded
    return entry + bytes(-len(entry) % 8)


def names(body: memoryview) -> list[str]:
    """Return the names that a request ends with."""
    return [os.fsdecode(name) for name in bytes(body).split(b"\0")[:-1]]
