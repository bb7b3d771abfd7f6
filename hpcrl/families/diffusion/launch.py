"""Checks and evaluation of pipelines: its functions are those of hpcrl.launch.family.LaunchFamily."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config import Config
from hpcrl.families.diffusion.pipelines.source import INDEX, TRANSFORMER, PipelineSource
from hpcrl.rundir.layout import Run


def check_model(config: Config) -> None:
    model = config.trainer.policy.model.pretrained
    if Path(model.path, INDEX).expanduser().is_file():
        PipelineSource(model, config.trainer.policy.diffusers).check()


def evaluated_model(run: Run, export: Path, place: Path) -> Path:
    """Make a pipeline of links: the one that a run trains, with an exported transformer in the place of its own."""
    trainer = Config.from_toml([run.config]).trainer
    folder = PipelineSource(trainer.policy.model.pretrained, trainer.policy.diffusers).folder.absolute()
    place.mkdir()
    for part in folder.iterdir():
        (place / part.name).symlink_to(export if part.name == TRANSFORMER else part)
    return place
