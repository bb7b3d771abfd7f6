"""Checks entries of JSON files of a model or a dataset, such as config.json, before a library reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError
from hpcrl.rundir.commit import parse_json

CONFIG = "config.json"
_DEEPEST = 40
_MOST_LAYERS, _LARGEST = 10_000, 2**31 - 1
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
_SIZES += ("max_position_embeddings",)
_LIMITS = dict.fromkeys(_LAYERS, _MOST_LAYERS) | dict.fromkeys(_SIZES, _LARGEST)


def read_entries(file: Path) -> dict[str, Any]:
    """Return the entries of a JSON file of a model or a dataset.

    Raises:
        OSError: it cannot be read.
        DataError: as of `entries_of_json`.
    """
    return entries_of_json(file.read_bytes(), file)


def entries_of_json(content: bytes, file: Path | str) -> dict[str, Any]:
    """Return the entries of the content of such a file; sizes in a config.json are looked at too.

    Args:
        file: its name, for errors.

    Raises:
        DataError: it is no JSON object, is nested more than 40 levels deep, or has a size that no model has.
    """
    try:
        entries = parse_json(content)
    except ValueError as error:
        raise DataError(f"{file}: expected a JSON object: {error}") from error
    if not isinstance(entries, dict):
        raise DataError(f"{file}: expected a JSON object, found {type(entries).__name__}")
    for problem in _problems(entries, Path(file).name == CONFIG):
        raise DataError(f"{file}: {problem}")
    return entries


def check_files(path: str, names: Iterable[str] = (CONFIG, "generation_config.json"), **options: Any) -> None:
    """Check JSON files of a model before transformers reads them; missing ones are left out.

    Args:
        path: directory, or id on the hub.
        options: of transformers' `cached_file`, such as revision and subfolder.

    Raises:
        OSError: the model is neither here nor on the hub.
    """
    for file in files_of(path, names, **options):
        read_entries(file)


def files_of(path: str, names: Iterable[str], **options: Any) -> Iterator[Path]:
    """Yield the files of a model that it has of some; arguments and errors as of `check_files`."""
    from transformers.utils.hub import cached_file

    missing: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    missing["_raise_exceptions_for_connection_errors"] = False
    for name in names:
        if file := cached_file(path, name, **options, **missing):
            yield Path(file)


def _problems(entries: dict[str, Any], of_config: bool) -> Iterator[str]:
    level: list[Any] = [entries]
    for _ in range(_DEEPEST):
        for each in level if of_config else ():
            yield from _wrong_sizes(each) if isinstance(each, dict) else ()
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        if not level:
            return
    yield f"it is nested more than {_DEEPEST} levels deep"


def _wrong_sizes(entries: dict[str, Any]) -> Iterator[str]:
    for name in ("text_config", "vision_config"):
        if not isinstance(entries.get(name) or {}, dict):
            yield f"{name}: expected an object, found {entries[name]!r:.80}"
    for name in _LIMITS.keys() & entries.keys():
        value, most = entries[name], _LIMITS[name]
        each = value if isinstance(value, list) else [value]
        if not all(one is None or (type(one) is int and 0 <= one <= most) for one in each):
            yield f"{name}: expected a whole number from 0 to {most}, found {value!r:.80}"
