"""All sections of a configuration together: fields only. What loads and checks them is hpcrl.config.root.Config."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.conditions import ENGINES
from hpcrl.config.effects import OTHER_RUN, SOFTWARE
from hpcrl.config.fields import Location
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.environment import EnvironmentConfig
from hpcrl.config.sections.generator import GeneratorConfig
from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.config.setting import Effect, section, setting


@dataclass(frozen=True, kw_only=True)
class ConfigTree:
    """What one run does, as rules and derived values see it."""

    config_class: str | None = setting(None, on_change=OTHER_RUN)
    """Your own subclass of hpcrl.config.Config that adds settings, as "package.module:Class"."""

    python_path: list[Location] = setting([], on_change=SOFTWARE)
    """Folders in which config_class and your other classes are looked for, after PYTHONPATH; "." is the folder of the file that sets it."""

    data: DataConfig
    trainer: TrainerConfig
    generator: GeneratorConfig = section(GeneratorConfig)
    environment: EnvironmentConfig = section(
        EnvironmentConfig,
        used_by=ENGINES,
        on_change=Effect("warning", "rewards change; groups that wait to be trained have the old ones"),
    )
    vla: VLAConfig = section(VLAConfig)
    slurm: SlurmConfig = section(SlurmConfig)
