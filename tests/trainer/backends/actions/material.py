"""Episodes of a tiny PI0.5 in a simulated arm, by the real engine, written and read as samples of a run, and steps that train on them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from hpcrl.config import Config
from hpcrl.families.pi05.engine import ActionEngine, Actions
from hpcrl.families.pi05.generate import ActionGenerator, Robotics
from hpcrl.families.pi05.policy import ActionPolicy
from hpcrl.rollout.group import Group
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.build import objective_of, reduction_of
from hpcrl.trainer.packing import MiniBatch
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.types import Batch, GroupMeta, Kind, Prompt, Work
from tests.paths import CONFIGS
from tests.rows import with_columns, write_group
from tests.trainer.material import make_run, train

REACH = CONFIGS / "reach_pi05.toml"


def configured(model: Path, *overrides: str) -> Config:
    """Return the arm's configuration with another model, three turns of two actions, and a camera."""
    changed = [
        f"trainer.policy.model.path={model}",
        "generator.max_turns=3",
        "environment.skyrl_gym.robot.actions_per_turn=2",
        "environment.skyrl_gym.robot.options.camera=true",
    ]
    return Config.from_toml([REACH], [*changed, *overrides])


def launched(config: Config) -> ActionEngine:
    """Return an engine that is ready."""
    started = Actions(config)
    started.wait_ready(120)
    engine = started.connect()
    assert isinstance(engine, ActionEngine)
    return engine


def play(config: Config, engine: ActionEngine, kind: Kind = "train", groups: int = 2, size: int = 3) -> list[Group]:
    """Return groups of episodes."""
    model = config.trainer.policy.model.pretrained
    robotics = Robotics.of(model)

    async def generate() -> list[Group]:
        generator = ActionGenerator(engine, config.generator, config.environment, config.vla, robotics)
        prompts = [
            Prompt(str(number), [{"role": "user", "content": "reach"}], "robot", {"seed": number})
            for number in range(groups)
        ]
        works = [Work(f"g1-{prompt.uid}", kind, prompt, size, 100 * at) for at, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*(generator.generate(work) for work in works)))

    return asyncio.run(generate())


@dataclass
class Played:
    """A run with the batch of its first step."""

    run: Run
    batch: Batch
    config: Config


def played(path: Path, config: Config, engine: ActionEngine) -> Played:
    """Write groups of episodes and their batch, as if the first episode of each group alone had succeeded."""
    run, metas = make_run(path), list[GroupMeta]()
    for number, group in enumerate(play(config, engine)):
        meta = group.meta(0, f"samples/0/g1-{number}.safetensors")
        meta = with_columns(meta, rewards=[1.0, *([0.0] * (len(meta.rewards) - 1))])
        metas.append(write_group(run.path / meta.path, group.samples, meta))
    batch = Batch(1, metas, cursor=2)
    write_json(run.batch(1), batch.to_json())
    return Played(run, batch, config)


def minis(episodes: Played, world: World) -> list[MiniBatch]:
    """Return the batch with advantages."""
    trainer = episodes.config.trainer
    found = load_mini_batches(
        episodes.run, episodes.batch, trainer, micro_batch_limits(trainer, None), world, reduction_of(trainer, 64)
    )
    estimate_advantages(episodes.batch, [mini.rows for mini in found], trainer.algorithm, world.sum)
    return found


def train_steps(policy: ActionPolicy, episodes: Played, world: World, steps: int = 1) -> list[dict[str, float]]:
    """Train the batch so many times; return the sums of each optimizer step."""
    objective, found = objective_of(episodes.config.trainer), list[dict[str, float]]()
    for _ in range(steps):
        for mini in minis(episodes, world):
            found.append(train(policy, mini, objective).sums)
    return found
