"""prime-rl's configurations, TOML of a run or of its processes and commands that name them, to hpcrl's.

What counts is what the source's run did: a setting that it leaves out has prime-rl's default, which is written where hpcrl's is another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.load import parse
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.hydra import merge
from hpcrl.convert.prime.algorithm import ALGORITHM
from hpcrl.convert.prime.environments import ENVIRONMENTS, has_evaluation
from hpcrl.convert.prime.fields import PRIME, TARGETS
from hpcrl.convert.prime.loss import LOSS
from hpcrl.convert.prime.source import PrimeSource, Tree, is_prime, part_of, read_tree, read_words
from hpcrl.convert.prime.training import TRAINING
from hpcrl.convert.rules import Rule, convert_fields
from hpcrl.convert.script import command_of, note_command

__all__ = ["TARGETS", "convert_script", "convert_toml", "convert_words", "is_command", "is_prime", "is_script"]

_START = re.compile(r"(^|\s)rl\s([^\n]|\\\n)*@", re.MULTILINE)

RULES: dict[str, Rule[PrimeSource]] = ALGORITHM | LOSS | ENVIRONMENTS | TRAINING


def convert_toml(texts: Sequence[tuple[str, str]]) -> Conversion:
    """Return the conversion of a run's TOML, or of the files of its trainer, orchestrator and inference together.

    Args:
        texts: each file's text and where it comes from.

    Raises:
        ConfigError: one is not TOML; names the place.
    """
    whole: Tree = {}
    for text, origin in texts:
        tree = parse(text, origin)
        part = part_of(tree) if len(texts) > 1 else None
        merge(whole, {part: tree} if part else tree)
    conversion = Conversion(", ".join(origin for _, origin in texts))
    return _converted(read_tree(whole, conversion), conversion)


def convert_words(words: Sequence[str], origin: str, folder: Path) -> Conversion:
    """Return the conversion of a command such as `rl @ rl.toml --trainer.optim.lr 1e-6`.

    Args:
        folder: of its relative names of files.

    Raises:
        ConfigError: a file cannot be read, or a value is not TOML.
    """
    conversion = Conversion(origin)
    return _converted(read_tree(read_words(_arguments(words), folder, conversion), conversion), conversion)


def convert_script(text: str, origin: str) -> Conversion:
    """Return the conversion of the prime-rl command in a shell script; its files lie where the script lies.

    Raises:
        ConfigError: there is none, or a file of it cannot be read.
    """
    command, conversion = command_of(text, origin, is_command), Conversion(origin)
    source = read_tree(read_words(_arguments(command.words), Path(origin).parent, conversion), conversion)
    note_command(command, source, conversion, PRIME.field_of, ("wandb.name", "wandb.project"))
    return _converted(source, conversion, command.batch)


def is_command(words: Sequence[str]) -> bool:
    """Return whether words are a command that starts prime-rl: its program, and files behind @."""
    return "rl" in words and any(word.startswith("@") for word in words)


def is_script(text: str) -> bool:
    """Return whether a shell script starts prime-rl, by what stands in it."""
    return _START.search(text) is not None


def _arguments(words: Sequence[str]) -> list[str]:
    return list(words[list(words).index("rl") + 1 :])


def _converted(source: PrimeSource, conversion: Conversion, batch: str = "") -> Conversion:
    return convert_fields(source, conversion, RULES, _without_effect, batch)


def _without_effect(source: PrimeSource, path: str) -> str:
    if path.startswith("orchestrator.eval.") and not has_evaluation(source):
        return "had no effect without evaluation environments"
    if path.startswith("ckpt.") and "ckpt" not in source.tables:
        return "had no effect without a section ckpt"
    return ""
