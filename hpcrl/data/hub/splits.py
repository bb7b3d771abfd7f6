"""Finds the files of each split of a dataset folder, as Hugging Face's `datasets` does (5.2.0, data_files.py and utils/metadata.py).

The front matter of README.md names subsets, and the patterns of the files of their splits:

    configs:
    - config_name: main
      default: true
      data_files:
      - split: train
        path: [data/train-*.parquet, more/**/*.jsonl]

Without it, or for a subset that names no files, the names of files and folders say which split they are of. What is neither is of `train`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath
from reprlib import repr as repr_of
from typing import Any

import yaml

from hpcrl.errors import DataError
from hpcrl.rundir.commit import leads_outside

README = "README.md"
_IGNORED = (README, "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json")
_DEEPEST = 40
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
_NUMBER = "[0-9]" * 5
_SHARDS = f"data/{{}}-{_NUMBER}-of-{_NUMBER}*.*"
_OF_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BETWEEN = "[-._ 0-9]"
_OF_FOLDERS = "**/{word}/**", "**/{word}{end}*/**", "**/*{end}{word}/**", "**/*{end}{word}{end}*/**"
_OF_FILES = "**/{word}{end}*", "**/*{end}{word}{end}*"
_MAGIC = re.compile(r"[*?[]")
_TOKENS = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
_FAVOURITES = (".csv", ".json", ".jsonl", ".arrow", ".parquet")
"""Of kinds with as many files, a later one is taken."""
_KINDS = {
    **{suffix: suffix for suffix in (".parquet", ".arrow", ".txt", ".tar", ".zip", ".xml", ".lance", ".vortex")},
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), ".json"),
    **dict.fromkeys((".geoparquet", ".gpq"), ".parquet"),
    **dict.fromkeys((".csv", ".tsv"), ".csv"),
    **dict.fromkeys((".h5", ".hdf5"), ".hdf5"),
}
"""What `datasets` reads rows from, by a suffix in the name of a file (`a.jsonl.gz` too). Of pictures and other media it makes rows as well,
which are no rows here."""


@dataclass(frozen=True)
class Subset:
    """A configuration of a dataset, in Hugging Face's sense.

    Attributes:
        folder: that its patterns start from, relative to the dataset's.
        splits: patterns of the files of each; None: names of files say it.
    """

    name: str
    folder: str
    splits: Mapping[str, Sequence[str]] | None


def chosen_subset(folder: Path, wanted: str | None) -> Subset | None:
    """Return the subset of that name, or the default one; None: the folder names none.

    Raises:
        DataError: there is no such subset, several without a default, or what names them is malformed.
    """
    subsets = _subsets(folder)
    if not subsets:
        return None
    names = ", ".join(subsets)
    if wanted is not None:
        if wanted not in subsets:
            raise DataError(
                f"it has no subset {wanted!r}; set data.subset (of validation data: data.val_subset) to one of {names}"
            )
        return subsets[wanted][0]
    defaults = [one for one, is_default in subsets.values() if is_default or one.name == "default" or len(subsets) == 1]
    if len(defaults) != 1:
        several = f"several defaults ({', '.join(one.name for one in defaults)})" if defaults else "several subsets"
        raise DataError(f"it has {several}; set data.subset (of validation data: data.val_subset) to one of {names}")
    return defaults[0]


def _subsets(folder: Path) -> dict[str, tuple[Subset, bool]]:
    """Return the subsets that the README names, each with whether it is marked as the default."""
    readme, found = folder / README, dict[str, tuple[Subset, bool]]()
    lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
    if "---" not in lines[1:] or lines[0] != "---":
        return {}
    front = _front_matter("\n".join(lines[1 : lines.index("---", 1)]), readme)
    listed = (front.get("configs") if isinstance(front, dict) else None) or []
    for entry in listed if isinstance(listed, list) else [listed]:
        try:
            name, data_dir = _scalar(entry["config_name"]), _scalar(entry.get("data_dir") or "")
            files = entry.get("data_files")
            splits = None if files is None else _patterns(files)
            if leads_outside(data_dir):
                raise DataError(f"{readme} names the folder {data_dir!r:.200}, which is outside of its own")
            found[name] = Subset(name, data_dir, splits), entry.get("default") is True
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DataError(
                f"configs of the front matter of {readme}: expected a list of config_name and data_files, found {repr_of(entry):.200}. "
                "data_files is a pattern, a list of patterns, or a list of split and path"
            ) from error
    return found


def _scalar(value: Any) -> str:
    if isinstance(value, list | dict):  # whose text may be endless, by aliases of aliases
        raise TypeError
    return str(value)


def _front_matter(text: str, readme: Path) -> Any:
    """Return what YAML says. Raises DataError where it is none, or nested more deeply than a list of subsets is."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise DataError(f"the front matter of {readme} is nested more than {_DEEPEST} levels deep")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise DataError(f"the front matter of {readme} is no YAML: {error}") from error


