"""The trainer: one process per rank, started by torchrun where there are several, with the run directory as only argument.

consumes   config.toml, batches/, samples/ or dataset/, checkpoints/
waits for  the controller's next batch; where engines have the same devices, these are theirs meanwhile
produces   weights/v<step> after every step that engines get, checkpoints/, exports/, metrics/trainer.jsonl, timeline/
ends       with 0 when the steps are done or it was asked to stop, and then all that it trained is committed, up to the last optimizer step
"""

# ruff: noqa: E402
from __future__ import annotations

from hpcrl.faults import fault
from hpcrl.runtime.signals import StopSignal, die_with_parent, end_process

if __name__ == "__main__":
    die_with_parent()
STOP = StopSignal()  # first: importing torch from a shared filesystem may take a minute
fault("import")

import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.config import Config
from hpcrl.observe.timeline import Timeline, process_start
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.trainer.backends.colocation import DeviceLease
from hpcrl.trainer.backends.schedule import is_due
from hpcrl.trainer.build import build_publisher, load_learner
from hpcrl.trainer.controller_link import PROCESS, ControllerLink
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.metrics import PhaseTimer, describe_times
from hpcrl.trainer.profiling.steps import recorded
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.saving.export import exported_with
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.trainer.step import Learner
from hpcrl.trainer.stop import StopConsensus, Stopping
from hpcrl.types import Batch


@record
def main(run_dir: str) -> None:
    run, attempt = Run.open(run_dir), int(os.environ["HPCRL_ATTEMPT"])
    STOP.follow(run, attempt, PROCESS, speaks=os.environ["RANK"] == "0")
    heartbeat, config = Heartbeat(run, attempt, f"rank-{os.environ['RANK']}"), attempt_config(run, attempt)
    trainer = config.trainer
    with (
        closing(Timeline(run, f"rank-{os.environ['RANK']}", attempt, began=process_start())) as timeline,
        joined(trainer.deterministic, config.slurm.gpus > 0, config.slurm.patience) as world,
        recorded(trainer.profiler, trainer.policy.record_memory, run, attempt, world, timeline) as record_step,
    ):
        run_trainer(run, attempt, config, world, StopConsensus(world, STOP, heartbeat), timeline, record_step)
        STOP.ignore()


def run_trainer(
    run: Run,
    attempt: int,
    config: Config,
    world: World,
    consensus: StopConsensus,
    timeline: Timeline,
    record_step: Callable[[int], None],
) -> None:
    """Load, train to the end of the run or to a stop request, and report which."""
    trainer = config.trainer
    ranks = ModelRanks.of(trainer.placement, world, own_critic=trainer.has_own_critic)
    controller = ControllerLink(run, attempt, world, consensus, critic=ranks.own.first and not ranks.policy)
    try:
        controller.report("loading model")
        checkpoints = Checkpoints.of(trainer, run, attempt, world, controller.committed)
        resume = partial(checkpoints.resume, mode=trainer.resume_mode, path=trainer.resume_path)
        learner = load_learner(run, config, ranks, consensus, resume, Dumps(run, attempt, world))
        publisher = build_publisher(run, attempt, config, ranks)
        policy = None if learner.start.updates else learner.policy
        publisher.resume(policy, learner.start.step, from_model=config.engines_begin_with_model)
        gc.freeze()  # what is loaded stays: to look through it for garbage, again and again, takes long
        timer = PhaseTimer(timeline)
        with controller.showing(timer):
            train(config, learner, checkpoints, publisher, controller, timer, record_step)
    except Stopping:
        controller.close("stopped")
    else:
        controller.close("finished")


def train(
    config: Config,
    learner: Learner,
    checkpoints: Checkpoints,
    publisher: Publisher,
    controller: ControllerLink,
    timer: PhaseTimer,
    record_step: Callable[[int], None],
) -> None:
    """Train to the end of the run; raises Stopping once all that was trained up to a stop request is committed."""
    trainer, policy, consensus, start = config.trainer, learner.policy, learner.consensus, learner.start
    step, stopping = start.step, None
    colocated, lends = trainer.placement.colocate_all, trainer.placement.lend
    devices = DeviceLease([policy, learner.critic], learner.world, colocated=colocated, lends=lends)
    devices.release(timer)
    total, epoch = controller.start(step)
    save_interval, export_interval = trainer.checkpoint_interval(epoch), trainer.hf_save_interval
    learner.schedule(total)
    export = partial(publisher.export, policy, **exported_with(config))
    if publisher.misses_export(start.checkpoint) and is_due(export_interval, step, total):
        export(step)
    try:
        if not start.updates and (losses := learner.validate(step, total, timer)):
            controller.measured(step, losses | describe_times(timer.between()))
        while (batch := controller.next(step, timer, devices)) is not None:
            controller.report(f"step {batch.step}/{total}", step=batch.step, total=total)
            metrics = devices.acquire(timer) | learner.train(batch, timer)
            step = batch.step
            weights = trainer.publishes(step, total)
            if (weights or trainer.offline) and not consensus.asked("publish"):  # else the next attempt does it
                with timer("sync_weights"):
                    metrics |= publisher.publish(policy, step) if weights else {}
                    metrics |= devices.release(timer)
                    controller.published(step, weights)
                    publisher.retire()
            learner.reset_reference(step, epoch, timer)
            metrics |= checkpoints.settle() | learner.cost(batch, timer.lap())
            controller.trained(step, metrics, learner.histograms)  # before the commit: none may be missing
            controller.measured(step, learner.validate(step, total, timer))
            consensus("save")
            written = {}
            if is_due(save_interval, step, total):
                with timer("save_checkpoints"):
                    written = checkpoints.save(policy, learner.critic, batch, learner.extra_state())
            consensus("export")
            if is_due(export_interval, step, total):
                with timer("save_hf_model"), checkpoints.settled_on_error():
                    export(step)
            controller.measured(step, written | describe_times(timer.between()))
            record_step(step)
    except Stopping as request:
        stopping = request
    if (last := learner.batch) is not None and save_interval > 0:
        controller.report("saving", step=step, total=total)
        controller.measured(step, save_last(learner, last, checkpoints, timer))
    if stopping is not None:
        if save_interval > 0:
            controller.everything_is_saved(step)
        raise stopping
    controller.finished()


def save_last(learner: Learner, batch: Batch, checkpoints: Checkpoints, timer: PhaseTimer) -> dict[str, float]:
    """Commit a checkpoint of all that is trained, up to the last optimizer step; return its metrics."""
    learner.consensus.asked("save.last")
    with timer("save_checkpoints"):
        return checkpoints.finish(learner.policy, learner.critic, batch, learner.extra_state(), learner.partial)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    main(sys.argv[1])
    end_process()
