"""Reads a prime-rl configuration: a file, the files of trainer, orchestrator and inference, or a command that names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hpcrl.config.load import nested, parse
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.field_table import FieldTable, TableSource
from hpcrl.convert.hydra import merge, parse_override
from hpcrl.convert.prime.fields import PRIME
from hpcrl.errors import ConfigError
from hpcrl.text import NotUtf8Error, utf8

Tree = dict[str, Any]
_PARTS = {
    "orchestrator": ("rollouts_per_example", "group_size", "batch_size", "env", "environment", "sampling", "train"),
    "trainer": ("optim", "loss", "scheduler", "data"),
    "inference": ("parallel", "server", "vllm", "gpu_memory_utilization"),
}
"""Names that only the file of one process has at its top."""


@dataclass
class PrimeSource(TableSource):
    """A prime-rl configuration.

    Attributes:
        tables: present names of the tables that it has, which may be empty: `[ckpt]` alone switches checkpoints on.
    """

    table: ClassVar[FieldTable] = PRIME

    tables: set[str] = field(default_factory=set)


def is_prime(tree: Mapping[str, Any]) -> bool:
    """Return whether tables are of prime-rl: of its run, or of its orchestrator."""
    own = isinstance(tree.get("orchestrator"), dict) or isinstance(tree.get("deployment"), dict)
    return own or (part_of(tree) == "orchestrator" and "train" not in tree)


def part_of(tree: Mapping[str, Any]) -> str | None:
    """Return the process whose file has such tables; None: they are of a run, in which each process has a table."""
    if any(isinstance(tree.get(part), dict) for part in _PARTS):
        return None
    return next((part for part, names in _PARTS.items() if not tree.keys().isdisjoint(names)), None)


def read_tree(tree: Tree, conversion: Conversion) -> PrimeSource:
    """Return the settings of nested tables."""
    source = PrimeSource()
    for path, value in _leaves(nested({part: tree}) if (part := part_of(tree)) else tree, source):
        if name := source.field(path, conversion):
            source.take(name, path, value, conversion)
    return source


def read_words(words: Sequence[str], folder: Path, conversion: Conversion) -> Tree:
    """Return the tables of a command `rl @ FILE --trainer @ FILE --trainer.optim.lr 1e-6`, overrides above files.

    Args:
        folder: of its relative names of files.

    Raises:
        ConfigError: a file cannot be read, or is not TOML.
    """
    tree, overrides, section = Tree(), Tree(), ""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            own = _read(folder / (word[1:] or (rest.pop(0) if rest else "")))
            merge(tree, nested({section: own}) if section else own)
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            section = name.replace("-", "_")
            if rest and rest[0].startswith("@"):
                continue
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            merge(overrides, parse_override(section, value, conversion.origin))
            section = ""
        else:
            conversion.note("unknown", word, "", "expected @ FILE or --name VALUE")
    merge(tree, overrides)
    return tree


def _read(path: Path) -> Tree:
    try:
        return parse(utf8(path.read_bytes()), str(path))
    except (OSError, NotUtf8Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _leaves(tree: Mapping[str, Any], source: PrimeSource, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting, and of each name that is none; note the tables in `source`."""
    for key, value in tree.items():
        path = above + key
        table = isinstance(value, dict)
        if table:
            source.tables.add(PRIME.present(path + ".").removesuffix("."))
        if table and PRIME.present(path) not in PRIME.targets:
            yield from _leaves(value, source, path + ".")
        else:
            yield path, None if value == "None" else value