def _patterns(data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split; raises ValueError, TypeError or KeyError where they are malformed."""
    entries: list[Any] = [data_files] if isinstance(data_files, str) else data_files
    if not isinstance(entries, list) or not entries:
        raise ValueError
    if all(isinstance(entry, str) for entry in entries):
        return {"train": entries}
    splits = [entry["split"] for entry in entries]
    if len(set(splits)) != len(splits) or not all(_SPLIT_NAME.fullmatch(split) for split in splits):
        raise ValueError
    paths = [[path] if isinstance(path := entry["path"], str) else path for entry in entries]
    if not all(isinstance(path, list) and all(isinstance(one, str) for one in path) for path in paths):
        raise TypeError
    return dict(zip(splits, paths, strict=True))


def names_below(folder: Path) -> list[str]:
    """Return the files of rows below a folder, those that hpcrl cannot read too, by path relative to it, in the order of these texts."""
    found = (Path(at, name) for at, _, names in os.walk(folder) for name in names if _kinds(name))
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def default_patterns(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the patterns of each split that the names of a folder's files show. Raises DataError where a name of shards has a split that is no name of one."""
    if shards := matching(names, _SHARDS.format("*")):
        splits = {match[1] for name in shards if (match := _OF_SHARD.fullmatch(name.rpartition("/")[2]))}
        if wrong := sorted(split for split in splits if not _SPLIT_NAME.fullmatch(split)):
            raise DataError(f"{wrong[0]!r} of its files in data/ is no name of a split; expected letters, digits and _")
        known = [split for split in _WORDS if split in splits]
        return {split: [_SHARDS.format(split)] for split in [*known, *sorted(splits - set(known))]}
    for forms in (_OF_FOLDERS, _OF_FILES):
        of_split = {
            split: [form.format(word=word, end=_BETWEEN) for word in words for form in forms]
            for split, words in _WORDS.items()
        }
        there = {split: own for split, own in of_split.items() if any(matching(names, one) for one in own)}
        if there:
            return there
    return {"train": ["**"]}


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that a pattern means: `*` stays within a folder, `**/` is any number of folders, none too.

    What begins with a dot, and folders that begin with `__`, are left out unless the pattern names them; so are files such as config.json.
    """
    wanted = normpath(pattern).split("/")
    expression = _expression(wanted)
    found = (name.split("/") for name in names if expression.fullmatch(name))
    return [
        "/".join(parts)
        for parts in found
        if _hidden(parts) == _hidden(wanted) and (parts[-1] not in _IGNORED or parts[-1] == wanted[-1])
    ]


def _hidden(parts: Sequence[str]) -> tuple[int, int]:
    """Return how many names begin with a dot, and how many folders with two underscores."""
    return sum(part.startswith(".") for part in parts), sum(part.startswith("__") for part in parts[:-1])


def _expression(wanted: Sequence[str]) -> re.Pattern[str]:
    """Return the regular expression of a pattern, given by its parts between slashes."""
    folders = ("(?:[^/]+/)*" if part == "**" else f"{_of_name(part)}/" for part in wanted[:-1])
    last = "(?:[^/]+/)*[^/]+" if wanted[-1] == "**" else _of_name(wanted[-1])
    return re.compile("".join([*folders, last]))


def _of_name(part: str) -> str:
    return _TOKENS.sub(lambda token: _of_token(token[0]), part)


def _of_token(token: str) -> str:
    if token in ("*", "?"):
        return "[^/]*" if token == "*" else "[^/]"
    if len(token) == 1:
        return re.escape(token)
    inside = re.sub(r"([\\^\[])", r"\\\1", token[1:-1].removeprefix("!"))
    return f"(?!/)[{'^' if token[1] == '!' else ''}{inside}]"


def files_of_split(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the files that patterns name, those of each pattern in order; a file that two of them name is there twice.

    Raises:
        DataError: a pattern is a name that is not there, leads out of the folder, or is malformed.
    """
    found = list[str]()
    for pattern in patterns:
        if pattern.startswith("/") or "://" in pattern or normpath(pattern).startswith(".."):
            raise DataError(f"its README names {pattern}, which is outside of its folder; name that file itself")
        if any("**" in part and part != "**" for part in pattern.split("/")):
            raise DataError(f"its README names {pattern}; expected `**` between slashes only")
        those = matching(names, pattern)
        if not those and not _MAGIC.search(pattern):
            raise DataError(f"its README names {pattern}, which is not there, or no file of rows")
        found += those
    return found


def covering(patterns: Sequence[str], folder: str) -> list[str]:
    """Return patterns as `fnmatch` has them, whose `*` crosses folders, that match all that these match below a folder of a dataset."""
    return [normpath(f"{folder or '.'}/{pattern}").replace("**/", "*") for pattern in patterns]


def of_one_kind(names: Sequence[str]) -> list[str]:
    """Return the files of the kind that most of them are, as `datasets` reads a folder whose files nothing names."""
    counts = Counter(suffix for name in names for suffix in _kinds(name))
    if not counts:
        return []
    most = max(counts, key=lambda one: (counts[one], _FAVOURITES.index(one) if one in _FAVOURITES else -1, one))
    return [name for name in names if any(_KINDS[one] == _KINDS[most] for one in _kinds(name))]


def _kinds(name: str) -> list[str]:
    return [suffix for suffix in PurePosixPath(name).suffixes if suffix in _KINDS]
