"""Reads names of Megatron-core's settings from its source, so that a login node without torch finds a misspelt one before the job."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.errors import did_you_mean

SOURCES = {
    "transformer_config_kwargs": (
        ("TransformerConfig", "transformer/transformer_config.py"),
        ("ModelParallelConfig", "model_parallel_config.py"),
    ),
    "optimizer_config_kwargs": (("OptimizerConfig", "optimizer/optimizer_config.py"),),
}
"""The dataclass and those it is derived from, with their files below megatron/core, of each setting that is a table of their fields."""


def check_megatron_fields(config: Config) -> Iterator[Problem]:
    """Yield the keys of Megatron's tables that the Megatron-core of this Python has not; none where there is no Megatron-core."""
    trainer = config.trainer
    if trainer.strategy != "megatron":
        return
    sections = {"policy": trainer.policy.megatron_config, "ref": trainer.ref.megatron_config}
    for role, section in sections.items():
        for table, sources in SOURCES.items():
            given = getattr(section, table, {})
            known = field_names(sources)
            for name in given if known else ():
                if name not in known:
                    yield Problem(
                        f"trainer.{role}.megatron_config.{table}.{name}",
                        f"Megatron-core's {sources[0][0]} has no such field{did_you_mean(name, known)}",
                    )


def field_names(sources: tuple[tuple[str, str], ...]) -> set[str]:
    """Return the fields of dataclasses; empty where one of them is not where it is expected."""
    found = set[str]()
    for name, file in sources:
        tree = _parsed(file)
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        if not bodies:
            return set()
        found |= {
            line.target.id
            for line in bodies[0]
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
    return found


def _parsed(file: str) -> ast.Module:
    spec = find_spec("megatron")  # a namespace: nothing is imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "core", file)
        if path.is_file():
            return ast.parse(path.read_bytes())
    return ast.Module([], [])
