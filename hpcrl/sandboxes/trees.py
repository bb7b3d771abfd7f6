"""Directory trees of images and sandboxes as tar archives: written and read without leaving the tree by any name or link in it.

Owners are not kept, since everything belongs to the user, nor are setuid and setgid bits. Whiteouts are read in both forms: files `.wh.NAME`
of image layers (https://github.com/opencontainers/image-spec/blob/main/layer.md), which fuse-overlayfs makes too, and those of overlayfs, device
0:0 and an attribute. An archive of changes has the latter, so that each kind of overlay can go on from it.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import IO, Any, NamedTuple, cast

from hpcrl.errors import DataError

_HIDES, _HIDES_ALL = ".wh.", ".wh..wh..opq"
_OPAQUE = "user.overlay.opaque"
_OPAQUE_HEADER = f"SCHILY.xattr.{_OPAQUE}"
_MOST_LINKS, MOST_DEEP = 40, 256
_LARGEST_READ, _PIECE = 16 << 20, 1 << 20
_HEADERS, _PAGE = 4 << 10, 4 << 10
_IN_PLACE = 128  # from this length on, the target of a link has a page of its own in memory
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Whiteouts(Enum):
    """What an overlay keeps in its upper directory of what is removed: devices and attributes, or files `.wh.NAME`."""

    DEVICES = "devices"
    FILES = "files"


class TreeBounds(NamedTuple):
    """Largest tree that is read or written.

    Attributes:
        size: bytes of the files, in whole pages of memory.
        entries: files, directories and links.
    """

    size: int
    entries: int

    @property
    def archive(self) -> int:
        """Bytes of the archive, uncompressed: of the files, and of the headers with their names."""
        return self.size + _HEADERS * (self.entries + 1)


def write_tree(
    root: int, out: IO[bytes], bounds: TreeBounds, *, upper: Whiteouts | None = None, only: Sequence[str] = ()
) -> None:
    """Write a directory as a tar archive, whose bytes depend on its content alone. Sockets, devices and other filesystems below are left out.

    Args:
        root: descriptor of the directory.
        upper: whiteouts of the overlay whose upper directory it is, which are kept; None: it is none.
        only: absolute paths whose files, or whose directories with all below, are written; empty: all.

    Raises:
        DataError: it is larger than the bounds, or nested too deeply.
        OSError: a file cannot be read.
    """
    with tarfile.open(
        fileobj=cast(IO[bytes], _Bounded(out, bounds.archive)),
        mode="w|",
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        _Writer(tar, os.fstat(root).st_dev, bounds, upper, ChosenPaths(only)).write(root, "", 0)


class ChosenPaths:
    """Which paths of a tree are asked for, with all below them.

    Args:
        only: absolute paths; empty: all.

    Raises:
        DataError: one of them leads out of the tree.
    """

    def __init__(self, only: Sequence[str]) -> None:
        self._only = [tuple(_parts(path.lstrip("/"))) for path in only]

    def has(self, path: str) -> bool:
        """Return whether a path, without its first slash, is asked for."""
        parts = tuple(path.split("/"))
        return not self._only or any(parts[: len(one)] == one for one in self._only)

    def leads(self, path: str) -> bool:
        """Return whether something below a directory is asked for, and not all of it."""
        parts = tuple(path.split("/"))
        return any(one[: len(parts)] == parts for one in self._only)


class _Bounded:
    """A stream that takes no more bytes than a reader of the archive would."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left = stream, most

    def write(self, content: bytes) -> int:
        self._left -= len(content)
        if self._left < 0:
            raise DataError("the names of the files are too long, and their archive too large")
        return self._stream.write(content)


