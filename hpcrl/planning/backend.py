"""Declares what `hpcrl plan` requires of an inference engine: the memory of a replica."""

from __future__ import annotations

from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.backend import backend_of
from hpcrl.planning.memory import Shapes


class PlanBackend(Protocol):
    """The module `plan` of an engine."""

    def describe_engines(self, config: Config, shapes: Shapes) -> tuple[list[str], dict[str, int]] | None:
        """Return lines about a replica's memory, which `hpcrl plan` prints, and its numbers by name, for `hpcrl plan --json`; None: it has none to plan.

        Args:
            shapes: of the policy.
        """
        ...


def describe_engines(config: Config, shapes: Shapes) -> tuple[list[str], dict[str, int]] | None:
    """Return lines and numbers about the memory of the engine's replicas; None without an engine, or if it plans nothing."""
    backend = backend_of(config.generator.inference_engine)
    if config.has_engines and "plan" in backend.brings:
        return cast(PlanBackend, backend.layer("plan")).describe_engines(config, shapes)
    return None
