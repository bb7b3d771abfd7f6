"""Reads the rows of a dataset: a file, a folder of files, a folder of Hugging Face's `datasets`, or a dataset on its hub.

A location is a path or, where there is no such path, the name of a dataset on the hub, <owner>/<name>. A split may follow,
`openai/gsm8k:train`, or a part of one in the notation of `datasets`: `train[:100]`, `train[-500:]`, `train[10%:]`. Splits of a folder, also
on the hub, are found as `datasets` finds them (hpcrl/data/hub/splits.py).

Datasets of the hub are downloaded into its cache once (HF_HOME, on a filesystem that the nodes share) and read from there afterwards, also
without network. With HF_HUB_OFFLINE=1 nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.config import DataConfig
from hpcrl.config.import_path import find
from hpcrl.data.chat.messages import without_nulls
from hpcrl.data.entries import read_entries
from hpcrl.data.hub.splits import (
    README,
    chosen_subset,
    covering,
    default_patterns,
    files_of_split,
    names_below,
    of_one_kind,
)
from hpcrl.envs.base import user_code
from hpcrl.errors import ConfigError, DataError, UserCodeError
from hpcrl.rundir.commit import leads_outside, parse_json
from hpcrl.text import utf8

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

# Arrow's own memory pool keeps some 15 MiB of what it has read; it is chosen when pyarrow is imported
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = os.environ.get("ARROW_DEFAULT_MEMORY_POOL") or "system"

_ROWS_AT_ONCE, _BYTES_AT_ONCE = 128, 16 << 20
_BUFFER = 1 << 20  # bytes of each column of a parquet file
_COUNTED_BYTES, _LARGEST_ROW = 256 << 20, 256 << 20
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLIT = re.compile(r"(.+):([\w.-]+)(?:\[(-?\d*%?):(-?\d*%?)\])?")
_KNOWN_SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class Source:
    """A dataset, as a configuration names it.

    Attributes:
        location: path or name on the hub, with a split, or a part of one, behind a colon or without.
        subset: its configuration, in Hugging Face's sense; None: the only one, or the one that is called default.
        revision: branch, tag or commit on the hub; None: its main branch.
        folder: where relative paths are looked for; None: the working directory.
        split: the one that is meant where the location names none; None: then it must not have several.
        size: rows that are read, the first ones: a number, or below 1 a share of all, of which at least one is read; None: all.
    """

    location: str
    subset: str | None = None
    revision: str | None = None
    folder: str | None = None
    split: str | None = None
    size: float | None = None

    ends: ClassVar[bool] = True

    def facts(self) -> dict[str, Any]:
        """Return its attributes; the size only where it is set, as runs of hpcrl 0.1 have none on disk."""
        return {name: value for name, value in vars(self).items() if name != "size" or value is not None}

    def files(self) -> list[Path]:
        """Return its files, in the order of their names.

        Raises:
            DataError: there are none.
        """
        path, split = self._place()
        if not path.exists():
            path = self._downloaded(split)
        if path.is_file():
            if path.suffix not in READERS:
                raise DataError(f"dataset {self.location}: expected a .parquet, .json, .jsonl or .arrow file")
            return [path]
        return self._of_folder(path, split)

    def exists(self) -> bool:
        """Return whether it lies on this machine, or has a name that the hub may know."""
        return self.is_here() or self._is_on_hub()

    def is_here(self) -> bool:
        """Return whether it lies on this machine, elsewhere than in the hub's cache."""
        return self._place()[0].exists()

    def rows(self) -> Iterator[Any]:
        """Yield the rows of its files that are read, whatever they hold.

        Raises:
            DataError: a file is missing, cannot be read, or there is not one row.
        """
        span, found = self._span(), 0
        for row in islice(self._all_rows(), span.start, span.stop):
            found += 1
            yield row
        if not found:
            raise DataError(f"dataset {self.location} has no rows")

    def _all_rows(self) -> Iterator[Any]:
        return (row for path in self.files() for row in READERS[path.suffix](path))

    @property
    def part(self) -> str:
        """Rows of the split in the location, such as [:100]; "": all of them."""
        match = None if self._is_whole() else _SPLIT.fullmatch(self.location)
        return f"[{match[3]}:{match[4]}]" if match and match[3] is not None else ""

    def _span(self) -> slice:
        """Return which rows of its files are read, by absolute numbers; `stop` is None where they end with the last one."""
        shared = self.size is not None and self.size < 1
        total = self._total() if shared or set(self.part) & {"-", "%"} else 0
        first, _, last = self.part[1:-1].partition(":")
        start, stop = _bound(first or "0", total), _bound(last, total) if last else None
        if stop is not None:
            stop = max(start, stop)
        if self.size is None:
            return slice(start, stop)
        most = max(1, round(self.size * len(range(total)[start:stop]))) if shared else int(self.size)
        return slice(start, start + most if stop is None else min(stop, start + most))

    def _total(self) -> int:
        counted = self._counted()
        return sum(1 for _ in self._all_rows()) if counted is None else counted

    def count(self) -> int | None:
        """Return its rows; None: that is not quickly known, for a text file is large, something has to be downloaded, or pyarrow is missing.

        Raises:
            DataError: it cannot be read.
        """
        if not self.is_here() or (total := self._counted()) is None:
            return None
        return len(range(total)[self._span()])

    def _counted(self) -> int | None:
        counts = [_count(path) for path in self.files()]
        if None in counts:
            return None
        return sum(count or 0 for count in counts)

    def _place(self) -> tuple[Path, str | None]:
        """Return the path that the location would be, and the split that it names."""
        folder = Path(self.folder or "").expanduser()
        if not self._is_whole() and (match := _SPLIT.fullmatch(self.location)):
            return folder / Path(match[1]).expanduser(), match[2]
        return folder / Path(self.location).expanduser(), None

    def _is_whole(self) -> bool:
        """Return whether there is a path of all of the location, which then names no split."""
        return (Path(self.folder or "").expanduser() / Path(self.location).expanduser()).exists()

    def _name(self) -> str:
        match = _SPLIT.fullmatch(self.location)
        return match[1] if match else self.location

    def _is_on_hub(self) -> bool:
        return _HUB.fullmatch(self._name()) is not None and Path(self._name()).suffix not in READERS

    def _downloaded(self, split: str | None) -> Path:
        if not self._is_on_hub():
            raise DataError(
                f"dataset {self.location}: no such file. A path that starts with ./ is taken from the folder of the TOML file that "
                "names it."
            )
        from httpx import HTTPError
        from huggingface_hub import snapshot_download

        def fetch(patterns: list[str]) -> Path:
            try:
                return Path(
                    snapshot_download(
                        self._name(), repo_type="dataset", revision=self.revision, allow_patterns=patterns
                    )
                )
            except (OSError, ValueError, HTTPError) as error:
                raise DataError(
                    f"dataset {self.location}: no such file, and the hub does not give one of that name (revision "
                    f"{self.revision or 'main'}): {' '.join(str(error).split())[:300]}. Where nodes have no network, fetch it first: "
                    f"`hf download --repo-type dataset {self._name()}`, with HF_HOME on a filesystem that they share"
                ) from error

        with self._named_in_errors():
            named = chosen_subset(fetch([README]), self.subset)
            wanted = [f"**/*{suffix}" for suffix in READERS]
            if named is not None and named.splits is not None:
                wanted = named.splits[self._chosen(split, named.splits)]
        return fetch([README, *covering(wanted, named.folder if named else "")])

    def _of_folder(self, folder: Path, split: str | None) -> list[Path]:
        with self._named_in_errors():
            if (folder / _SAVED_SPLITS).is_file():
                folder = folder / self._chosen(split, _names(folder / _SAVED_SPLITS, "splits"))
            if (folder / _SAVED).is_file():  # Dataset.save_to_disk
                return [folder / name for name in _names(folder / _SAVED, "_data_files", "filename")]
            root, patterns = self._patterns(folder)
            names = names_below(root)
            by_split = patterns or default_patterns(names)
            wanted = self._chosen(split, by_split)
            found = files_of_split(names, by_split[wanted])
            if patterns is None:
                found = of_one_kind(found)
        unread = [name for name in found if Path(name).suffix not in READERS]
        if unread or not found:
            what = (
                f"{unread[0]}, which hpcrl does not read"
                if unread
                else f"no file that matches {', '.join(by_split[wanted])}"
            )
            raise DataError(
                f"dataset {self.location}: split {wanted} of {root} has {what}; expected {', '.join(READERS)} files"
            )
        return [root / name for name in found]

    def _patterns(self, folder: Path) -> tuple[Path, Mapping[str, Sequence[str]] | None]:
        """Return the folder of the subset, and the patterns of its splits; None: names of files say which split they are of."""
        named = chosen_subset(folder, self.subset)
        if named is not None:
            return folder / named.folder, named.splits
        if self.subset and not (folder / self.subset).is_dir():
            raise DataError(
                f"it has no subset {self.subset!r}: neither does its {README} name subsets, nor is there such a folder"
            )
        return folder / (self.subset or ""), None

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise DataError(f"dataset {self.location}: {error}") from error

    def _chosen(self, split: str | None, there: Sequence[str] | Mapping[str, Any]) -> str:
        names = list(there)
        wanted = split or (names[0] if len(names) == 1 else self.split)
        if wanted not in names:
            what = f"it has no split {wanted!r}" if wanted else "it has several splits"
            raise DataError(f"{what}; name one of {', '.join(names)} as {self._name()}:{names[0]}")
        return wanted


