"""Where the rows of a dataset come from: a file, a folder of files, a folder of Hugging Face's `datasets`, or a dataset on its hub.

A location is a path or, where there is no such path, the name of a dataset on the hub, <owner>/<name>; behind either may stand a split,
`openai/gsm8k:train`. Of a folder and of the hub, the splits are those that the front matter of its README.md names, or else what names of
files and folders begin with (`train-00000-of-00004.parquet`, `train/0.jsonl`).

What is on the hub is downloaded into its cache once (HF_HOME, on a filesystem that the nodes share) and found there afterwards, also without
network; with HF_HUB_OFFLINE=1 nobody asks the hub.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hpcrl.data.chat.messages import without_nulls
from hpcrl.errors import DataError
from hpcrl.rundir.commit import parse_json

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Arrow's own memory pool keeps some 15 MiB of what it has read; it is chosen when pyarrow is imported
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

_ROWS_AT_ONCE = 1024
_COUNTED_BYTES = 256 << 20
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLIT = re.compile(r"(.+):([\w.-]+)")
_KNOWN_SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
_README, _SAVED, _SAVED_SPLITS = "README.md", "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class Source:
    """A dataset, as a configuration names it.

    Attributes:
        location: path or name on the hub, with a split behind a colon or without one.
        subset: its configuration, in Hugging Face's sense; None: the only one, or the one that is called default.
        revision: branch, tag or commit on the hub; None: its main branch.
        folder: where relative paths are looked for; None: the working directory.
        split: the one that is meant where the location names none; None: then it must not have several.
    """

    location: str
    subset: str | None = None
    revision: str | None = None
    folder: str | None = None
    split: str | None = None

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
        return self._place()[0].exists() or self._is_on_hub()

    def rows(self) -> Iterator[Any]:
        """Yield the rows of all files, whatever they hold.

        Raises:
            DataError: a file is missing, cannot be read, or there is not one row.
        """
        found = 0
        for path in self.files():
            for row in READERS[path.suffix](path):
                found += 1
                yield row
        if not found:
            raise DataError(f"dataset {self.location} has no rows")

    def count(self) -> int | None:
        """Return its rows; None: that is not quickly known, for a text file is large, something has to be downloaded, or pyarrow is missing.

        Raises:
            DataError: it cannot be read.
        """
        if not self._place()[0].exists():
            return None
        counts = [_count(path) for path in self.files()]
        return None if None in counts else sum(count or 0 for count in counts)

    def _place(self) -> tuple[Path, str | None]:
        """Return the path that the location would be, and the split that it names."""
        folder = Path(self.folder or "").expanduser()
        whole = folder / Path(self.location).expanduser()
        if not whole.exists() and (match := _SPLIT.fullmatch(self.location)):
            return folder / Path(match[1]).expanduser(), match[2]
        return whole, None

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
                    f"{self.revision or 'main'}): {' '.join(str(error).split())[:300]} Where nodes have no network, fetch it first: "
                    f"`hf download --repo-type dataset {self._name()}`, with HF_HOME on a filesystem that they share"
                ) from error

        folder = fetch([_README])
        named = self._named_patterns(folder, split)
        return fetch([_README, *(named or [f"*{suffix}" for suffix in READERS])])

    def _of_folder(self, folder: Path, split: str | None) -> list[Path]:
        if (folder / _SAVED_SPLITS).is_file():
            splits = _read_object(folder / _SAVED_SPLITS)["splits"]
            folder = folder / self._chosen(split, splits)
        if (folder / _SAVED).is_file():  # Dataset.save_to_disk
            return [folder / entry["filename"] for entry in _read_object(folder / _SAVED)["_data_files"]]
        if patterns := self._named_patterns(folder, split):
            return self._matching(folder, patterns)
        root = folder / self.subset if self.subset and (folder / self.subset).is_dir() else folder
        files = [path for path in sorted(root.rglob("*")) if path.suffix in READERS and not _is_hidden(path, root)]
        by_split = {
            name: own for name in _KNOWN_SPLITS if (own := [path for path in files if _is_of(path, root, name)])
        }
        wanted = split or (self._chosen(None, by_split) if by_split else None)
        if wanted:
            files = by_split.get(wanted) or [path for path in files if _is_of(path, root, wanted)]
        if not files:
            raise DataError(f"dataset {self.location}: {root} has no {', '.join(READERS)} files of split {wanted}")
        return files

    def _chosen(self, split: str | None, there: Sequence[str] | Mapping[str, Any]) -> str:
        names = list(there)
        wanted = split or (names[0] if len(names) == 1 else self.split)
        if wanted not in names:
            what = f"it has no split {wanted!r}" if wanted else "it has several splits"
            raise DataError(
                f"dataset {self.location}: {what}; name one of {', '.join(names)} as {self._name()}:{names[0]}"
            )
        return wanted

    def _named_patterns(self, folder: Path, split: str | None) -> list[str]:
        """Return the patterns of the files of the subset and the split, as the front matter of the README names them; none: it does not."""
        readme = folder / _README
        parts = readme.read_text(encoding="utf-8").split("---", 2) if readme.is_file() else []
        try:
            front = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
        except yaml.YAMLError as error:
            raise DataError(f"dataset {self.location}: the front matter of {readme} is no YAML: {error}") from error
        configs = front.get("configs") if isinstance(front, dict) else None
        if not configs:
            return []
        by_name = {config["config_name"]: config.get("data_files") for config in configs}
        names = [name for name in by_name if name == (self.subset or "default")]
        if not names and (self.subset or len(by_name) > 1):
            raise DataError(
                f"dataset {self.location}: no subset {self.subset!r}; set data.subset to one of {', '.join(by_name)}"
            )
        data_files = by_name[(names or list(by_name))[0]]
        if isinstance(data_files, str) or (data_files and isinstance(data_files[0], str)):
            data_files = [{"split": "train", "path": data_files}]
        splits = {entry["split"]: entry["path"] for entry in data_files or ()}
        if not splits:
            return []
        paths = splits[self._chosen(split, splits)]
        return [paths] if isinstance(paths, str) else list(paths)

    def _matching(self, folder: Path, patterns: Sequence[str]) -> list[Path]:
        paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        found = [path for name, path in paths.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        if not found or any(path.suffix not in READERS for path in found):
            raise DataError(
                f"dataset {self.location}: its README names {', '.join(patterns)}; expected files there that end with {', '.join(READERS)}"
            )
        return found


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


def _is_of(path: Path, root: Path, split: str) -> bool:
    """Return whether a file is of a split, by how its name, or that of a folder above it, begins."""
    begins = re.compile(rf"{re.escape(split)}(?![A-Za-z])")
    return any(begins.match(part) for part in path.relative_to(root).parts)


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
        file = pq.ParquetFile(path, page_checksum_verification=True)
        yield from _rows_of(file.iter_batches(_ROWS_AT_ONCE), path)


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
        parts = (
            batch.slice(start, _ROWS_AT_ONCE) for batch in batches for start in range(0, batch.num_rows, _ROWS_AT_ONCE)
        )
        yield from _rows_of(parts, path)


def _rows_of(batches: Iterator[RecordBatch], path: Path) -> Iterator[Any]:
    number = 0
    for batch in batches:
        try:
            yield from map(_as_written, batch.to_pylist())
        except UnicodeDecodeError:
            yield from _row_by_row(batch, path, number)
        number += batch.num_rows


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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"dataset {path.parent}: {path.name} cannot be read as JSON: {error}") from error


def _read_json(path: Path) -> Iterator[Any]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"dataset {path} cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"dataset {path}: expected a list of rows, found {type(rows).__name__}")
    yield from rows


def _read_json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield parse_json(line)
                except ValueError as error:
                    raise DataError(f"dataset {path}, line {number} cannot be read as JSON: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".arrow": _read_arrow,
}
"""By the ending of a file's name: what yields its rows."""
