"""What a diffusion policy trains is what its engine made: losses, probabilities, adapters, averages and checkpoints, on a tiny Stable Diffusion 3."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpcrl.algorithms.diffusion.averages import average_decay
from hpcrl.algorithms.diffusion.nft import implicit_losses, noised
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.families.diffusion.engine import DiffusionEngine
from hpcrl.families.diffusion.pipelines.samples import CLEAN, GIVEN, NOISE_SEED, SIGMAS, STEPS, conditions_in
from hpcrl.families.diffusion.policy import AVERAGE, OLD, DiffusionPolicy
from hpcrl.observe.report.samples import samples_of
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.publish import Publisher
from tests.trainer.backends.diffusion.material import (
    GRPO,
    Painted,
    launched,
    minis,
    paint,
    painted_alone,
    tiny,
    train_steps,
)
from tests.trainer.material import make_run

diffusers: Any = pytest.importorskip("diffusers")

FOLLOWED = (
    "trainer.policy.diffusers.weight_copy_decay_type=1",
    "trainer.policy.diffusers.ema.enable=true",
    "trainer.policy.diffusers.ema.decay=0.9",
)


@pytest.fixture(scope="module")
def engine() -> DiffusionEngine:
    return launched(tiny())


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory, engine: DiffusionEngine) -> Painted:
    return paint(tmp_path_factory.mktemp("nft") / "run", tiny(), engine)


def test_the_first_losses_are_those_of_the_pipeline_itself(painted: Painted, alone: World) -> None:
    (sums,) = train_steps(DiffusionPolicy(painted.config.trainer, alone), painted, alone, [1])
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(
        f"{painted.config.trainer.policy.model.path}/transformer"
    )
    expected = 0.0
    (mini,) = minis(painted, alone)
    for tensors in mini.rows.tensors:
        clean, t = tensors[CLEAN], tensors[SIGMAS][tensors[STEPS].long()]
        generator = torch.Generator().manual_seed(int(tensors[NOISE_SEED]))
        clean = clean.expand(len(t), *clean.shape)
        x = noised(clean, torch.randn(clean.shape, generator=generator), t)
        given = {name: value.expand(len(t), *value.shape) for name, value in conditions_in(tensors, GIVEN).items()}
        with torch.no_grad():
            velocity = transformer(x, given["prompt_embeds"], given["pooled_embeds"], 1000 * t).sample
        positive, negative = implicit_losses(velocity, velocity, clean, x, t, 1.0)
        torch.testing.assert_close(positive, negative)
        expected += positive.sum().item()
    assert sums["loss_metrics/positive"] == pytest.approx(expected, rel=1e-4)
    assert sums["loss_metrics/negative"] == pytest.approx(expected, rel=1e-4)
    assert sums["policy_kl"] == pytest.approx(0.0, abs=1e-9)  # adapters begin at 0
    assert sums["tokens"] == 2 * 3 * 2  # groups, samples, half of four steps


@pytest.mark.parametrize("solver", ["flow", "dance"])
def test_steps_have_the_log_probabilities_that_the_engine_told(solver: str, tmp_path: Path, alone: World) -> None:
    config = tiny(*GRPO, f"trainer.policy.diffusers.sample.solver={solver}")
    painted = paint(tmp_path / "run", config, launched(config), size=2)
    policy = DiffusionPolicy(config.trainer, alone)
    (mini,) = minis(painted, alone)
    told, mask = mini.rows.rollout_logprobs, mini.rows.loss_mask > 0
    assert told[mask].std() > 0.01
    for reference in (False, True):  # adapters begin at 0
        found = mini.scored(partial(policy.logprobs, reference=reference))
        torch.testing.assert_close(found[mask], told[mask], rtol=1e-3, atol=1e-3)
    before = mini.scored(policy.logprobs)
    mini.rows.scores.ref_logprobs = before
    sums = train_steps(policy, painted_alone(painted), alone, [1])[0]
    assert sums["current_abs_diff"] / sums["current_tokens"] < 1e-3
    assert (mini.scored(policy.logprobs) - before)[mask].abs().max() > 0


def test_what_is_resumed_goes_on_as_if_it_had_never_stopped(painted: Painted, tmp_path: Path, alone: World) -> None:
    config = tiny(*FOLLOWED)
    painted = replace(painted, config=config)
    whole = DiffusionPolicy(config.trainer, alone)
    train_steps(whole, painted, alone, [1, 2])
    (tmp_path / "saved").mkdir()
    whole.save(tmp_path / "saved", torch.distributed.group.WORLD)  # pyright: ignore[reportArgumentType]
    assert {OLD, AVERAGE} <= {path.name for path in (tmp_path / "saved").iterdir()}
    train_steps(whole, painted, alone, [3])
    resumed = DiffusionPolicy(config.trainer, alone)
    resumed.restore(tmp_path / "saved")
    train_steps(resumed, painted, alone, [3])
    for name, value in state(whole).items():
        torch.testing.assert_close(state(resumed)[name], value, rtol=0, atol=0)
    trained, kept = state(whole), {name for name in state(whole) if name.startswith(f"{OLD}.")}
    assert any(not torch.equal(trained[name], trained[name.removeprefix(f"{OLD}.")]) for name in kept)


def state(policy: DiffusionPolicy) -> dict[str, torch.Tensor]:
    """Return what is trained, and the copies that follow it."""
    found = dict(policy._trained())
    for folder, copy in policy._copies().items():
        found |= {f"{folder}.{name}": value for name, value in copy.items()}
    return {name: value.clone() for name, value in found.items()}


def test_copies_follow_by_their_decays(painted: Painted, alone: World) -> None:
    painted = replace(painted, config=tiny(*FOLLOWED))
    policy = DiffusionPolicy(painted.config.trainer, alone)
    before = state(policy)
    train_steps(policy, painted, alone, [1])
    after = state(policy)
    name = next(name for name in policy._trained() if "lora_B" in name)
    decay = average_decay(0, 0.9)
    torch.testing.assert_close(after[f"{OLD}.{name}"], torch.lerp(before[name], after[name], 1 - 0.001))
    torch.testing.assert_close(after[f"{AVERAGE}.{name}"], torch.lerp(before[name], after[name], 1 - decay))


def test_the_engine_samples_with_the_old_adapter_and_evaluates_with_the_average(
    painted: Painted, tmp_path: Path, alone: World
) -> None:
    config = tiny(*FOLLOWED, "trainer.policy.optimizer_config.lr=0.05")
    painted = replace(painted, config=config)
    policy, run = DiffusionPolicy(config.trainer, alone), make_run(tmp_path / "run")
    train_steps(policy, painted, alone, [1])
    publisher = Publisher(run, 0, alone, torch.float32, 2, longest=64, adapters=True)
    publisher.publish(policy, 1)
    engine, weights = launched(config), PublishedWeights.read(run.weights_of(1))

    async def play() -> tuple[float | None, list[torch.Tensor]]:
        await engine.update_weights(weights)
        found = await engine.probe(weights, "float32", None)
        images = [
            torch.from_numpy(said.tensors["image"])
            for kind in ("train", "eval", "train")
            for said in await engine.generate([], 1, 7, {"prompt": "photo of a city", "kind": kind})
        ]
        return found, images

    difference, (sampled, evaluated, again) = asyncio.run(play())
    assert difference is not None
    assert difference < 1e-4
    assert engine.version == 1
    assert torch.equal(sampled, again)
    assert not torch.equal(sampled, evaluated)


def test_whole_weights_reach_the_engine_and_blocks_may_be_computed_again(tmp_path: Path, alone: World) -> None:
    no_reference = ("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.kl_loss_coef=0.001")
    without = (*GRPO, *no_reference, "trainer.policy.model.lora.rank=0")
    config = tiny(*without, "trainer.policy.optimizer_config.lr=1e-4")
    painted = paint(tmp_path / "run", config, launched(config), size=2)
    policy = DiffusionPolicy(config.trainer, alone)
    (sums,) = train_steps(policy, painted, alone, [1])
    again = tiny(*without, "trainer.gradient_checkpointing=true")
    (same,) = train_steps(DiffusionPolicy(again.trainer, alone), replace(painted, config=again), alone, [1])
    assert same["final_loss"] == pytest.approx(sums["final_loss"], rel=1e-5)
    Publisher(painted.run, 0, alone, torch.float32, 2, longest=64).publish(policy, 1)
    engine, weights = launched(config), PublishedWeights.read(painted.run.weights_of(1))

    async def play() -> float | None:
        await engine.update_weights(weights)
        return await engine.probe(weights, "float32", None)

    difference = asyncio.run(play())
    assert difference is not None
    assert difference < 1e-4


def test_an_export_is_a_transformer_that_diffusers_loads(painted: Painted, tmp_path: Path, alone: World) -> None:
    policy = DiffusionPolicy(painted.config.trainer, alone)
    train_steps(policy, painted, alone, [1])
    run = make_run(tmp_path / "run")
    path = Publisher(run, 0, alone, torch.float32, 2).export(policy, 1, None, painted.config.generator.chat_template)
    loaded = diffusers.SD3Transformer2DModel.from_pretrained(path)
    with torch.no_grad():
        latents, embeds, pooled = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 32), torch.randn(1, 32)
        theirs = loaded(latents, embeds, pooled, torch.tensor([500.0])).sample
        ours = policy._model(latents, torch.tensor([0.5]), {"prompt_embeds": embeds, "pooled_embeds": pooled})
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_pictures_are_kept_and_shown(painted: Painted) -> None:
    with Image.open(painted.run.picture("g1-0.0")) as image:
        assert (image.format, image.size) == ("PNG", (32, 32))
        kept = np.asarray(image)
    (step,) = samples_of(painted.run, None)["trained"]
    shown = {sample["name"]: sample for group in step["groups"] for sample in group["samples"]}["g1-0.0"]
    ((what, url),) = shown["pictures"]
    assert (what, url[:22]) == ("what was painted", "data:image/png;base64,")
    redness = kept[..., 0].mean() - (kept[..., 1].mean() + kept[..., 2].mean()) / 2
    assert shown["facts"]["redness"] == pytest.approx(redness / 255, rel=1e-3)


def test_encoding_in_one_thread_leaves_the_tokenizer_of_another_alone(engine: DiffusionEngine) -> None:
    sampler = engine._sampler
    sampler._encoded("photo of a city")
    padding = sampler._pipeline.tokenizer.backend_tokenizer.padding
    assert padding is not None
    assert len(engine.prompt_tokens("a city")) == 7  # a token for each letter, the start and the end
    assert sampler._pipeline.tokenizer.backend_tokenizer.padding == padding
