"""Images of sandboxes: one compressed archive each on the shared filesystem, by checksum, and a name that leads to it."""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, cast

from hpcrl.errors import DamagedError, DataError, RunError, did_you_mean
from hpcrl.rundir.commit import children, make_directory, write_json
from hpcrl.rundir.records import as_record, damaged, read_object
from hpcrl.sandboxes.archives import Archive, Hashed, uncompressed, write_compressed
from hpcrl.sandboxes.sources import opened_source
from hpcrl.sandboxes.trees import TreeBounds, read_tree, write_tree

LARGEST = TreeBounds(size=64 << 30, entries=4_000_000)
"""Of an image."""

MOUNT_POINTS = "dev", "proc", "tmp"
"""Directories that every sandbox has."""

_APT, _AS_ROOT = "etc/apt/apt.conf.d", b'APT::Sandbox::User "root";\n'
_NAME, _DIGEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"), re.compile("[0-9a-f]{64}")
_REMEDY = "remove it by `hpcrl image rm` and add it again"


@dataclass(frozen=True)
class Image:
    """An image.

    Attributes:
        digest: SHA-256 of its archive, uncompressed.
        size: bytes of the archive, uncompressed.
        kind: what it was made of.
        environment: variables that it sets.
        directory: where its programs begin.
        added: seconds since 1970.
    """

    name: str
    digest: str
    size: int
    kind: str
    environment: dict[str, str]
    directory: str
    added: float


def _apt_layer() -> IO[bytes]:
    """Return a layer with which apt stays the only user that a sandbox has: it refuses to go on where it cannot become another one."""
    layer, file = io.BytesIO(), tarfile.TarInfo(f"{_APT}/99-sandbox")
    file.size = len(_AS_ROOT)
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.addfile(file, io.BytesIO(_AS_ROOT))
    layer.seek(0)
    return layer


class _Watched:
    """A stream each of whose reads may be refused."""

    def __init__(self, stream: IO[bytes], expect_open: Callable[[], None]) -> None:
        self._stream, self._expect_open = stream, expect_open

    def read(self, size: int) -> bytes:
        self._expect_open()
        return self._stream.read(size)


class ImageStore:
    """The images of a root of runs.

    Args:
        root: where runs are made; a shared filesystem.
    """

    def __init__(self, root: Path) -> None:
        self._path = root.absolute() / ".images"

    def add(self, name: str, source: Path | str, bounds: TreeBounds = LARGEST, temporary: Path | None = None) -> Image:
        """Add an image; one of the same content is stored once, whatever its names.

        Args:
            source, temporary: as of `opened_source`.

        Raises:
            DataError: the name is taken or wrong, or the source cannot be used.
        """
        if not _NAME.fullmatch(name):
            raise DataError(f"expected a name of letters, digits and . _ -, found {name!r:.100}")
        self._expect_free(name)
        make_directory(self._path)
        with opened_source(source, bounds, temporary) as found:
            made = self._pack(found.tree, bounds)
        image = Image(name, made.digest, made.size, found.kind, found.environment, found.directory, time.time())
        try:
            with self._locked():
                self._expect_free(name)
                os.replace(made.path, self.archive(image))
                write_json(self._record(name), asdict(image))
        except BaseException:
            made.path.unlink(missing_ok=True)
            raise
        return image

    def names(self) -> list[str]:
        """Return the names of all images, in order."""
        return sorted(name.removesuffix(".json") for name in children(self._path) if name.endswith(".json"))

    def list(self) -> list[Image]:
        """Return all images, by name."""
        return [self.find(name) for name in self.names()]

    def find(self, name: str) -> Image:
        """Return an image.

        Raises:
            DataError: there is none of this name.
            RunError: its record is damaged.
        """
        path = self._record(name)
        record = read_object(path, _REMEDY) if _NAME.fullmatch(name) else None
        if record is None:
            known = self.names()
            raise DataError(
                f"there is no image {name!r:.100}{did_you_mean(name, known)}; "
                f"`hpcrl image add NAME SOURCE` stores one; there are: {', '.join(known) or 'none'}"
            )
        image = as_record(Image, record, path, _REMEDY)
        if not _DIGEST.fullmatch(image.digest):
            raise damaged(path, f"'digest' is {image.digest!r:.80}", _REMEDY)
        return image

    def remove(self, name: str) -> None:
        """Remove a name, and its archive where no other name leads to it. Sandboxes that have begun go on."""
        with self._locked():
            try:
                image = self.find(name)
            except RunError:  # of a damaged record nobody knows the archive; adding it again replaces both
                return self._record(name).unlink()
            others = {other.digest for other in self.list() if other.name != name}  # before anything is removed
            self._record(name).unlink()
            if image.digest not in others:
                self.archive(image).unlink(missing_ok=True)
            return None

    def archive(self, image: Image) -> Path:
        """Return the file of an image."""
        return self._path / f"{image.digest}.tar.gz"

    def unpack(self, image: Image, directory: Path, expect_open: Callable[[], None] = lambda: None) -> Path:
        """Return the directory of an image below that of a node, unpacked once by whichever process is first.

        Args:
            expect_open: is called before each read, and raises where the node ends meanwhile.

        Raises:
            DamagedError: the archive is not the one that was added.
        """
        place = directory / image.digest
        with (directory / f"{image.digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                with tempfile.TemporaryDirectory(prefix=f"{image.digest}.", dir=directory) as partial:
                    tree = Path(partial) / "tree"
                    tree.mkdir()
                    self._unpack(image, tree, expect_open)
                    tree.rename(place)
        return place

    @staticmethod
    def set_aside(directory: Path, used: Collection[str]) -> list[Path]:
        """Give the directories of images that are unpacked below that of a node other names, so that they can be removed; return these.

        Args:
            used: digests of the images that stay.
        """
        found = [path for path in directory.iterdir() if _DIGEST.fullmatch(path.name) and path.name not in used]
        return [path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}")) for path in found]

    def _unpack(self, image: Image, tree: Path, expect_open: Callable[[], None]) -> None:
        path, root = self._readable(image), os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with uncompressed(path) as stream:
                hashed = Hashed(cast(IO[bytes], _Watched(stream, expect_open)))
                read_tree(cast(IO[bytes], hashed), root, TreeBounds(image.size, LARGEST.entries))
            if (tree / _APT).is_dir():
                read_tree(_apt_layer(), root, TreeBounds(1 << 16, 1))
        except DataError as error:
            raise DamagedError(f"{path}: {error}; {_REMEDY}") from error
        finally:
            os.close(root)
        if hashed.digest() != image.digest:
            raise DamagedError(f"{path} has changed: expected the checksum {image.digest}; {_REMEDY}")
        for name in MOUNT_POINTS:
            (tree / name).mkdir(exist_ok=True)

    def _readable(self, image: Image) -> Path:
        path = self.archive(image)
        try:
            path.open("rb").close()
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing; {_REMEDY}") from error
        except PermissionError as error:
            raise DataError(f"{path} may not be read by this user; its owner lets others: chmod a+r {path}") from error
        return path

    def _pack(self, tree: Path, bounds: TreeBounds) -> Archive:
        """Write a tree into a file beside the archives."""
        for name in MOUNT_POINTS:
            if (tree / name).is_symlink() or ((tree / name).exists() and not (tree / name).is_dir()):
                raise DataError(f"/{name} of the image is no directory, which sandboxes need")
        root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return write_compressed(self._path, lambda out: write_tree(root, out, bounds))
        finally:
            os.close(root)

    def _expect_free(self, name: str) -> None:
        if self._record(name).exists():
            raise DataError(f"there is an image {name} already: choose another name, or `hpcrl image rm {name}`")

    def _record(self, name: str) -> Path:
        return self._path / f"{name}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_directory(self._path)
        with (self._path / "lock").open("w") as lock:
            with suppress(OSError):  # a filesystem without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
