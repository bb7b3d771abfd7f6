"""The trainer; torchrun starts one process per rank with the run directory as only argument.

Consumes: config.toml, batches/, samples/, checkpoints/. Waits for: the controller's next batch.
Produces: weights/v<step> after every step, checkpoints/, exports/, metrics/trainer.jsonl. Ends with 0 when the steps are done or
it was asked to stop, and then everything that it trained is committed.
"""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import Config, TrainerConfig, max_seq_len, temperature, uses_reference
from hpcrl.run.layout import Run
from hpcrl.run.parent import die_with_parent
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.build import build_critic, build_policy
from hpcrl.trainer.checkpoint import Checkpoints
from hpcrl.trainer.critic import appraise, critic_updates_per_batch, train_critic
from hpcrl.trainer.describe import (
    Clock,
    describe_batch,
    describe_cost,
    describe_mini_batches,
    describe_times,
    describe_updates,
)
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.engine import CriticEngine, Objective, PolicyEngine
from hpcrl.trainer.link import Link, StopSignal
from hpcrl.trainer.objective import build_objective, build_reduction
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.plan import Limit
from hpcrl.trainer.profile import profiled
from hpcrl.trainer.publish import Publisher
from hpcrl.trainer.reference import reset_is_due, resets_optimizer
from hpcrl.trainer.schedule import is_due
from hpcrl.trainer.sharding import DTYPES
from hpcrl.trainer.update import Trained, load_mini_batches, score, train, updates_per_batch
from hpcrl.trainer.world import World, joined
from hpcrl.types import Batch


@record
def main(run_dir: str) -> None:
    die_with_parent()
    run, attempt = Run.open(run_dir), int(os.environ["HPCRL_ATTEMPT"])
    stop = StopSignal(run)
    config = Config.from_toml([run.config])
    trainer, dtype = config.trainer, DTYPES[config.generator.inference_engine.model_dtype]
    with joined(trainer.deterministic) as world, profiled(trainer.profiler, run, attempt, world) as stepped:
        objective, reduction = build_objective(trainer.algorithm), build_reduction(trainer, max_seq_len(config))
        link = Link(run, attempt, world, stop)
        link.say("loading model")
        engine = build_policy(trainer, temperature(config), world)
        critic = build_critic(trainer, world)
        checkpoints = Checkpoints(run, attempt, world, keep=trainer.max_ckpts_to_keep, seed=trainer.seed)
        publisher = Publisher(run, attempt, world, dtype, trainer.fully_async.max_staleness_steps)
        step, carried = checkpoints.resume(engine, critic, trainer.resume_mode, trainer.resume_path)
        penalty = KlPenalty(trainer.algorithm, carried)
        publisher.resume(engine, step)
        dumps = Dumps(run, attempt, world)
        dumps.resume(step)
        total, epoch = link.start(step)
        engine.schedule(total * updates_per_batch(trainer))
        if critic is not None:
            critic.schedule(total * critic_updates_per_batch(trainer))
        saved, clock, batch = step, Clock(), None
        while True:
            link.say("waiting for batch", step=step, total=total)
            with clock("wait_for_generation_buffer"):
                upcoming = link.next(step + 1)
            if upcoming is None:
                break
            batch, step = upcoming, step + 1
            link.say(f"step {step}/{total}", step=step, total=total, **clock.pace())
            metrics = train_batch(
                engine, critic, run, batch, trainer, objective, reduction, penalty, dumps, world, clock
            )
            if reset_is_due(step, epoch, trainer):
                engine.reset_reference(fresh_optimizer=resets_optimizer(trainer))
            with clock("sync_weights"):
                publisher.publish(engine, step)
                link.published(step)
            link.measured(
                step, metrics | describe_cost(batch, clock.lap(), world)
            )  # before the commit: none may be missing
            if is_due(trainer.ckpt_interval, step, total):
                with clock("save_checkpoints"):
                    checkpoints.save(engine, critic, batch, penalty.carried())
                    link.committed(saved := step)
            if is_due(trainer.hf_save_interval, step, total):
                with clock("save_hf_model"):
                    publisher.export(engine, step, trainer.policy.model.path, config.generator.chat_template)
            if times := describe_times(clock.between()):
                link.measured(step, times)
            stepped()
        if batch is not None and trainer.ckpt_interval > 0 and saved < step:
            link.say("saving", step=step, total=total)
            checkpoints.save(engine, critic, batch, penalty.carried())
            link.committed(step)
        link.close("finished" if step >= total else "stopped")


def train_batch(
    engine: PolicyEngine,
    critic: CriticEngine | None,
    run: Run,
    batch: Batch,
    trainer: TrainerConfig,
    objective: Objective,
    reduction: Reduction,
    penalty: KlPenalty,
    dumps: Dumps,
    world: World,
    clock: Clock,
) -> dict[str, float]:
    algorithm, epochs = trainer.algorithm, trainer.update_epochs_per_batch
    forward = Limit(trainer.micro_forward_batch_size_per_gpu, trainer.max_tokens_per_micro_batch)
    backward = Limit(trainer.micro_train_batch_size_per_gpu, trainer.max_tokens_per_micro_batch)
    with clock("load_samples"):
        minis = load_mini_batches(run, batch, algorithm, trainer.policy_mini_batch_size, backward, world, reduction)
    with clock("fwd_logprobs_values_reward"):
        for number, mini in enumerate(minis):
            # what the first update trains, and only once, still meets the old policy itself
            old = number > 0 or epochs > 1 or algorithm.use_kl_in_reward
            old &= not algorithm.use_rollout_logprobs_for_loss
            score(engine, mini, forward, old=old, reference=uses_reference(trainer))
            if critic is not None:
                appraise(critic, mini, forward)
    with clock("compute_advantages_and_returns"):
        rows = [row for mini in minis for row in mini.rows]
        charged = penalty.charge(rows, world.sum)
        advantages = estimate_advantages(batch, rows, algorithm, world.sum)
    if trainer.dump_data_batch:
        with clock("dump_data_batch"):
            dumps.write(batch, minis)
    updates: list[Trained] = []
    of_critic: dict[str, float] = {}
    if critic is not None:
        with clock("critic_train"):
            of_critic = train_critic(critic, minis, batch, trainer, backward, world)
    with clock("policy_train"):
        for mini in minis * epochs:
            updates.append(train(engine, mini, backward, objective, world))
    described = describe_batch(batch, advantages) | describe_mini_batches(minis, backward)
    return described | charged | of_critic | describe_updates(updates)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    main(sys.argv[1])