@dataclass(frozen=True)
class MadeSource(Source):
    """Rows that a function makes, without end; its import path is the location.

    Attributes:
        seed: its first argument.
        arguments: further ones by name, as JSON.
    """

    seed: int = 0
    arguments: str = "{}"

    ends: ClassVar[bool] = False

    def row(self, number: int) -> Any:
        """Return a row. Raises DataError where the function cannot be imported, or raises."""
        try:
            function = find("data.train_function", self.location, {})
            with user_code(f"data.train_function={self.location!r}, row {number}"):
                return function(self.seed, number, **json.loads(self.arguments))
        except (ConfigError, UserCodeError) as error:
            raise DataError(str(error)) from error

    def rows(self) -> Iterator[Any]:
        """Yield rows without end."""
        return map(self.row, count())

    def files(self) -> list[Path]:
        """Return the file of the function's module: pictures of rows lie beside it."""
        module = find("data.train_function", self.location, {}).__module__
        return [Path(sys.modules[module].__file__ or "")]

    def is_here(self) -> bool:
        """Return False: it is no file."""
        return False

    def exists(self) -> bool:
        """Return True: its first row shows whether it can be called."""
        return True

    def count(self) -> int | None:
        """Return None: there is no last row."""
        return None


def _bound(text: str, total: int) -> int:
    """Return a bound of a part of `total` rows as the number of a row; one before the first is the first."""
    number = int(text.removesuffix("%"))
    if text.endswith("%"):
        number = round(number * total / 100)
    return max(0, total + number) if text.startswith("-") else number


