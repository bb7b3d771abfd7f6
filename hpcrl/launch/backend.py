"""Declares what submission requires of an inference engine: checks of the model and of the engine's options, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from hpcrl.config import Config
from hpcrl.config.backend import Backend
from hpcrl.config.errors import Problem
from hpcrl.data.vision.families import VisionFamily


class LaunchBackend(Protocol):
    """The module `launch` of an engine. Importing it needs no torch."""

    def check_engine(self, config: Config, entries: Mapping[str, Any] | None) -> Iterator[Problem]:
        """Yield what the engines of a run would refuse when they start.

        Args:
            entries: of the policy's config.json; None: it is not on this machine.
        """
        ...

    def check_teacher(self, config: Config) -> Iterator[Problem]:
        """Yield what the engine of a teacher would refuse when it starts."""
        ...

    def check_vision(self, config: Config, family: VisionFamily, sees: str) -> Iterator[Problem]:
        """Yield what the engines do not do for a policy that sees images.

        Args:
            family: of vision-language models.
            sees: begins messages.
        """
        ...


def launch_backend(backend: Backend) -> LaunchBackend | None:
    """Return the module of an engine; None: it checks nothing."""
    return cast(LaunchBackend, backend.layer("launch")) if "launch" in backend.brings else None
