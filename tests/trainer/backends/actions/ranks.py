"""What ranks do with a batch of episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcrl.families.pi05.policy import ActionPolicy
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.types import Batch
from tests.trainer.backends.actions.material import Played, configured, train_steps


def trained(world: World, options: dict[str, Any]) -> None:
    """Train a run's batch twice, and publish the weights as a version."""
    run, config = Run(Path(options["run"])), configured(Path(options["model"]), *options["overrides"])
    batch = Batch.from_json(read_json(run.batch(1)) or {})
    policy = ActionPolicy(config.trainer, world, config.vla.pi05)
    train_steps(policy, Played(run, batch, config), world, 2)
    Publisher(run, 0, world, torch.float32, 9, longest=16).publish(policy, options["version"])
