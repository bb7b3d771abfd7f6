"""Checks of language models: its functions are those of hpcrl.launch.family.LaunchFamily."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config import Config
from hpcrl.rundir.layout import Run


def check_model(config: Config) -> None:
    """Do nothing: hpcrl/launch/submit checks language models."""


def evaluated_model(run: Run, export: Path, place: Path) -> Path:  # noqa: ARG001
    return export
