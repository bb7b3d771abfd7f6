"""One training step: load the batch, score it, estimate advantages, update critic and policy, describe it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from hpcrl.algorithms.entropies import highest_entropies
from hpcrl.config import TrainerConfig
from hpcrl.observe.metrics import Histogram
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import (
    Advantages,
    KlRewardPenalty,
    carried_numbers,
    estimate_advantages,
    named_numbers,
    no_advantages,
    subtract_divergence,
)
from hpcrl.trainer.backends.base import CriticEngine, ModelEngine, Objective, PolicyEngine, UpdateResult
from hpcrl.trainer.batching import Limits
from hpcrl.trainer.critic.loss import CRITIC_REDUCTION, build_critic_objective, describe_critic
from hpcrl.trainer.critic.peer import CriticPeer
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import (
    PhaseTimer,
    advantage_histogram,
    describe_batch,
    describe_cost,
    describe_mini_batches,
    describe_updates,
    mismatch_histogram,
)
from hpcrl.trainer.mismatch import MismatchLimit
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.offline.build import reduction_of
from hpcrl.trainer.offline.likelihood import score_by_teacher
from hpcrl.trainer.offline.validation import Validation
from hpcrl.trainer.packing import MiniBatch, PackedRows, regrouped
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.trainer.rng import random_state, set_random_state
from hpcrl.trainer.saving.checkpoint import ResumePoint
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.saving.mid_batch import PartialBatch, read_partial_batch
from hpcrl.trainer.scoring.hints import score_by_hints
from hpcrl.trainer.scoring.labels import fill_labels
from hpcrl.trainer.stop import StopConsensus, Stopping
from hpcrl.types import Batch


class Learner:
    """The training step. All ranks have a learner, and call it alike.

    Args:
        run: whose samples are trained.
        ranks: who has which models.
        critic: None where nothing compares with one.
        objective: what the policy minimizes.
        limits: of micro-batches.
        model_flops: of the policy.
        validation: what is evaluated after steps; None: nothing.
        max_seq_len: of the whole configuration, divisor of loss_reduction=seq_mean_token_sum_norm.
        mismatch: limit of the difference between engines and trainer.
        start: the checkpoint that training continues from.
        compares_logprobs: log-probabilities are compared with those of the old policy or of a reference.

    Attributes:
        carried: numbers that the advantage estimator keeps from batch to batch.
        batch: the last one of which optimizer steps were made; None before the first.
        partial: that batch, where they are not all made.
        histograms: of the last batch.
        world: all trainer ranks.
    """

    def __init__(
        self,
        run: Run,
        ranks: ModelRanks,
        trainer: TrainerConfig,
        policy: PolicyEngine,
        critic: CriticEngine | None,
        *,
        objective: Objective,
        limits: Limits,
        model_flops: ModelFlops,
        max_seq_len: int,
        mismatch: MismatchLimit,
        dumps: Dumps,
        consensus: StopConsensus,
        start: ResumePoint,
        validation: Validation | None = None,
        compares_logprobs: bool = True,
    ) -> None:
        self.policy, self.critic, self.consensus, self.start = policy, critic, consensus, start
        self._ranks, self.world = ranks, ranks.everyone
        self.kl_penalty = KlRewardPenalty(trainer.algorithm, start.extra_state)
        self.carried = carried_numbers(trainer.algorithm, start.extra_state)
        self.batch: Batch | None = None
        self.partial: PartialBatch | None = None
        self._flops, self._model_flops, self._limits = 0.0, model_flops, limits
        self.histograms: dict[str, Histogram | None] = {}
        self._run, self._trainer, self._dumps, self._begun = run, trainer, dumps, start.mid_batch
        self._mismatch, self._validation = mismatch, validation
        self._offline = trainer.offline
        self._objective, self._compares_logprobs = objective, compares_logprobs
        self._critic_objective = build_critic_objective(trainer.algorithm.value_clip)
        self._reduction = reduction_of(trainer, max_seq_len)
        self._random: dict[str, torch.Tensor] = {}
        own = policy if ranks.policy else critic
        assert own is not None
        self._data = own.data
        self._peer = CriticPeer(ranks, own.data, consensus)

    def schedule(self, total_steps: int) -> None:
        """Set the number of steps of the whole run in the engines."""
        trainer = self._trainer
        policy_steps = max(total_steps - trainer.critic.warmup_steps, 0)
        self.policy.schedule(policy_steps * trainer.updates_per_batch(trainer.policy_mini_batch_size))
        if self.critic is not None:
            self.critic.schedule(total_steps * trainer.updates_per_batch(trainer.critic_mini_batch_size))

    def extra_state(self) -> dict[str, float]:
        """Return the state that a checkpoint saves beside the engines' state."""
        named = named_numbers(self._trainer.algorithm, self.carried)
        return self.kl_penalty.extra_state() | named

    def reset_reference(self, step: int, steps_per_epoch: int, timer: PhaseTimer) -> None:
        """Update the reference from the policy after `step`, where the configuration asks for it."""
        if self._trainer.distillation.self_teacher_model == "ema":
            with timer("update_ref_with_policy"):
                rate = self._trainer.distillation.self_teacher.ema_rate
                self.policy.reset_reference(fresh_optimizer=False, rate=rate)
        elif self._trainer.resets_reference(step, steps_per_epoch):
            with timer("update_ref_with_policy"):
                self.policy.reset_reference(fresh_optimizer=self._trainer.algorithm.resets_optimizer)

    def validate(self, step: int, total: int, timer: PhaseTimer) -> dict[str, float]:
        """Return the loss of the validation sets after `step`, where that is due; errors as of `Validation.losses`."""
        if self._validation is None or not self._validation.is_due(step, total, self.world):
            return {}
        with timer("eval"):
            return self._validation.losses(self.policy, step, self.world, self.consensus)

    def cost(self, batch: Batch, seconds: dict[str, float]) -> dict[str, float]:
        """Return the cost of the last trained batch, with `seconds` by phase; empty on ranks without the policy."""
        if not self._ranks.policy:
            return {}
        return describe_cost(batch, seconds, self._ranks.own, self._flops, self._trainer.peak_tflops)

    def train(self, batch: Batch, timer: PhaseTimer) -> dict[str, float]:
        """Make the optimizer steps of a batch and return its metrics; none on ranks without the policy.

        Raises:
            Stopping: they are not all made. Everything is then as after the last one (`batch` and `partial` are of it) or as before the batch.
        """
        with self._undone_if_stopped(batch, timer):
            minis = self._load(batch, timer)
            partial_batch = self.partial = self._resumed(batch, minis, timer) or self._scored(batch, minis, timer)
            self._dump(batch, minis, timer)
            with self._peer.separately("update", timer, partial(self._peer.share_updates, partial_batch, timer)):
                for update, mini in self._pending(partial_batch, timer):
                    with timer(update.phase):
                        micro_batches = mini.micro_batches(before=self._counted("update.micro_batch", timer))
                        totals = update.engine.forward_backward(micro_batches, update.objective)
                        self._step(batch, update, mini, totals)
                if self._ranks.policy:
                    self.policy.end_batch(batch.step)
        return self._describe(batch, partial_batch) if self._ranks.policy else {}

    def _load(self, batch: Batch, timer: PhaseTimer) -> list[MiniBatch]:
        with timer("load_rows"):
            return load_mini_batches(self._run, batch, self._trainer, self._limits, self._data, self._reduction)

    def _dump(self, batch: Batch, minis: list[MiniBatch], timer: PhaseTimer) -> None:
        for mini in minis:
            mini.rows.complete_rollout()
        if self._trainer.dump_data_batch:
            with timer("dump_data_batch"):
                self._measure_entropies(minis)
                self._dumps.write(batch, minis, self._data)

    def _step(self, batch: Batch, update: Updates, mini: MiniBatch, totals: Mapping[str, torch.Tensor]) -> None:
        sums = sum_over_ranks(totals, update.engine.data)
        if update.engine is self.policy and not update.done and not self._offline:
            self._mismatch.check(batch.step, sums, speaks=self.world.first)
        # without a trained token, momentum and weight decay alone would move the model
        report = update.engine.step() if mini.tokens else update.engine.skip()
        update.done.append(UpdateResult(sums, report))
        self._random = random_state(self.world.device)
        self.consensus.mark_progress()

    def _describe(self, batch: Batch, work: PartialBatch) -> dict[str, float]:
        minis = work.minis
        lengths = list(chain.from_iterable(mini.plan.lengths for mini in minis))
        computed = list(chain.from_iterable(mini.plan.computed for mini in minis))
        flops = self._model_flops.training(lengths, sum(mini.tokens for mini in minis), computed)
        self._flops = self._trainer.update_epochs_per_batch * flops if work.policy else 0.0
        described = {}
        if not self._offline:
            advantages = advantage_histogram(minis, self._data)
            self.histograms = {"advantage": advantages, "log10_mismatch": mismatch_histogram(work.policy)}
            described = describe_batch(batch, work.advantages, self._trainer.algorithm)
        described |= describe_mini_batches(minis) | work.kl_penalty | self._peer.metrics
        described |= describe_critic(work.critic) if work.critic else {}
        return described | (describe_updates(work.policy) if work.policy else {})

    def _scored(self, batch: Batch, minis: list[MiniBatch], timer: PhaseTimer) -> PartialBatch:
        data, samples, of_hints = self._data, [mini.rows for mini in minis], dict[str, float]()
        if not self._offline or self._trainer.uses_reference or self._trainer.teaches_rows:
            with self._peer.separately("score", timer), timer("fwd_logprobs_values_reward"):
                timer.count()
                for number, mini in enumerate(minis):
                    self._score(batch, mini, self._counted("score.micro_batch", timer), first=number == 0)
                self._select_tokens(batch, minis)
                if self._trainer.distillation.self_teacher_model and self._ranks.policy:
                    before = partial(self.consensus, "score.micro_batch")
                    rollout = self._trainer.algorithm.use_rollout_logprobs_for_loss
                    of_hints = score_by_hints(
                        minis, self.policy, self._trainer.distillation, self._limits, before, rollout=rollout
                    )
                if self._trainer.unpaired:
                    before = partial(self.consensus, "score.micro_batch")
                    longest = self._trainer.max_length
                    fill_labels(self._run, batch, minis, self.policy, self._trainer.dpo, longest, self._limits, before)
        if self._trainer.trains_reward_model:
            for each in samples:
                each.scores.margins = each.rewards
        if self._offline:
            return PartialBatch(data, self._trainer.batch_settings, batch, minis, {}, Advantages())
        self._peer.share_values(minis)
        metrics, advantages = self._advantages(batch, samples, timer) if self._ranks.policy else ({}, Advantages())
        self._peer.share_returns(minis)
        return PartialBatch(data, self._trainer.batch_settings, batch, minis, metrics | of_hints, advantages)

    def _advantages(
        self, batch: Batch, samples: list[PackedRows], timer: PhaseTimer
    ) -> tuple[dict[str, float], Advantages]:
        data = self._data
        with timer("compute_advantages_and_returns"):
            algorithm, distillation = self._trainer.algorithm, self._trainer.distillation
            metrics = self.kl_penalty.apply_kl_penalty(samples, data.sum)
            if distillation.rewards_count:
                advantages = estimate_advantages(batch, samples, algorithm, data.sum, self.carried)
            else:
                advantages = no_advantages(samples)
            if distillation.enable:
                metrics |= subtract_divergence(samples, distillation, algorithm, data.sum)
        return metrics, advantages

    def _trains_policy(self, batch: Batch) -> bool:
        """Return whether a batch updates the policy on this rank, and not the critic alone."""
        return self._ranks.policy and batch.step > self._trainer.critic.warmup_steps

    def _select_tokens(self, batch: Batch, minis: list[MiniBatch]) -> None:
        """Fill in which tokens of each mini-batch the policy loss counts, where those are not all."""
        share = self._trainer.algorithm.top_entropy_quantile
        if self._offline or share == 1 or not self._trains_policy(batch):
            return
        self._measure_entropies(minis, partial(self.consensus, "score.micro_batch"))
        for mini in minis:
            scores = mini.rows.scores
            assert scores.entropies is not None
            scores.selected = highest_entropies(scores.entropies, mini.rows.loss_mask, share, self._data.sum)

    def _measure_entropies(self, minis: list[MiniBatch], before: Callable[[], None] = lambda: None) -> None:
        """Fill in entropies of the policy before the update; after some updates of a batch, they are there already."""
        for mini in minis if self._ranks.policy and not self._offline else []:
            if mini.rows.scores.entropies is None:
                mini.rows.scores.entropies = mini.scored(self.policy.entropies, before)

    def _counted(self, place: str, timer: PhaseTimer) -> Callable[[], None]:
        """Return what is called before each micro-batch: ranks agree whether to stop, and the timer counts it."""

        def before() -> None:
            self.consensus(place)
            timer.begun += 1

        return before

    def _score(self, batch: Batch, mini: MiniBatch, before: Callable[[], None], *, first: bool) -> None:
        algorithm, scores = self._trainer.algorithm, mini.rows.scores
        # what the first update trains, and only once, still meets the old policy itself
        old = not first or self._trainer.update_epochs_per_batch > 1 or algorithm.use_kl_in_reward
        old = old or self._trainer.distillation.enable
        here, old = self._ranks.policy, old and self._compares_logprobs
        old = old and not algorithm.use_rollout_logprobs_for_loss
        if here and not self._offline:
            self._score_old(mini, before, old=old)
        if (
            here
            and self._trainer.colocated_reference
            and self._compares_logprobs
            and self._trainer.compares_with_reference
        ):
            scores.ref_logprobs = mini.scored(partial(self.policy.logprobs, reference=True), before)
        if here and self._trainer.teaches_rows:
            score_by_teacher(batch, mini, self.policy, self._trainer.distillation, before)
        if self.critic is not None and self._ranks.critic:
            scores.values = mini.scored(self.critic.values, before)

    def _score_old(self, mini: MiniBatch, before: Callable[[], None], *, old: bool) -> None:
        """Fill in log-probabilities of the old policy, where `old` asks for them, and what else the advantages need of it."""
        algorithm, scores = self._trainer.algorithm, mini.rows.scores
        computed = old and not algorithm.approximate_old_logprobs
        if old and not computed:
            scores.staleness = mini.rows.staleness.clamp(min=0)
        if algorithm.needs_norms:
            logprobs_P, scores.squared_norms = mini.scored_both(self.policy.logprobs_and_norms, before)
            scores.old_logprobs = logprobs_P if computed else None
        elif computed:
            scores.old_logprobs = mini.scored(self.policy.logprobs, before)

    def _resumed(self, batch: Batch, minis: list[MiniBatch], timer: PhaseTimer) -> PartialBatch | None:
        """Return the batch as an earlier attempt left it between two optimizer steps; None where none has begun it."""
        if self._begun is None:
            return None
        work = read_partial_batch(self._begun, self._trainer.batch_settings, batch, minis, self._data, self.world)
        timer.resume(work.seconds if self._ranks.policy else {})
        self._begun = None
        return work

    def _pending(self, work: PartialBatch, timer: PhaseTimer) -> Iterator[tuple[Updates, MiniBatch]]:
        """Yield the mini-batches of the optimizer steps that are still to be made on this rank: the critic's, then the policy's."""
        passes = self._trainer.update_epochs_per_batch
        for update in self._updates(work, timer):
            pending = (update.minis * passes)[len(update.done) :]
            timer.count(sum(len(mini.plan.train[mini.rank]) for mini in pending))
            for mini in pending:
                yield update, mini

    def _updates(self, work: PartialBatch, timer: PhaseTimer) -> Iterator[Updates]:
        if self.critic is not None and self._ranks.critic:
            size, data = self._trainer.critic_mini_batch_size, self.critic.data
            with timer("critic_train"):
                minis = regrouped(work.minis, work.batch, size, self._limits, data, CRITIC_REDUCTION)
            yield Updates("critic_train", self.critic, self._critic_objective, minis, work.critic)
        if self._trains_policy(work.batch):
            yield Updates("policy_train", self.policy, self._objective, work.minis, work.policy)

    @contextmanager
    def _undone_if_stopped(self, batch: Batch, timer: PhaseTimer) -> Iterator[None]:
        """Leave the state after the last whole optimizer step, where ranks agree to stop inside of a batch."""
        coefficient, carried = self.kl_penalty.coefficient, dict(self.carried)
        self._random = random_state(self.world.device)
        try:
            yield
        except Stopping:
            for engine in (self.policy, self.critic):
                if engine is not None:
                    engine.skip()
            set_random_state(self._random, self.world.device)
            if self.partial is not None and self.partial.updates:
                self.batch, self.partial.seconds = batch, timer.lap()
            else:
                self.partial, self.kl_penalty.coefficient, self.carried = None, coefficient, carried
            raise
        self.batch, self.partial = batch, None


@dataclass(frozen=True)
class Updates:
    """The optimizer steps of one model in a batch.

    Attributes:
        minis: what each of them trains, in each pass over the batch.
        done: those that are made.
    """

    phase: str
    engine: ModelEngine
    objective: Objective
    minis: list[MiniBatch]
    done: list[UpdateResult]


def sum_over_ranks(totals: Mapping[str, torch.Tensor], data: World) -> dict[str, float]:
    """Return metric sums of all ranks, or extremes, as `merge`."""
    values = dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
    signs = {name: 1 if name.endswith("_max") else -1 for name in sorted(values) if name.endswith(("_max", "_min"))}
    summed = sorted(set(values) - set(signs))
    found = dict(zip(summed, data.sum([values[name] for name in summed]), strict=True))
    extremes = data.max([sign * values[name] for name, sign in signs.items()]) if signs else []
    return found | {name: sign * extreme for (name, sign), extreme in zip(signs.items(), extremes, strict=True)}
