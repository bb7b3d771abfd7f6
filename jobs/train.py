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

from hpcrl.config import Config, max_seq_len, temperature
from hpcrl.config.derive import checkpoint_interval
from hpcrl.run.layout import Run
from hpcrl.run.parent import die_with_parent
from hpcrl.run.pulse import Pulse
from hpcrl.trainer.build import build_critic, build_policy
from hpcrl.trainer.checkpoint import Checkpoints
from hpcrl.trainer.critic import critic_updates_per_batch
from hpcrl.trainer.describe import Clock, describe_cost, describe_times
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.learner import Learner
from hpcrl.trainer.link import Link, StopSignal
from hpcrl.trainer.objective import build_objective, build_reduction
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.profile import profiled
from hpcrl.trainer.publish import Publisher
from hpcrl.trainer.reference import reset_is_due, resets_optimizer
from hpcrl.trainer.schedule import is_due
from hpcrl.trainer.sharding import DTYPES
from hpcrl.trainer.update import updates_per_batch
from hpcrl.trainer.world import joined


@record
def main(run_dir: str) -> None:
    die_with_parent()
    run, attempt = Run.open(run_dir), int(os.environ["HPCRL_ATTEMPT"])
    stop = StopSignal(run)
    pulse = Pulse(run, attempt, f"rank-{os.environ['RANK']}")
    config = Config.from_toml([run.config])
    trainer, dtype = config.trainer, DTYPES[config.generator.inference_engine.model_dtype]
    with joined(trainer.deterministic) as world, profiled(trainer.profiler, run, attempt, world) as stepped:
        link = Link(run, attempt, world, stop, pulse)
        link.say("loading model")
        engine = build_policy(trainer, temperature(config), world)
        critic = build_critic(trainer, world)
        checkpoints = Checkpoints.of(trainer, run, attempt, world, link.committed)
        publisher = Publisher(run, attempt, world, dtype, trainer.fully_async.max_staleness_steps)
        step, carried = checkpoints.resume(engine, critic, trainer.resume_mode, trainer.resume_path)
        penalty = KlPenalty(trainer.algorithm, carried)
        publisher.resume(engine, step)
        dumps = Dumps(run, attempt, world)
        dumps.resume(step)
        reduction = build_reduction(trainer.algorithm, max_seq_len(config))
        learner = Learner(
            run, world, trainer, engine, critic, build_objective(trainer.algorithm), reduction, penalty, dumps
        )
        total, epoch = link.start(step)
        interval = checkpoint_interval(trainer, epoch)
        engine.schedule(total * updates_per_batch(trainer))
        if critic is not None:
            critic.schedule(total * critic_updates_per_batch(trainer))
        clock, batch = Clock(), None
        while True:
            link.say("waiting for batch", step=step, total=total)
            with clock("wait_for_generation_buffer"):
                upcoming = link.next(step + 1)
            if upcoming is None:
                break
            batch, step = upcoming, step + 1
            link.say(f"step {step}/{total}", step=step, total=total, **clock.pace())
            metrics = learner.train(batch, clock)
            with clock("sync_weights"):
                publisher.publish(engine, step)
                link.published(step)
            if reset_is_due(step, epoch, trainer):
                with clock("update_ref_with_policy"):
                    engine.reset_reference(fresh_optimizer=resets_optimizer(trainer))
            metrics |= checkpoints.settle() | describe_cost(batch, clock.lap(), world)
            link.measured(step, metrics)  # before the commit: none may be missing
            if is_due(interval, step, total):
                with clock("save_checkpoints"):
                    checkpoints.save(engine, critic, batch, penalty.carried())
            if is_due(trainer.hf_save_interval, step, total):
                with clock("save_hf_model"):
                    publisher.export(engine, step, trainer.policy.model.path, config.generator.chat_template)
            if times := describe_times(clock.between()):
                link.measured(step, times)
            stepped()
        if batch is not None and interval > 0:
            link.say("saving", step=step, total=total)
            if times := checkpoints.finish(engine, critic, batch, penalty.carried()):
                link.measured(step, times)
        link.close("finished" if step >= total else "stopped")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    main(sys.argv[1])
