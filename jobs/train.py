"""The trainer; torchrun starts one process per rank with the run directory as only argument.

Consumes: config.toml, batches/, samples/, checkpoints/. Waits for: the controller's next batch.
Produces: weights/v<step> after every step that engines get, checkpoints/, exports/, metrics/trainer.jsonl. Ends with 0 when the steps are done or
it was asked to stop, and then everything that it trained is committed, up to the last optimizer step.
"""

# ruff: noqa: E402
from __future__ import annotations

from hpcrl.run.fault import fault
from hpcrl.run.parent import die_with_parent
from hpcrl.run.signals import StopSignal

if __name__ == "__main__":
    die_with_parent()
STOP = StopSignal()  # first: importing torch from a shared filesystem may take a minute
fault("import")

import logging
import os
import sys
from collections.abc import Callable
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.config import Config, max_seq_len, temperature
from hpcrl.config.derive import checkpoint_interval, publishes
from hpcrl.run.layout import Run
from hpcrl.run.pulse import Pulse
from hpcrl.trainer.build import build_critic, build_policy
from hpcrl.trainer.checkpoint import Checkpoints, Start
from hpcrl.trainer.critic import critic_updates_per_batch
from hpcrl.trainer.describe import Clock, describe_cost, describe_times
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.learner import Learner
from hpcrl.trainer.link import PROCESS, Link
from hpcrl.trainer.objective import build_objective, build_reduction
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.profile import profiled
from hpcrl.trainer.publish import Publisher
from hpcrl.trainer.reference import reset_is_due, resets_optimizer
from hpcrl.trainer.schedule import is_due
from hpcrl.trainer.sharding import DTYPES
from hpcrl.trainer.stop import Agreement, Stopping
from hpcrl.trainer.update import updates_per_batch
from hpcrl.trainer.world import World, joined


@record
def main(run_dir: str) -> None:
    run, attempt = Run.open(run_dir), int(os.environ["HPCRL_ATTEMPT"])
    STOP.follow(run, attempt, PROCESS, speaks=os.environ["RANK"] == "0")
    pulse = Pulse(run, attempt, f"rank-{os.environ['RANK']}")
    config = Config.from_toml([run.config])
    trainer = config.trainer
    with joined(trainer.deterministic) as world, profiled(trainer.profiler, run, attempt, world) as stepped:
        work(run, attempt, config, world, Agreement(world, STOP, pulse), stepped)
        STOP.ignore()


def work(
    run: Run, attempt: int, config: Config, world: World, agreement: Agreement, stepped: Callable[[], None]
) -> None:
    """Load, train to the end of the run or to a stop request, and say which."""
    trainer, dtype = config.trainer, DTYPES[config.generator.inference_engine.model_dtype]
    link = Link(run, attempt, world, agreement)
    try:
        link.say("loading model")
        agreement("load.policy")
        policy = build_policy(trainer, temperature(config), world)
        agreement("load.critic")
        critic = build_critic(trainer, world)
        agreement("load.checkpoint")
        checkpoints = Checkpoints.of(trainer, run, attempt, world, link.committed)
        publisher = Publisher(run, attempt, world, dtype, trainer.fully_async.max_staleness_steps)
        start = checkpoints.resume(policy, critic, trainer.resume_mode, trainer.resume_path)
        publisher.resume(policy, start.step)
        dumps = Dumps(run, attempt, world)
        dumps.resume(start.step)
        penalty = KlPenalty(trainer.algorithm, start.carried)
        objective = build_objective(trainer.algorithm)
        reduction = build_reduction(trainer.algorithm, max_seq_len(config))
        learner = Learner(
            run, world, trainer, policy, critic, objective, reduction, penalty, dumps, agreement, start.inside
        )
        train(config, learner, checkpoints, publisher, link, start, stepped)
    except Stopping:
        link.close("stopped")
    else:
        link.close("finished")


def train(
    config: Config,
    learner: Learner,
    checkpoints: Checkpoints,
    publisher: Publisher,
    link: Link,
    start: Start,
    stepped: Callable[[], None],
) -> None:
    """Train to the end of the run; raises Stopping once all that was trained up to a stop request is committed."""
    trainer, policy, agreement, step = config.trainer, learner.policy, learner.agreement, start.step
    total, epoch = link.start(step)
    interval = checkpoint_interval(trainer, epoch)
    policy.schedule(total * updates_per_batch(trainer))
    if learner.critic is not None:
        learner.critic.schedule(total * critic_updates_per_batch(trainer))
    export = partial(publisher.export, policy, model=trainer.policy.model.path, template=config.generator.chat_template)
    if publisher.misses_export(start.checkpoint) and is_due(trainer.hf_save_interval, step, total):
        export(step)
    clock, stopping = Clock(), None
    try:
        while (batch := link.next(step, clock)) is not None:
            link.say(f"step {batch.step}/{total}", step=batch.step, total=total, **clock.pace())
            metrics = learner.train(batch, clock)
            step = batch.step
            if publishes(trainer, step, total) and not agreement.asked("publish"):  # else the next attempt does it
                with clock("sync_weights"):
                    publisher.publish(policy, step)
                    link.published(step)
            if reset_is_due(step, epoch, trainer):
                with clock("update_ref_with_policy"):
                    policy.reset_reference(fresh_optimizer=resets_optimizer(trainer))
            metrics |= checkpoints.settle() | describe_cost(batch, clock.lap(), learner.world)
            link.measured(step, metrics)  # before the commit: none may be missing
            agreement("save")
            if is_due(interval, step, total):
                with clock("save_checkpoints"):
                    checkpoints.save(policy, learner.critic, batch, learner.penalty.carried())
            agreement("export")
            if is_due(trainer.hf_save_interval, step, total):
                with clock("save_hf_model"):
                    export(step)
            link.measured(step, describe_times(clock.between()))
            stepped()
    except Stopping as request:
        stopping = request
    if learner.batch is not None and interval > 0:
        link.say("saving", step=step, total=total)
        agreement.asked("save.last")
        carried = learner.penalty.carried()
        times = checkpoints.finish(policy, learner.critic, learner.batch, carried, learner.unfinished)
        link.measured(step, times)
    if stopping is not None:
        if interval > 0:
            link.everything_is_saved(step)
        raise stopping


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    main(sys.argv[1])
