"""What tests/trainer/backends/megatron/test_state.py runs in its ranks: state_scenarios.py JSON, as scenarios.py beside this folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.errors import ConfigError
from hpcrl.trainer.backends.megatron.engine import MegatronPolicy
from hpcrl.trainer.distributed import World
from tests.trainer.scenarios import main


def engine(world: World, options: dict[str, Any], *, reshardable: bool) -> MegatronPolicy:
    """Return a policy in fp32 that saves its optimizer in one format or the other, whether there is TransformerEngine or not."""
    megatron = {"dtype": "fp32", **options["sizes"]}
    policy = {"model": {"path": options["model"]}, "megatron_config": megatron}
    section = {"strategy": "megatron", "policy": policy, "algorithm": {"use_kl_loss": False}, "eval_interval": 0}
    section["placement"] = {"policy_num_gpus_per_node": world.size}
    trainer = Config.from_dict({"data": {"train_data": ["t"]}, "trainer": section}).trainer
    found = MegatronPolicy(trainer, 1.0, world)
    found._saved._metadata["distrib_optim_sharding_type"] = "fully_reshardable" if reshardable else "dp_reshardable"
    return found


def save(world: World, options: dict[str, Any]) -> None:
    policy = engine(world, options, reshardable=False)
    policy.updates = 3
    world.rank0_broadcast(lambda: os.mkdir(options["directory"]))
    policy.save(Path(options["directory"]))


def blocked(world: World, options: dict[str, Any]) -> None:
    """Save where the first rank cannot write what only it writes; tell what each rank says of it."""
    policy = engine(world, options, reshardable=True)
    world.rank0_broadcast(lambda: os.makedirs(Path(options["directory"]) / "common.pt"))
    said = None
    try:
        policy.save(Path(options["directory"]))
    except OSError as error:
        said = error.errno
    told = world.all_gather(lambda: said)
    if world.first:
        Path(options["out"]).write_text(json.dumps(told))


def restore(world: World, options: dict[str, Any]) -> None:
    policy = engine(world, options, reshardable=options["reshardable"])
    try:
        policy.restore(Path(options["directory"]))
        told = f"updates {policy.updates}"
    except ConfigError as error:
        told = str(error)
    if world.first:
        Path(options["out"]).write_text(told)


if __name__ == "__main__":
    main({"save": save, "blocked": blocked, "restore": restore})
