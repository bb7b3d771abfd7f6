"""Trains steps of a run again; torchrun starts one process per rank with the replay's directory (hpcrl/launch/replay.py).

consumes   config.toml and replay.json of that directory; batches/, samples/ and a checkpoint of the run, into which it writes nothing
waits for  nothing
produces   results.json, and dumps/ with trainer.dump_data_batch
ends       with 0 after the last step
"""

# ruff: noqa: E402
from __future__ import annotations

from hpcrl.run.parent import die_with_parent
from hpcrl.run.signals import StopSignal

if __name__ == "__main__":
    die_with_parent()
STOP = StopSignal()

import logging
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.config import Config, max_seq_len, temperature
from hpcrl.data.rollouts import require_samples
from hpcrl.run.checkpoints import Retention
from hpcrl.run.commit import read_json, write_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter
from hpcrl.run.pulse import Pulse
from hpcrl.trainer.build import build_critic, build_policy
from hpcrl.trainer.checkpoint import Checkpoints
from hpcrl.trainer.critic import critic_updates_per_batch
from hpcrl.trainer.describe import Clock, describe_cost
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.learner import Learner
from hpcrl.trainer.link import PROCESS
from hpcrl.trainer.objective import build_objective, build_reduction
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.reference import reset_is_due, resets_optimizer
from hpcrl.trainer.stop import Agreement
from hpcrl.trainer.update import updates_per_batch
from hpcrl.trainer.world import World, joined


@record
def main(path: str) -> None:
    place, results = Run.open(path), list[dict[str, Any]]()
    plan, config = read_json(place.path / "replay.json"), Config.from_toml([place.config])
    assert plan is not None, place.path
    with joined(config.trainer.deterministic) as world:
        agreement = Agreement(world, STOP, Pulse(place, 0, f"rank-{world.rank}"))
        lease = LeaseWriter(place, PROCESS, 0) if world.first else None
        for time in range(1, plan["times"] + 1):
            if lease:
                lease.say(f"{time} of {plan['times']}: loading model")
            learner = load(place, plan, config, world, agreement)
            clock = Clock()
            for step in range(plan["first"], plan["step"] + 1):
                if lease:
                    lease.say(f"{time} of {plan['times']}: step {step}/{plan['step']}")
                batch = require_samples(learner.run, step)
                metrics = learner.train(batch, clock)
                if reset_is_due(step, plan["steps_per_epoch"], config.trainer):
                    learner.policy.reset_reference(fresh_optimizer=resets_optimizer(config.trainer))
                metrics |= describe_cost(batch, clock.lap(), world)
                results.append({"time": time, "step": step, "metrics": metrics})
                if world.first:
                    write_json(place.path / "results.json", results)


def load(place: Run, plan: dict[str, Any], config: Config, world: World, agreement: Agreement) -> Learner:
    """Return what trains the steps of the plan, as it was after the checkpoint."""
    trainer, run = config.trainer, Run.open(plan["run"])
    policy, critic = build_policy(trainer, temperature(config), world), build_critic(trainer, world)
    checkpoints = Checkpoints(run, 0, world, keep=Retention(), seed=trainer.seed)
    start = checkpoints.load(policy, critic, Path(plan["checkpoint"]) if plan["checkpoint"] else None)
    policy.schedule(plan["total_steps"] * updates_per_batch(trainer))
    if critic is not None:
        critic.schedule(plan["total_steps"] * critic_updates_per_batch(trainer))
    dumps = Dumps(place, 0, world)
    dumps.resume(start.step)
    penalty, objective = KlPenalty(trainer.algorithm, start.carried), build_objective(trainer.algorithm)
    reduction = build_reduction(trainer.algorithm, max_seq_len(config))
    return Learner(run, world, trainer, policy, critic, objective, reduction, penalty, dumps, agreement, None)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main(sys.argv[1])
