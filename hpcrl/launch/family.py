"""Declares what submission and evaluation require of a policy's family: checks of the model's files, and models that need more than an
export."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.rundir.layout import Run


class LaunchFamily(Protocol):
    """The module `launch` of a family. Importing it needs no torch."""

    def check_model(self, config: Config) -> None:
        """Check the policy's files, as far as they lie on this machine.

        Raises:
            DataError: they cannot be used; the message begins with the setting.
        """
        ...

    def evaluated_model(self, run: Run, export: Path, place: Path) -> Path:
        """Return the directory that an engine loads for the policy of a run.

        Args:
            export: the exported policy.
            place: a directory that may be made for it.

        Raises:
            DataError: what the run began with is gone.
        """
        ...


def launch_family(config: Config) -> LaunchFamily:
    return cast(LaunchFamily, family_of(config).layer("launch"))
