"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcrl.config.data import DataConfig
from hpcrl.config.environment import EnvironmentConfig
from hpcrl.config.generator import GeneratorConfig
from hpcrl.config.slurm import SlurmConfig
from hpcrl.config.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """What one run does; a component receives the section that it needs, never this."""

    data: DataConfig
    trainer: TrainerConfig
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
