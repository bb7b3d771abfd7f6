"""Reads the index of a checkpoint's tensors, `.metadata`, which torch writes as a pickle, as data that cannot run code.

A pickle names functions and classes, and loading it calls them. This reader knows what torch names in the index of tensors, and calls
none of it: each object becomes an `Object`, which keeps what the file says of it. It needs no torch.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

from hpcrl.errors import CommitError
from hpcrl.rundir.commit import open_file

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
_KNOWN = re.compile(
    rf"{_DCP}\.metadata\.(Metadata|MetadataIndex|TensorStorageMetadata|ChunkStorageMetadata|TensorProperties|StorageMeta"
    # what torch would unpickle itself, were it asked for: checkpoints of hpcrl 0.1 have some that nothing asks for
    rf"|BytesStorageMetadata)|{_DCP}\.filesystem\._StorageInfo|torch\.serialization\._get_layout"
    r"|torch\.(b?float\d+\w*|complex\d+|u?int\d+|bool)|pathlib\.(_local\.)?PosixPath"
)
_SIZE = "torch.Size"
_FORMATS = f"{_DCP}.metadata._MEM_FORMAT_ENCODING"
_FORMAT = re.compile(r"TORCH_[A-Z_]+")
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
_SHOWN = 200  # characters of a name
_BROKEN = (
    pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip


class Object:
    """An object of the index.

    Attributes:
        state: its attributes by name, or what else its class keeps; None: it has none.
    """

    state: Any = None

    def __init__(self, *_: object) -> None:
        """Accept, and ignore, the arguments of the class or the function that it replaces."""

    def __setstate__(self, state: Any) -> None:
        # without it a pickle could set attributes of this class itself, for the whole process
        self.state = state


class _Formats(Object):
    """The enumeration of memory formats."""


class _NamedFormat(Object):
    """A memory format as getattr(enumeration, name), which Python 3.11 before 3.11.4 writes, Debian 12's for instance."""

    def __new__(cls, *arguments: object) -> _NamedFormat:
        """Accept what gives a member of the enumeration, and no other attribute of anything."""
        whole, name = arguments if len(arguments) == 2 else (None, None)
        if whole is not _Formats or not isinstance(name, str) or not _FORMAT.fullmatch(name):
            raise _Unknown("getattr of something else than a memory format")
        return super().__new__(cls)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        named = f"{module}.{name}"
        if named == _SIZE:
            return tuple
        if named == _FORMATS:
            return _Formats
        if named in _GETATTR:
            return _NamedFormat
        if not _KNOWN.fullmatch(named):
            raise _Unknown(named[:_SHOWN])
        return Object


class _Unknown(Exception):
    pass


def read_index(directory: Path) -> dict[str, Any]:
    """Return the attributes of the index in a folder of a checkpoint, by the names of torch's `Metadata`.

    Raises:
        CommitError: it cannot be read, is no index, names what no index of tensors does, or a file outside of the folder.
    """
    path = directory / INDEX
    try:
        with open_file(path) as file:
            found = _Reader(file).load().state
        places = {place.state["relative_path"] for place in found["storage_data"].values()}
        names = [*places, *found["state_dict_metadata"]]
    except OSError as error:
        raise CommitError(f"{path} cannot be read: {error.strerror}") from error
    except _Unknown as error:
        raise CommitError(
            f"{path} names {error}, which no checkpoint of hpcrl does: loading it could run foreign code. Do not use this "
            "checkpoint; take one of your own, or an unchanged copy"
        ) from None
    except _BROKEN as error:
        raise CommitError(f"{path} is no index of a checkpoint: {type(error).__name__}: {error}") from error
    if odd := [name for name in names if not isinstance(name, str)]:
        raise CommitError(
            f"{path} is no index of a checkpoint: expected texts for names, found {type(odd[0]).__name__}"
        )
    if outside := sorted(place for place in places if Path(place).name != place):
        raise CommitError(
            f"{path} names the file {outside[0][:_SHOWN]}, expected one beside it. Do not use this checkpoint; take one of your own, or an "
            "unchanged copy"
        )
    return found


def check_indexes(checkpoint: Path) -> None:
    """Read each index of a checkpoint, that of the critic too. Raises CommitError as `read_index`."""
    for path in sorted(checkpoint.rglob(INDEX)):
        read_index(path.parent)
