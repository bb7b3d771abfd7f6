"""Checks of PI0.5: its functions are those of hpcrl.launch.family.LaunchFamily."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.sections.model import Pretrained
from hpcrl.families.pi05.statistics import statistics_of
from hpcrl.launch.submit.models import folder_of
from hpcrl.rundir.layout import Run


def check_model(config: Config) -> None:
    """Check the statistics of a model."""
    folder = folder_of(config.trainer.policy.model.pretrained)
    if folder and find_spec("numpy") and find_spec("safetensors"):
        statistics_of(Pretrained(str(folder)))


def evaluated_model(run: Run, export: Path, place: Path) -> Path:  # noqa: ARG001
    return export
