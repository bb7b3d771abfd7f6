"""All sections of a configuration together: fields only. What loads and checks them is hpcrl.config.root.Config."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcrl.config.fields import Location
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.environment import EnvironmentConfig
from hpcrl.config.sections.generator import GeneratorConfig
from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.vla import VLAConfig


@dataclass(frozen=True, kw_only=True)
class ConfigTree:
    """What one run does, as rules and derived values see it."""

    config_class: str | None = None
    """Your own subclass of hpcrl.config.Config that adds settings, as "package.module:Class"."""

    python_path: list[Location] = field(default_factory=list)
    """Folders in which config_class and your other classes are looked for, after PYTHONPATH; "." is the folder of the file that sets it."""

    data: DataConfig
    trainer: TrainerConfig
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    vla: VLAConfig = field(default_factory=VLAConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
