"""Pictures by the real engine of a tiny pipeline, written and read as samples of a run, and steps that train on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.config import Config, EnvironmentConfig
from hpcrl.envs.rewards.response import Response
from hpcrl.families.diffusion.engine import DiffusionEngine, PipelineEngine
from hpcrl.families.diffusion.generate import PictureGenerator
from hpcrl.families.diffusion.policy import DiffusionPolicy
from hpcrl.families.diffusion.trainer import objective as objective_of
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.build import reduction_of
from hpcrl.trainer.packing import MiniBatch
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.types import Batch, GroupMeta, Prompt, Work
from tests.paths import CONFIGS
from tests.rows import write_group
from tests.trainer.material import make_run, train

TINY = CONFIGS / "diffusion_tiny.toml"
GRPO = (
    "trainer.policy.diffusers.algorithm=grpo",
    "trainer.policy.diffusers.sample.solver=flow",
    "trainer.policy.diffusers.sample.deterministic_sampling=false",
    "trainer.policy.diffusers.sample.guidance_scale=3.0",
    "trainer.policy.diffusers.sample.noise_level=0.7",
)
PROMPTS = ("painting of a sunset", "photo of a city")


def latent_frames(response: Response, _environment: EnvironmentConfig) -> float:
    """A reward: how many frames the latents of a video have, and how bright it is, from 0 to 1."""
    assert response.latents is not None
    assert response.image is not None
    return response.latents.shape[1] + float(response.image.mean()) / 255


def tiny(*overrides: str) -> Config:
    return Config.from_toml([TINY], ["trainer.policy.diffusers.sample.num_steps=4", *overrides])


def launched(config: Config) -> DiffusionEngine:
    """Return an engine that is ready."""
    started = PipelineEngine.of(config)
    started.wait_ready(120)
    engine = started.connect()
    assert isinstance(engine, DiffusionEngine)
    return engine


@dataclass
class Painted:
    """A run with the batch of its first step."""

    run: Run
    batch: Batch
    config: Config


def paint(path: Path, config: Config, engine: DiffusionEngine, size: int = 3) -> Painted:
    """Write two groups of pictures and their batch."""
    run, metas = make_run(path), list[GroupMeta]()

    async def generate() -> None:
        generator = PictureGenerator(engine, config.generator, config.environment, SampleImages(run, 1))
        for number, text in enumerate(PROMPTS):
            prompt = Prompt(str(number), [{"role": "user", "content": text}], "")
            group = await generator.generate(Work(f"g1-{number}", "train", prompt, size, 100 * number))
            meta = group.meta(0, f"samples/0/g1-{number}.safetensors")
            metas.append(write_group(run.path / meta.path, group.samples, meta))

    asyncio.run(generate())
    batch = Batch(1, metas, cursor=2)
    write_json(run.batch(1), batch.to_json())
    return Painted(run, batch, config)


def painted_alone(painted: Painted) -> Painted:
    """Return it without a KL term, whose reference would be scored first."""
    trainer = painted.config.trainer
    without = replace(trainer, algorithm=replace(trainer.algorithm, use_kl_loss=False))
    return replace(painted, config=replace(painted.config, trainer=without))


def minis(painted: Painted, world: World) -> list[MiniBatch]:
    """Return the batch with advantages."""
    trainer = painted.config.trainer
    found = load_mini_batches(
        painted.run, painted.batch, trainer, micro_batch_limits(trainer, None), world, reduction_of(trainer, 64)
    )
    estimate_advantages(painted.batch, [mini.rows for mini in found], trainer.algorithm, world.sum)
    return found


def train_steps(
    policy: DiffusionPolicy, painted: Painted, world: World, steps: Sequence[int]
) -> list[dict[str, float]]:
    """Train the batch as if it were that of each of these steps; return the sums of each optimizer step."""
    objective = objective_of(painted.config)
    found = list[dict[str, float]]()
    for step in steps:
        found += [train(policy, mini, objective).sums for mini in minis(painted, world)]
        policy.end_batch(step)
    return found
