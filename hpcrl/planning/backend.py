"""Declares what `hpcrl plan` requires of an inference engine: the memory of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.backend import backend_of
from hpcrl.planning.memory import Shapes


class PlanBackend(Protocol):
    """The module `plan` of an engine."""

    def describe_engines(self, config: Config, shapes: Shapes) -> Iterator[str]:
        """Yield lines about a replica's memory, which `hpcrl plan` prints.

        Args:
            shapes: of the policy.
        """
        ...


def describe_engines(config: Config, shapes: Shapes) -> Iterator[str]:
    """Yield lines about the memory of the engine's replicas; none without an engine, or if it plans nothing."""
    backend = backend_of(config.generator.inference_engine)
    if config.has_engines and "plan" in backend.brings:
        yield from cast(PlanBackend, backend.layer("plan")).describe_engines(config, shapes)
