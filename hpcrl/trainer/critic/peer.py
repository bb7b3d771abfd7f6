"""Exchange between the policy's ranks and the critic's in a step: waiting, scores and results.

Where all ranks have the same models, every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from hpcrl.trainer.backends.base import UpdateResult
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import PhaseTimer, describe_memory
from hpcrl.trainer.packing import MiniBatch
from hpcrl.trainer.saving.mid_batch import PartialBatch
from hpcrl.trainer.stop import StopConsensus, Stopping


class CriticPeer:
    """The link between the ranks of the policy and those of the critic.

    Args:
        data: the ranks that this rank's samples are assigned to.

    Attributes:
        metrics: memory/critic_* of the last batch, on the policy's ranks.
    """

    def __init__(self, ranks: ModelRanks, data: World, consensus: StopConsensus) -> None:
        self._ranks, self._data, self._consensus = ranks, data, consensus
        self.metrics = dict[str, float]()

    @contextmanager
    def separately(self, place: str, timer: PhaseTimer, after: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Run the block on the ranks of each model without the others, until all have ended it or some were stopped.

        Args:
            after: is called then, on all ranks.

        Raises:
            Stopping: on all ranks: some were stopped.
        """
        if self._ranks.same_models:
            yield
            return
        if place == "update":
            self._consensus.mark_progress()  # the other model's optimizer steps are progress of this rank too
        stopped = False
        try:
            with self._consensus.among(self._ranks.own):
                yield
        except Stopping:
            stopped = True
        with timer("wait_for_critic" if self._ranks.policy else "wait_for_policy"):
            stopped = self._consensus.meet(stopped)
        after()
        if stopped:
            raise Stopping(place)

    def share_values(self, minis: Sequence[MiniBatch]) -> None:
        """Give the policy's ranks the critic's values [P] of their samples."""
        if not self._ranks.same_models:
            values = [mini.rows.scores.values for mini in minis]
            for mini, values_P in zip(minis, self._exchange(minis, values, computed=self._ranks.critic), strict=True):
                mini.rows.scores.values = values_P

    def share_returns(self, minis: Sequence[MiniBatch]) -> None:
        """Give the critic's ranks the returns [P] of their samples."""
        if not self._ranks.same_models:
            returns = [mini.rows.scores.returns for mini in minis]
            for mini, returns_P in zip(minis, self._exchange(minis, returns, computed=self._ranks.policy), strict=True):
                mini.rows.scores.returns = returns_P

    def share_updates(self, batch: PartialBatch, timer: PhaseTimer) -> None:
        """Give all ranks the optimizer steps of both models, and the policy's ranks the seconds and memory of the critic's."""
        own = {
            "updates": [asdict(update) for update in (batch.policy if self._ranks.policy else batch.critic)],
            "seconds": {phase: timer.seconds(phase) for phase in ("critic_train", "wait_for_policy")},
            "memory": {} if self._ranks.policy else describe_memory(self._ranks.own),
        }
        policy, critic = self._ranks.broadcast_first(own)
        batch.policy[:], batch.critic[:] = (
            [UpdateResult.of(each) for each in model["updates"]] for model in (policy, critic)
        )
        if self._ranks.policy:
            timer.resume(critic["seconds"])
            self.metrics = {name.replace("/", "/critic_"): peak for name, peak in critic["memory"].items()}

    def _exchange(
        self, minis: Sequence[MiniBatch], columns: Sequence[torch.Tensor | None], *, computed: bool
    ) -> list[torch.Tensor]:
        together = self._data.sample_group
        sends = computed and (together is None or together.rank() == 0)  # one of the ranks with the same samples
        return self._ranks.exchange(minis, [each for each in columns if each is not None] if sends else None)
