"""One batch from its files to the metrics of its optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import TrainerConfig, uses_reference
from hpcrl.run.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.critic import appraise, build_critic_objective, critic_mini_batches, describe_critic
from hpcrl.trainer.describe import Clock, describe_batch, describe_mini_batches, describe_updates
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.engine import CriticEngine, Engine, Objective, PolicyEngine
from hpcrl.trainer.midstep import Unfinished, read_unfinished
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.plan import Limit
from hpcrl.trainer.random_state import random_state, set_random_state
from hpcrl.trainer.stop import Agreement, Stopping
from hpcrl.trainer.update import MiniBatch, Trained, load_mini_batches, score, train
from hpcrl.trainer.world import World
from hpcrl.types import Batch


@dataclass
class Learner:
    """What every batch is trained with. All ranks have one, and call it alike.

    Attributes:
        begun: checkpoint that was saved inside the step which comes first; None where it begins with a step.
        batch: the last one of which optimizer steps were made; None before the first.
        unfinished: that batch, where they are not all made.
    """

    run: Run
    world: World
    trainer: TrainerConfig
    policy: PolicyEngine
    critic: CriticEngine | None
    objective: Objective
    reduction: Reduction
    penalty: KlPenalty
    dumps: Dumps
    agreement: Agreement
    begun: Path | None
    batch: Batch | None = None
    unfinished: Unfinished | None = None
    _random: dict[str, torch.Tensor] = field(default_factory=dict)

    def train(self, batch: Batch, clock: Clock) -> dict[str, float]:
        """Make the optimizer steps of a batch and return its metrics.

        Raises:
            Stopping: they are not all made. Everything is then as after the last one, or as before the batch, which `batch`
                and `unfinished` tell.
        """
        coefficient = self.penalty.coefficient
        self._random = random_state(self.world.device)
        try:
            done = self._train(batch, clock)
        except Stopping:
            for engine in (self.policy, self.critic):
                if engine is not None:
                    engine.skip()
            set_random_state(self._random, self.world.device)
            if self.unfinished is not None and self.unfinished.updates:
                self.batch, self.unfinished.seconds = batch, clock.lap()
            else:
                self.unfinished, self.penalty.coefficient = None, coefficient
            raise
        self.batch, self.unfinished = batch, None
        return done

    def _train(self, batch: Batch, clock: Clock) -> dict[str, float]:
        trainer = self.trainer
        backward = Limit(trainer.micro_train_batch_size_per_gpu, trainer.max_tokens_per_micro_batch)
        with clock("load_samples"):
            size = trainer.policy_mini_batch_size
            minis = load_mini_batches(
                self.run, batch, trainer.algorithm, size, backward, self.policy.data, self.reduction
            )
        self.unfinished = work = self._taken_up(batch, minis, clock) or self._scored(batch, minis, clock)
        if trainer.dump_data_batch:
            with clock("dump_data_batch"):
                self.dumps.write(batch, minis, self.policy.data)
        of_critic: dict[str, float] = {}
        if self.critic is not None:
            with clock("critic_train"):
                own = critic_mini_batches(minis, batch, trainer, backward, self.policy.data)
                objective = build_critic_objective(trainer.algorithm.value_clip)
                self._update(self.critic, own, backward, objective, work.critic)
            of_critic = describe_critic(work.critic)
        with clock("policy_train"):
            self._update(self.policy, minis, backward, self.objective, work.policy)
        described = describe_batch(batch, work.advantages) | describe_mini_batches(minis, backward)
        return described | work.charged | of_critic | describe_updates(work.policy)

    def _update(
        self, engine: Engine, minis: list[MiniBatch], limit: Limit, objective: Objective, done: list[Trained]
    ) -> None:
        """Make the optimizer steps that `done` does not have yet, and append them to it."""
        for mini in (minis * self.trainer.update_epochs_per_batch)[len(done) :]:
            done.append(train(engine, mini, limit, objective, self.agreement))
            self._random = random_state(self.world.device)
            self.agreement.at_stake()

    def _taken_up(self, batch: Batch, minis: list[MiniBatch], clock: Clock) -> Unfinished | None:
        """Return the batch as an earlier attempt left it; None where none has begun it."""
        if self.begun is None:
            return None
        work = read_unfinished(self.begun, self.trainer, batch, minis, self.policy.data, self.world)
        clock.resume(work.seconds)
        self.begun = None
        return work

    def _scored(self, batch: Batch, minis: list[MiniBatch], clock: Clock) -> Unfinished:
        algorithm, data = self.trainer.algorithm, self.policy.data
        with clock("fwd_logprobs_values_reward"):
            self._score(minis)
        with clock("compute_advantages_and_returns"):
            rows = [row for mini in minis for row in mini.rows]
            charged = self.penalty.charge(rows, data.sum)
            advantages = estimate_advantages(batch, rows, algorithm, data.sum)
        return Unfinished(data, self.trainer, batch, minis, charged, advantages)

    def _score(self, minis: list[MiniBatch]) -> None:
        trainer, algorithm = self.trainer, self.trainer.algorithm
        forward = Limit(trainer.micro_forward_batch_size_per_gpu, trainer.max_tokens_per_micro_batch)
        for number, mini in enumerate(minis):
            # what the first update trains, and only once, still meets the old policy itself
            old = number > 0 or trainer.update_epochs_per_batch > 1 or algorithm.use_kl_in_reward
            old &= not algorithm.use_rollout_logprobs_for_loss
            score(self.policy, mini, forward, old=old, reference=uses_reference(trainer), between=self.agreement)
            if self.critic is not None:
                appraise(self.critic, mini, forward, self.agreement)