def training_sources(data: DataConfig) -> list[Source]:
    """Return the datasets that are trained, or the function that makes their prompts, with the seed that is set in `data`."""
    if data.train_function is not None:
        arguments = json.dumps(data.train_function_args)
        return [MadeSource(data.train_function, seed=data.shuffle_seed or 0, arguments=arguments)]
    return [Source(one, data.subset, data.revision, data.local_dir, "train") for one in data.train_data]


def validation_sources(data: DataConfig, locations: Sequence[str]) -> list[Source]:
    """Return datasets that are evaluated: those of data.val_data, or of data.val_prompts."""
    folder = data.val_local_dir or data.local_dir
    return [Source(one, data.val_subset, data.val_revision, folder, size=data.val_size) for one in locations]


def _count(path: Path) -> int | None:
    if path.suffix == ".parquet":
        if find_spec("pyarrow") is None:
            return None
        import pyarrow.parquet as pq

        with _readable(path, "parquet"):
            return pq.ParquetFile(path).metadata.num_rows
    if path.stat().st_size > _COUNTED_BYTES:
        return None
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if path.suffix == ".arrow" and find_spec("pyarrow") is None:
        return None
    return sum(1 for _ in READERS[path.suffix](path))


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with _readable(path, "parquet"):
        # pre_buffer would hold whole columns of a row group
        file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER)
        groups = range(file.num_row_groups)
        for group in groups:  # the footer says it before anything is unpacked
            facts = file.metadata.row_group(group)
            _require_bounded(facts.total_byte_size // max(1, facts.num_rows), path, f"row group {group}")
        yield from _rows_of((batch for group in groups for batch in _batches_of(file, group)), path)


def _batches_of(file: ParquetFile, group: int) -> Iterator[RecordBatch]:
    """Yield the rows of a row group in batches of about `_BYTES_AT_ONCE`.

    Its size is no bound: rows differ, and a dictionary has a repeated text once. A larger batch is read again in smaller ones. So is a batch
    that Arrow cannot hold: it divides a column of more than 2 GiB, but no nested one.
    """
    from pyarrow import ArrowNotImplementedError

    facts, done = file.metadata.row_group(group), 0
    smaller, size = _fitting(facts.num_rows, facts.total_byte_size), 0
    while smaller != size:
        seen, size = 0, smaller
        try:
            for batch in file.iter_batches(size, row_groups=[group]):
                seen += batch.num_rows
                if seen <= done:
                    continue
                if batch.nbytes > 2 * _BYTES_AT_ONCE and size > 1:
                    smaller = min(_fitting(batch.num_rows, batch.nbytes), size // 2)
                    break
                yield batch.slice(batch.num_rows - (seen - done))
                done = seen
        except ArrowNotImplementedError:
            if size == 1:
                raise
            smaller = size // 2


def _fitting(rows: int, size: int) -> int:
    return max(1, min(_ROWS_AT_ONCE, rows * _BYTES_AT_ONCE // max(1, size)))


def _read_arrow(path: Path) -> Iterator[Any]:
    """Yield the rows of an Arrow file, be it one that is streamed, as those of `datasets`, or one with a footer."""
    import pyarrow as pa

    with _readable(path, "Arrow"), pa.memory_map(str(path)) as content:
        try:
            batches = iter(pa.ipc.open_stream(content))
        except pa.ArrowInvalid:
            content.seek(0)
            reader = pa.ipc.open_file(content)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        yield from _rows_of((part for batch in batches for part in _divided(batch)), path)


def _divided(batch: RecordBatch) -> Iterator[RecordBatch]:
    if batch.num_rows > 1 and (batch.num_rows > _ROWS_AT_ONCE or batch.nbytes > _BYTES_AT_ONCE):
        half = batch.num_rows // 2
        yield from _divided(batch.slice(0, half))
        yield from _divided(batch.slice(half))
    else:
        yield batch


def _rows_of(batches: Iterator[RecordBatch], path: Path) -> Iterator[Any]:
    number = 0
    for batch in batches:
        if batch.num_rows == 1:
            _require_bounded(batch.nbytes, path, f"row {number} of the file")
        try:
            yield from map(_as_written, batch.to_pylist())
        except UnicodeDecodeError:
            yield from _row_by_row(batch, path, number)
        number += batch.num_rows


def _require_bounded(size: int, path: Path, place: str) -> None:
    """Raise DataError where a row has more than `_LARGEST_ROW` bytes: as Python's values it takes several times as much memory."""
    if size > _LARGEST_ROW:
        raise DataError(
            f"dataset {path}, {place}: expected rows of at most {_LARGEST_ROW >> 20} MiB, found one of {size >> 20} MiB; "
            "leave it out, or name files in its place"
        )


def _as_written(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a .jsonl file has it: Arrow gives objects in its columns the keys that those of other rows have, with null."""
    return {name: without_nulls(value) for name, value in row.items()}


def _row_by_row(batch: RecordBatch, path: Path, first: int) -> Iterator[Any]:
    for at in range(batch.num_rows):
        try:
            yield from map(_as_written, batch.slice(at, 1).to_pylist())
        except UnicodeDecodeError as error:
            raise DataError(f"dataset {path}, row {first + at} of the file: a text is no UTF-8 ({error})") from error


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"dataset {path} cannot be read as {kind}: {error}") from error


def _names(path: Path, key: str, part: str = "") -> list[str]:
    """Return the names of files or folders beside `path` that it lists.

    Args:
        part: of each of its entries; empty: the entry itself is the name.
    """
    found = read_entries(path).get(key)
    listed = found if isinstance(found, list) else [None]
    found_names = [one.get(part) if part and isinstance(one, dict) else one for one in listed]
    names = [one for one in found_names if isinstance(one, str) and not leads_outside(one)]
    if len(names) < len(found_names):
        raise DataError(f"{path}: {key}: expected a list of names below {path.parent}, found {found!r:.200}")
    return names


def _read_json(path: Path) -> Iterator[Any]:
    try:
        rows = parse_json(utf8(path.read_bytes()))
    except ValueError as error:
        raise DataError(f"dataset {path} cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"dataset {path}: expected a list of rows, found {type(rows).__name__}")
    yield from rows


def _read_json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                _require_bounded(len(line), path, f"line {number}")
                try:
                    yield parse_json(utf8(line))
                except ValueError as error:
                    raise DataError(f"dataset {path}, line {number} cannot be read as JSON: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".arrow": _read_arrow,
}
"""By the ending of a file's name: what yields its rows."""
