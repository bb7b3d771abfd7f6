"""Trains steps of a run again; torchrun starts one process per rank with the replay's directory (hpcrl/launch/local/replay.py).

consumes   config.toml and replay.json of that directory; batches/, samples/ and a checkpoint of the run, into which it writes nothing
waits for  nothing
produces   results.json, and dumps/ with trainer.dump_data_batch
ends       with 0 after the last step
"""

# ruff: noqa: E402
from __future__ import annotations

from hpcrl.runtime.signals import StopSignal, die_with_parent, end_process

if __name__ == "__main__":
    die_with_parent()
STOP = StopSignal()

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.config import Config
from hpcrl.data.rollouts import require_samples
from hpcrl.data.weight_files import bytes_of, digest_of, whole_digest
from hpcrl.launch.local.replay import WEIGHTS, differences
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.trainer.build import load_learner
from hpcrl.trainer.controller_link import PROCESS
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.metrics import PhaseTimer
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.saving.shards import ShardPlan
from hpcrl.trainer.step import Learner
from hpcrl.trainer.stop import StopConsensus


@record
def main(path: str) -> None:
    place, results = Run.open(path), list[dict[str, Any]]()
    plan, config = read_json(place.path / "replay.json"), Config.from_toml([place.config])
    assert plan is not None, place.path
    run, dtype = Run.open(plan["run"]), DTYPES[config.generator.inference_engine.model_dtype]
    with joined(config.trainer.deterministic) as world:
        consensus = StopConsensus(world, STOP, Heartbeat(place, 0, f"rank-{world.rank}"))
        process_status = StatusWriter(place, PROCESS, 0) if world.first else None
        for time in range(1, plan["times"] + 1):
            if process_status:
                process_status.write(f"{time} of {plan['times']}: loading model")
            learner = load(place, run, plan, config, world, consensus)
            timer = PhaseTimer()
            for step in range(plan["first"], plan["step"] + 1):
                if process_status:
                    process_status.write(f"{time} of {plan['times']}: step {step}/{plan['step']}")
                batch = require_samples(run, step)
                metrics = learner.train(batch, timer)
                learner.reset_reference(step, plan["steps_per_epoch"], timer)
                metrics |= learner.cost(batch, timer.lap())
                results.append(
                    {"time": time, "step": step, "metrics": metrics} | weights_after(step, plan, learner, dtype)
                )
                if world.first:
                    write_json(place.path / "results.json", results)
                if world.any_rank(world.first and bool(differences(plan, results[-1]))):
                    return


def weights_after(step: int, plan: dict[str, Any], learner: Learner, dtype: torch.dtype) -> dict[str, str]:
    """Return the digest of the policy after a step of which the run has kept the weights, as engines got them; all ranks call it."""
    if str(step) not in plan["versions"]:
        return {}
    policy, world = learner.policy, learner.world
    owners = ShardPlan.of(policy.export_pieces(dtype), world.size).owners
    own = {
        name: digest_of(bytes_of(tensor))
        for piece in policy.export_weights(dtype, owners)
        for name, tensor in piece.items()
    }
    parts = world.all_gather(lambda: own)
    return {WEIGHTS: whole_digest({name: digest for part in parts for name, digest in part.items()})}


def load(place: Run, run: Run, plan: dict[str, Any], config: Config, world: World, consensus: StopConsensus) -> Learner:
    """Return what trains the steps of the plan, as it was after the checkpoint."""
    checkpoints = Checkpoints(run, 0, world, keep=Retention(), seed=config.trainer.seed)
    checkpoint = Path(plan["checkpoint"]) if plan["checkpoint"] else None
    resume = partial(checkpoints.load, checkpoint=checkpoint)
    learner = load_learner(run, config, ModelRanks(world, world), consensus, resume, Dumps(place, 0, world))
    learner.schedule(plan["total_steps"])
    return learner


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main(sys.argv[1])
    end_process()
