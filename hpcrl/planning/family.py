"""Declares what `hpcrl plan` requires of a policy's family: its model, and the memory of a rank."""

from __future__ import annotations

from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.family import family_of


class PlanFamily(Protocol):
    """The module `plan` of a family."""

    def describe_policy(self, config: Config) -> tuple[list[str], dict[str, int]] | None:
        """Return lines about the policy, and the bytes that a rank needs of it, by what they hold; None: of a language model, which `hpcrl plan` counts by its layers.

        Raises:
            ImportError, DataError, RunError: the model cannot be loaded here.
        """
        ...


def plan_family(config: Config) -> PlanFamily:
    return cast(PlanFamily, family_of(config).layer("plan"))