class _Writer:
    def __init__(
        self,
        tar: tarfile.TarFile,
        device: int,
        bounds: TreeBounds,
        upper: Whiteouts | None,
        only: ChosenPaths,
    ) -> None:
        self._tar, self._device, self._bounds, self._upper, self._only = tar, device, bounds, upper, only
        self._first, self._size, self._entries = dict[tuple[int, int], str](), 0, 0

    def write(self, folder: int, prefix: str, depth: int, *, whole: bool = False, alone: bool = False) -> None:
        """Write what is in a directory.

        Args:
            whole: all that is in it, whatever is chosen.
            alone: nothing that the lower directory has in it is seen; a chosen directory keeps that.
        """
        if depth > MOST_DEEP:
            raise DataError(f"directories are nested more than {MOST_DEEP} deep")
        for shown, name in sorted(self._names(folder).items()):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            info = tarfile.TarInfo(prefix + shown)
            info.mode = status.st_mode & 0o1777
            chosen = whole or self._only.has(info.name)
            if not chosen and not (stat.S_ISDIR(status.st_mode) and self._only.leads(info.name)):
                continue
            if self._describe(info, status, name, folder, removed=shown != name):
                hides = alone or _OPAQUE_HEADER in info.pax_headers
                if not whole and info.isdir():
                    info.pax_headers = {_OPAQUE_HEADER: "y"} if chosen and hides else {}
                self._count(info)
                try:
                    self._add(info, name, folder)
                    _forget_members(self._tar)
                    if info.isdir() and status.st_dev == self._device:
                        with _opened(name, folder) as inner:
                            self.write(inner, f"{info.name}/", depth + 1, whole=chosen, alone=hides and not chosen)
                except PermissionError as error:
                    raise DataError(
                        f"{info.name} may not be read by this user; who owns all files can add them"
                    ) from error

    def _names(self, folder: int) -> dict[str, str]:
        """Return what is in a directory, by the names that programs see or, of what is removed, saw."""
        names = os.listdir(folder)
        if self._upper is not Whiteouts.FILES:
            return dict(zip(names, names, strict=True))
        hiding = [name for name in names if _is_hiding(name)]
        for name in hiding:
            _expect_whiteout(name, folder)
        removed = {name.removeprefix(_HIDES): name for name in hiding if name != _HIDES_ALL}
        return removed | {name: name for name in names if not _is_hiding(name)}

    def _describe(
        self, info: tarfile.TarInfo, status: os.stat_result, name: str, folder: int, *, removed: bool
    ) -> bool:
        """Set type and size of an entry; return whether it is kept."""
        if self._upper and (removed or _is_whiteout(status)):
            info.type, info.mode = tarfile.CHRTYPE, 0
        elif stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
            if self._upper and _is_opaque(name, folder, self._upper):
                info.pax_headers = {_OPAQUE_HEADER: "y"}
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
        elif stat.S_ISREG(status.st_mode):
            info.size, info.mtime = status.st_size, int(status.st_mtime)  # of others, unpacking keeps none
            first = self._first.setdefault((status.st_dev, status.st_ino), info.name) if status.st_nlink > 1 else None
            if first not in (None, info.name):
                info.type, info.linkname, info.size = tarfile.LNKTYPE, cast(str, first), 0
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
        else:
            return False
        return True

    def _count(self, info: tarfile.TarInfo) -> None:
        self._entries += 1
        long = len(info.linkname.encode(errors="surrogateescape")) if info.issym() else 0
        used = long if long >= _IN_PLACE else info.size  # a file with holes has none when it is unpacked
        self._size += -(-used // _PAGE) * _PAGE
        if self._size > self._bounds.size or self._entries > self._bounds.entries:
            raise DataError(f"more than {self._bounds.size} bytes or {self._bounds.entries} files")

    def _add(self, info: tarfile.TarInfo, name: str, folder: int) -> None:
        if not info.isreg():
            return self._tar.addfile(info)
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DataError(f"{info.name} was replaced while it was read")
            return self._tar.addfile(info, file)


def read_tree(stream: IO[bytes], root: int, bounds: TreeBounds, *, upper: Whiteouts | None = None) -> None:
    """Unpack a tar archive, such as a layer of an image, over what is in a directory. Device nodes are left out.

    Names and links are resolved as if the directory were the root of all files. The user can read all of a layer, whatever the modes in it.

    Args:
        stream: the archive, uncompressed; read once, forward.
        root: descriptor of the directory.
        upper: how the whiteouts of an archive of an upper directory are made again; None: it is of a layer, whose whiteouts remove files.

    Raises:
        DataError: the archive is damaged, larger than the bounds, or has names that lead out of it.
        OSError: a file cannot be made.
    """
    forward = _Forward(stream, bounds.archive)
    reader = _Reader(root, bounds, upper)
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], forward), mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            while member := tar.next():
                _forget_members(tar)
                reader.place(member, tar)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"the archive is damaged: {error}") from error
    finally:
        reader.close()
    forward.finish()


