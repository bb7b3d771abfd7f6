"""Trainer's side of a policy's family: its engine, its objective, and the operations of its steps."""

from __future__ import annotations

from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.flops import ModelFlops


class TrainerFamily(Protocol):
    """The module `trainer` of a family."""

    def load_policy(self, config: Config, world: World) -> PolicyEngine:
        """Load the policy, and the reference if anything compares with it.

        Raises:
            DataError: a model path holds no model, or the model does not have what the configuration names.
            RunError: a package that a setting needs is not installed.
        """
        ...

    def objective(self, config: Config) -> Objective:
        """Return the objective of the policy."""
        ...

    def flops(self, config: Config) -> ModelFlops:
        """Return the floating-point operations of the policy, as it is trained; errors as of `load_policy`."""
        ...


def trainer_family(config: Config) -> TrainerFamily:
    return cast(TrainerFamily, family_of(config).layer("trainer"))
