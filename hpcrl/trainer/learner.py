"""One batch from its files to the metrics of its optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import TrainerConfig, uses_reference
from hpcrl.run.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.critic import appraise, train_critic
from hpcrl.trainer.describe import Clock, describe_batch, describe_mini_batches, describe_updates
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.engine import CriticEngine, Objective, PolicyEngine
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.plan import Limit
from hpcrl.trainer.update import MiniBatch, load_mini_batches, score, train
from hpcrl.trainer.world import World
from hpcrl.types import Batch


@dataclass(frozen=True)
class Learner:
    """What every batch is trained with. All ranks have one, and call it alike."""

    run: Run
    world: World
    trainer: TrainerConfig
    policy: PolicyEngine
    critic: CriticEngine | None
    objective: Objective
    reduction: Reduction
    penalty: KlPenalty
    dumps: Dumps

    def train(self, batch: Batch, clock: Clock) -> dict[str, float]:
        """Make the optimizer steps of a batch and return its metrics."""
        trainer, algorithm, world = self.trainer, self.trainer.algorithm, self.world
        backward = Limit(trainer.micro_train_batch_size_per_gpu, trainer.max_tokens_per_micro_batch)
        with clock("load_samples"):
            size = trainer.policy_mini_batch_size
            minis = load_mini_batches(self.run, batch, algorithm, size, backward, world, self.reduction)
        with clock("fwd_logprobs_values_reward"):
            self._score(minis)
        with clock("compute_advantages_and_returns"):
            rows = [row for mini in minis for row in mini.rows]
            charged = self.penalty.charge(rows, world.sum)
            advantages = estimate_advantages(batch, rows, algorithm, world.sum)
        if trainer.dump_data_batch:
            with clock("dump_data_batch"):
                self.dumps.write(batch, minis)
        of_critic: dict[str, float] = {}
        if self.critic is not None:
            with clock("critic_train"):
                of_critic = train_critic(self.critic, minis, batch, trainer, backward, world)
        with clock("policy_train"):
            epochs = minis * trainer.update_epochs_per_batch
            updates = [train(self.policy, mini, backward, self.objective, world) for mini in epochs]
        described = describe_batch(batch, advantages) | describe_mini_batches(minis, backward)
        return described | charged | of_critic | describe_updates(updates)

    def _score(self, minis: list[MiniBatch]) -> None:
        trainer, algorithm = self.trainer, self.trainer.algorithm
        forward = Limit(trainer.micro_forward_batch_size_per_gpu, trainer.max_tokens_per_micro_batch)
        for number, mini in enumerate(minis):
            # what the first update trains, and only once, still meets the old policy itself
            old = number > 0 or trainer.update_epochs_per_batch > 1 or algorithm.use_kl_in_reward
            old &= not algorithm.use_rollout_logprobs_for_loss
            score(self.policy, mini, forward, old=old, reference=uses_reference(trainer))
            if self.critic is not None:
                appraise(self.critic, mini, forward)