class _Forward:
    """A stream that tarfile can read forward, of bounded size: a header may name gigabytes for itself."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most, self._at = stream, most, 0

    def read(self, size: int) -> bytes:
        if size > _LARGEST_READ:
            raise DataError(f"the archive has a header of {size} bytes")
        pieces, left = list[bytes](), size
        while left and (piece := self._stream.read(left)):
            pieces.append(piece)
            left -= len(piece)
        self._at += size - left
        if self._at > self._most:
            raise DataError(f"the archive has more than {self._most} bytes")
        return b"".join(pieces)

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> None:
        if position < self._at:
            raise DataError("the archive is damaged: it has a part before its beginning")
        while (left := position - self._at) > 0 and self.read(min(left, _PIECE)):
            pass

    def finish(self) -> None:
        """Read what follows the end of the archive, which belongs to its checksum."""
        while self.read(_PIECE):
            pass


class _Reader:
    def __init__(self, root: int, bounds: TreeBounds, upper: Whiteouts | None) -> None:
        self._root, self._bounds, self._upper = root, bounds, upper
        self._folder: tuple[str, int, str] | None = None
        self._made, self._size, self._entries = set[str](), 0, 0

    def close(self) -> None:
        if self._folder:
            os.close(self._folder[1])
        self._folder = None

    def place(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        self._entries += 1
        if self._entries > self._bounds.entries:
            raise DataError(f"the archive has more than {self._bounds.entries} files")
        parts = _parts(member.name)
        if not parts:
            return None
        if self._upper is Whiteouts.FILES and any(map(_is_hiding, parts)):
            raise DataError(f"fuse-overlayfs keeps no file {member.name!r:.200}: names in {_HIDES} are its own")
        folder, path = self._enter("/".join(parts[:-1]))
        name = parts[-1]
        if not self._upper and _is_hiding(name):
            return self._hide(name, folder, path)
        if member.isdev() and not member.isfifo() and not (self._upper and _hides(member)):
            return None
        self._made.add(path + name)
        self._clear(name, folder, member.isdir())
        self._make(member, name, folder, tar)
        return None

    def _make(self, member: tarfile.TarInfo, name: str, folder: int, tar: tarfile.TarFile) -> None:
        mode = member.mode & 0o1777
        if member.isdir():
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            with _opened(name, folder) as inner:
                os.fchmod(inner, mode if self._upper else mode | 0o700)
                if self._upper and _OPAQUE_HEADER in member.pax_headers:
                    self._make_opaque(inner)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.islnk():
            self._link(member, name, folder)
        elif member.isfifo():
            os.mkfifo(name, mode & 0o777, dir_fd=folder)
        elif member.isdev() and self._upper is Whiteouts.FILES:
            _touch(_HIDES + name, folder)
        elif member.isdev():
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)
        elif member.isreg():
            self._copy(member, name, folder, tar)
        else:
            raise DataError(f"the archive has {member.name!r:.200} of the unknown type {member.type!r}")

    def _make_opaque(self, folder: int) -> None:
        if self._upper is Whiteouts.FILES:
            _touch(_HIDES_ALL, folder)
        else:
            os.setxattr(folder, _OPAQUE, b"y")

    def _copy(self, member: tarfile.TarInfo, name: str, folder: int, tar: tarfile.TarFile) -> None:
        content = tar.extractfile(member)
        assert content, member.name
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            while piece := content.read(_PIECE):
                self._size += len(piece)
                if self._size > self._bounds.size:
                    raise DataError(f"the files of the archive have more than {self._bounds.size} bytes")
                file.write(piece)
            os.fchmod(descriptor, member.mode & 0o777 | (0 if self._upper else 0o400))
            file.flush()
            os.utime(descriptor, (member.mtime, member.mtime))

    def _link(self, member: tarfile.TarInfo, name: str, folder: int) -> None:
        *parents, last = _parts(member.linkname) or [""]
        kept = os.dup(folder)
        try:
            source, _ = self._enter("/".join(parents))
            os.link(last, name, src_dir_fd=source, dst_dir_fd=kept, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:  # others are of the node
            raise DataError(
                f"the archive links {member.name!r:.200} to {member.linkname!r:.200}: {error.strerror}"
            ) from error
        finally:
            os.close(kept)

    def _hide(self, name: str, folder: int, path: str) -> None:
        """Remove what lower layers have; what this layer itself has made stays."""
        hidden = os.listdir(folder) if name == _HIDES_ALL else [name.removeprefix(_HIDES)]
        for one in hidden:
            if one in ("", ".", ".."):
                raise DataError(f"the archive has the whiteout {name!r:.200}, which hides nothing")
            if path + one not in self._made:
                self._clear(one, folder, directory=False)
            elif name == _HIDES_ALL and stat.S_ISDIR(os.stat(one, dir_fd=folder, follow_symlinks=False).st_mode):
                with _opened(one, folder) as inner:
                    self._hide(name, inner, f"{path}{one}/")

    def _clear(self, name: str, folder: int, directory: bool) -> None:
        """Remove an entry, but a directory that another is to be merged with."""
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode) and directory:
            return
        remove_entry(name, folder)

    def _enter(self, name: str) -> tuple[int, str]:
        """Return the descriptor of a directory of the tree, and its path without links; it is made where it is missing."""
        if self._folder is None or self._folder[0] != name:
            self.close()
            self._folder = (name, *self._resolve(name))
        return self._folder[1], self._folder[2]

    def _resolve(self, name: str) -> tuple[int, str]:
        opened, path, left, links = [os.dup(self._root)], list[str](), name.split("/"), 0
        try:
            while left:
                part = left.pop(0)
                if part == ".." and path:
                    os.close(opened.pop())
                    path.pop()
                if part in ("", ".", ".."):
                    continue
                target = self._step(part, opened, name)
                if target is None:
                    path.append(part)
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise DataError(f"the archive has {name!r:.200} below links that lead in a circle")
                if target.startswith("/"):
                    while path:
                        os.close(opened.pop())
                        path.pop()
                left = target.split("/") + left
            return opened.pop(), "".join(f"{part}/" for part in path)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _step(self, part: str, opened: list[int], name: str) -> str | None:
        """Open the directory `part` of the last one, or return where the link of that name leads."""
        try:
            mode = os.stat(part, dir_fd=opened[-1], follow_symlinks=False).st_mode
        except FileNotFoundError:
            os.mkdir(part, 0o755, dir_fd=opened[-1])
            mode = stat.S_IFDIR
        if stat.S_ISLNK(mode) and not self._upper:
            return os.readlink(part, dir_fd=opened[-1])
        if not stat.S_ISDIR(mode) or len(opened) > MOST_DEEP:
            raise DataError(f"the archive has a file below {name!r:.200}, which is no directory, or nested too deeply")
        opened.append(os.open(part, _DIRECTORY, dir_fd=opened[-1]))
        return None


def remove_entry(name: str, folder: int) -> None:
    """Remove a file, or a directory with all that is in it; links are not followed."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        with _opened(name, folder) as inner:
            for one in os.listdir(inner):
                remove_entry(one, inner)
        os.rmdir(name, dir_fd=folder)


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _forget_members(tar: tarfile.TarFile) -> None:
    """Keep tarfile from keeping all of them."""
    cast(Any, tar).members = []


def _parts(name: str) -> list[str]:
    """Return the parts of a name in an archive. Raises DataError where it leads out of it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or len(parts) > MOST_DEEP or "\0" in name:
        raise DataError(f"the archive has the name {name!r:.200}, which leads out of it or is too long")
    return parts


def _hides(member: tarfile.TarInfo) -> bool:
    return member.ischr() and (member.devmajor, member.devminor) == (0, 0)


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_hiding(name: str) -> bool:
    return name.startswith(_HIDES)


def _expect_whiteout(name: str, folder: int) -> None:
    """Raise DataError for a file that a program has named so: it would be kept as the removal of another one."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or status.st_size or name.removeprefix(_HIDES) in ("", ".", ".."):
        raise DataError(f"fuse-overlayfs keeps no file {name!r:.200}: names in {_HIDES} are its own")


def _touch(name: str, folder: int) -> None:
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder))


def _is_opaque(name: str, folder: int, upper: Whiteouts) -> bool:
    with _opened(name, folder) as inner, suppress(OSError):
        if upper is Whiteouts.FILES:
            return bool(os.stat(_HIDES_ALL, dir_fd=inner, follow_symlinks=False))
        return os.getxattr(inner, _OPAQUE) == b"y"
    return False
