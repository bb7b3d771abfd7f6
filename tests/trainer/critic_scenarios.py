"""What the tests of the critic run in their ranks (tests/trainer/ranks.py). Rank 0 writes what it saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.backends.fsdp.engine import FsdpCritic, FsdpPolicy
from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.critic.loss import CRITIC_REDUCTION, build_critic_objective, describe_critic
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, regrouped
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.types import Batch
from tests.trainer.material import load, train, views
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
    critic.schedule(4 * trainer.updates_per_batch(trainer.critic_mini_batch_size))
    return critic


def appraised(
    critic: FsdpCritic, run: Run, batch: Batch, trainer: TrainerConfig, limit: MicroBatchLimit
) -> list[MiniBatch]:
    """Return the policy's mini-batches of a batch with values, advantages and returns."""
    minis = load(run, batch, trainer.algorithm, trainer.policy_mini_batch_size, limit, critic.data)
    for mini in minis:
        mini.rows.scores.values = mini.scored(critic.values)
    estimate_advantages(batch, [mini.rows for mini in minis], trainer.algorithm, critic.data.sum)
    return minis


def train_critic(
    critic: FsdpCritic,
    minis: list[MiniBatch],
    batch: Batch,
    trainer: TrainerConfig,
    limit: MicroBatchLimit,
) -> dict[str, float]:
    """Make the critic's optimizer steps of a batch and return critic/*."""
    own = regrouped(minis, batch, trainer.critic_mini_batch_size, (limit, limit), critic.data, CRITIC_REDUCTION)
    objective = build_critic_objective(trainer.algorithm.value_clip)
    return describe_critic([train(critic, mini, objective) for mini in own * trainer.update_epochs_per_batch])


def one_batch(world: World, options: dict[str, Any]) -> None:
    """Train one batch in several ways; each rank tells of its samples, rank 0 of the rest."""
    run = Run.open(options["run"])
    batch = Batch.from_json(read_json(run.batch(1)))
    for name, variant in options["variants"].items():
        trainer = section(options["model"], variant)
        limit = MicroBatchLimit(variant["micro"], variant.get("tokens"), variant.get("shared", False))
        critic = make_critic(world, trainer)
        tensors = {f"initial.{key}": value for key, value in parameters(critic).items()}
        minis = appraised(critic, run, batch, trainer, limit)
        found = {f"{one.ref.group}-{one.ref.index}": one for one in views(mini.rows for mini in minis)}
        weights = [sample.weight for sample in found.values()]
        told = {"metrics": train_critic(critic, minis, batch, trainer, limit), "updates": critic.updates}
        told["kept"] = weights == [sample.weight for sample in found.values()]
        for number, gradients in enumerate(critic.seen):
            tensors |= {f"gradient.{number}.{key}": value for key, value in gradients.items()}
        tensors |= {f"parameter.{key}": value for key, value in parameters(critic).items()}
        for kind in ("values", "returns", "advantages"):
            samples = {
                # advantages and returns by the token that they are about
                f"{kind}.{key}": sample.of(sample.packed.scores.present()[kind]).roll(0 if kind == "values" else 1)
                for key, sample in found.items()
            }
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
        batch, limit = Batch.from_json(read_json(run.batch(at))), MicroBatchLimit(2)
        minis = appraised(critic, run, batch, trainer, limit)
        told.append(train_critic(critic, minis, batch, trainer, limit))
        if at in options["saves"]:
            checkpoints.save(policy, critic, batch, {})
    if world.first:
        Path(options["out"]).write_text(json.dumps({"started": step, "metrics": told, "updates": critic.updates}))
