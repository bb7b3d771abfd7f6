"""The whole configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import tomli_w

from hpcrl.config.check import check
from hpcrl.config.data import DataConfig
from hpcrl.config.environment import EnvironmentConfig
from hpcrl.config.generator import GeneratorConfig
from hpcrl.config.load import Merged, read
from hpcrl.config.problem import raise_together
from hpcrl.config.slurm import SlurmConfig
from hpcrl.config.surface import settings
from hpcrl.config.trainer import TrainerConfig
from hpcrl.config.validate import build


@dataclass(frozen=True, kw_only=True)
class Config:
    """What one run does; a component receives the section that it needs, never this."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    data: DataConfig
    trainer: TrainerConfig
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @classmethod
    def from_toml(cls, paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
        """Return the checked configuration of TOML files, merged from left to right, and overrides `a.b.c=value`.

        Raises:
            ConfigError: names everything that is wrong, each with its file, path, what was expected and what was found.
        """
        return _checked(read(paths, overrides, list(settings(cls))))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        """Return the checked configuration of nested tables; paths in it are taken as they are.

        Raises:
            ConfigError: as in `from_toml`.
        """
        return _checked(Merged(tree=dict(tree)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_toml(self) -> str:
        """Return TOML text with every setting that is not unset; `from_toml` gives this configuration back."""
        return tomli_w.dumps(_set_values(asdict(self)))


def _checked(merged: Merged) -> Config:
    config = build(Config, merged.tree, merged.source_of)
    raise_together(check(config), merged.source_of)
    return config


def _set_values(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _set_values(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }
