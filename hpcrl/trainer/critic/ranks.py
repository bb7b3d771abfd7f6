"""Models of the trainer's ranks: all models on all ranks, or policy and critic on ranks of their own.

A critic on ranks of its own is trained in the same loop, by the same batches: the policy's ranks come first among the trainer's, then the
critic's. Both groups read the samples of a batch, and each divides them among its own ranks. Each exchanges its results where
the other needs it:

    policy's ranks                          critic's ranks
    log-probabilities                       values
                          <-- values
    advantages and returns
                          returns -->
    update the policy                       update the critic
                          <-- metrics -->
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hpcrl.config.sections.placement import PlacementConfig
from hpcrl.errors import RunError
from hpcrl.trainer.backends.base import Writer
from hpcrl.trainer.backends.shards import write_folders
from hpcrl.trainer.distributed import World, broadcast_json
from hpcrl.trainer.packing import MiniBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRanks:
    """The models of this rank, the ranks with the same models, and all ranks.

    Attributes:
        everyone: all trainer ranks.
        own: those with the same models as this one.
        policy: whether the policy, and the reference beside it, are here.
        critic: whether the critic is here, where there is one.
        first_of_critic: the first rank of a critic on ranks of its own; 0: it is beside the policy.
    """

    everyone: World
    own: World
    policy: bool = True
    critic: bool = True
    first_of_critic: int = 0

    @staticmethod
    def of(placement: PlacementConfig, world: World, *, own_critic: bool) -> ModelRanks:
        """Return the ranks' models by the configuration; all ranks call it. Raises RunError where the number of ranks differs from it.

        Args:
            own_critic: the critic has ranks of its own.
        """
        if not own_critic:
            return ModelRanks(world, world)
        first, others = placement.policy_ranks, placement.critic_ranks
        if first + others != world.size:
            raise RunError(
                f"{first} ranks of the policy and {others} of the critic were to be started, found {world.size}"
            )
        own, policy = world.part([first, others]), world.rank < first
        if own.first:
            log.info("the %s: %d rank(s), from rank %d on", "policy" if policy else "critic", own.size, world.rank)
        # both train the same samples
        return ModelRanks(world, replace(own, is_leader=policy), policy, not policy, first)

    @property
    def same_models(self) -> bool:
        """Whether all ranks have the same models."""
        return self.first_of_critic == 0

    def broadcast_first(self, value: Any) -> tuple[Any, Any]:
        """Return the values of the first rank of the policy and of the first rank of the critic. All ranks call it."""
        policy, critic = (broadcast_json(value, first, self.everyone.control) for first in (0, self.first_of_critic))
        return policy, critic

    def exchange(self, minis: Sequence[MiniBatch], columns: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """Return [P] float32 of each mini-batch for this rank's samples, from the ranks that compute the column. All ranks call it.

        One all-reduce carries it, to which one rank contributes each token: 4 bytes per token of the batch, as against a gradient's 4
        bytes per parameter.

        Args:
            columns: [P] of each mini-batch, on the ranks that compute it, one of each sample group; None on the others.
        """
        refs = {(ref.group, ref.index): ref.length for mini in minis for share in mini.plan.shares for ref in share}
        places = sorted(refs)
        ends = dict(zip(places, accumulate(refs[place] for place in places), strict=True))
        whole_P = torch.zeros(sum(refs.values()))

        def tokens_of(mini: MiniBatch) -> list[torch.Tensor]:
            return [
                whole_P[ends[ref.group, ref.index] - ref.length : ends[ref.group, ref.index]] for ref in mini.rows.refs
            ]

        for mini, column_P in zip(minis, columns or [], strict=columns is not None):
            for place_T, own_T in zip(tokens_of(mini), column_P.split(mini.rows.lengths), strict=True):
                place_T.copy_(own_T)
        dist.all_reduce(whole_P, group=self.everyone.control)
        return [torch.cat([torch.zeros(0), *tokens_of(mini)]) for mini in minis]


class RemoteModel:
    """A model on other ranks: joins collective checkpoints without writing anything."""

    def save(self, directory: Path, group: ProcessGroup) -> None:
        write_folders({"": {}}, directory, group)

    def snapshot(self) -> Writer:
        return self.save

    def restore(self, directory: Path) -> None:
        pass

    def schedule(self, total_updates: int) -> None:
        pass

    def skip(self) -> None:
        pass

    def reset_reference(self, *, fresh_optimizer: bool, rate: float = 1.0) -> None:
        pass
