"""What the tests of the critic run under torchrun (tests/trainer/ranks.py). Rank 0 writes what it saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.run.checkpoints import Retention
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.checkpoint import Checkpoints
from hpcrl.trainer.critic import (
    appraise,
    build_critic_objective,
    critic_mini_batches,
    critic_updates_per_batch,
    describe_critic,
)
from hpcrl.trainer.fsdp import FsdpCritic, FsdpPolicy
from hpcrl.trainer.plan import Limit
from hpcrl.trainer.update import MiniBatch, load_mini_batches, train
from hpcrl.trainer.world import World
from hpcrl.types import Batch
from tests.trainer.scenarios import laid_over, parameters, whole

DEFAULTS: dict[str, Any] = {
    "algorithm": {"advantage_estimator": "gae", "lambd": 0.8, "gamma": 0.9, "use_kl_loss": False, "value_clip": 0.01},
    "policy": {"fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}},
    "critic": {
        "optimizer_config": {"lr": 5e-3, "scheduler": "linear"},
        "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
    },
    "train_batch_size": 4,
    "policy_mini_batch_size": 2,
    "critic_mini_batch_size": 2,
    "gradient_checkpointing": False,
    "seed": 5,
}


class WatchedCritic(FsdpCritic):
    """Keeps whole copies of the gradients of each step, which the verbs do not show."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        super().__init__(trainer, world)
        self.seen: list[dict[str, torch.Tensor]] = []

    def step(self):
        named = self._model.model.named_parameters()
        self.seen.append({name: whole(parameter.grad) for name, parameter in named if parameter.grad is not None})
        return super().step()


def section(model: str, options: dict[str, Any]) -> TrainerConfig:
    paths = {name: {"model": {"path": model}} for name in ("policy", "critic")}
    return build(TrainerConfig, laid_over(laid_over(DEFAULTS, paths), options.get("trainer", {})))


def make_critic(world: World, trainer: TrainerConfig) -> WatchedCritic:
    critic = WatchedCritic(trainer, world)
    critic.schedule(4 * critic_updates_per_batch(trainer))
    return critic


def appraised(
    critic: FsdpCritic, run: Run, batch: Batch, trainer: TrainerConfig, limit: Limit, world: World
) -> list[MiniBatch]:
    """Return the policy's mini-batches of a batch with values, advantages and returns."""
    size = trainer.policy_mini_batch_size
    minis = load_mini_batches(run, batch, trainer.algorithm, size, limit, world, Reduction())
    for mini in minis:
        appraise(critic, mini, limit)
    estimate_advantages(batch, [row for mini in minis for row in mini.rows], trainer.algorithm, world.sum)
    return minis


def train_critic(
    critic: FsdpCritic, minis: list[MiniBatch], batch: Batch, trainer: TrainerConfig, limit: Limit, world: World
) -> dict[str, float]:
    """Make the critic's optimizer steps of a batch and return critic/*."""
    own = critic_mini_batches(minis, batch, trainer, limit, world) * trainer.update_epochs_per_batch
    objective = build_critic_objective(trainer.algorithm.value_clip)
    return describe_critic([train(critic, mini, limit, objective) for mini in own])


def one_batch(world: World, options: dict[str, Any]) -> None:
    """Train one batch in several ways; each rank tells of its samples, rank 0 of the rest."""
    run = Run.open(options["run"])
    batch = Batch.from_json(read_json(run.batch(1)))
    for name, variant in options["variants"].items():
        trainer = section(options["model"], variant)
        limit = Limit(variant["micro"], variant.get("tokens"))
        critic = make_critic(world, trainer)
        tensors = {f"initial.{key}": value for key, value in parameters(critic).items()}
        minis = appraised(critic, run, batch, trainer, limit, world)
        rows = {f"{row.pick.group}-{row.pick.index}": row for mini in minis for row in mini.rows}
        weights = [row.weight for row in rows.values()]
        told = {"metrics": train_critic(critic, minis, batch, trainer, limit, world), "updates": critic.updates}
        told["kept"] = weights == [row.weight for row in rows.values()]
        for number, gradients in enumerate(critic.seen):
            tensors |= {f"gradient.{number}.{key}": value for key, value in gradients.items()}
        tensors |= {f"parameter.{key}": value for key, value in parameters(critic).items()}
        for kind in ("values", "returns", "advantages"):
            samples = {f"{kind}.{key}": getattr(row, kind) for key, row in rows.items()}
            save_file(samples, f"{options['out']}/{name}.{kind}.{world.rank}.safetensors")
        if world.first:
            save_file(tensors, f"{options['out']}/{name}.safetensors")
            Path(f"{options['out']}/{name}.json").write_text(json.dumps(told))


def lifetime(world: World, options: dict[str, Any]) -> None:
    """Resume policy and critic, train the critic up to a step, save where asked."""
    run, trainer = Run.open(options["run"]), section(options["model"], options)
    policy, critic = FsdpPolicy(trainer, 1.0, world), make_critic(world, trainer)
    checkpoints = Checkpoints(run, options["attempt"], world, keep=Retention(), seed=3)
    step = checkpoints.resume(policy, critic if options.get("critic", True) else None, "latest", None).step
    told = []
    for at in range(step + 1, options["until"] + 1):
        batch, limit = Batch.from_json(read_json(run.batch(at))), Limit(2)
        minis = appraised(critic, run, batch, trainer, limit, world)
        told.append(train_critic(critic, minis, batch, trainer, limit, world))
        if at in options["saves"]:
            checkpoints.save(policy, critic, batch, {})
    if world.first:
        Path(options["out"]).write_text(json.dumps({"started": step, "metrics": told, "updates": critic.updates}))
