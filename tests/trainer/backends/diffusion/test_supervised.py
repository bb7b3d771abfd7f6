"""Pictures of a dataset are learned by flow matching: the loss is that of diffusers' own formulas, and a resumed run draws the same noise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpcrl.config import Config
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.sources import training_sources
from hpcrl.data.token_file import open_tokens
from hpcrl.data.tokenize import Recipe, Rows, Tokenizer
from hpcrl.families.diffusion.model import transformer_source
from hpcrl.families.diffusion.pipelines.samples import CLEAN, NOISE_SEED
from hpcrl.families.diffusion.policy import DiffusionPolicy, RowEncoder
from hpcrl.rundir.layout import Run
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.build import objective_of, reduction_of
from hpcrl.trainer.offline.validation import Validation
from hpcrl.trainer.packing import MiniBatch
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.types import Batch
from tests.paths import CONFIGS
from tests.trainer.material import make_run, train

pytest.importorskip("diffusers")

from tests.data.pipelines.material import write_wan

ROWS = 6
SETTINGS = "trainer.policy.diffusers."


def config(*overrides: str) -> Config:
    sizes = [f"trainer.{name}={ROWS}" for name in ("train_batch_size", "policy_mini_batch_size")]
    return Config.from_toml([CONFIGS / "diffusion_sft_tiny.toml"], [*sizes, *overrides])


@dataclass
class Learned:
    """A run whose dataset is prepared, and the batch of its first rows."""

    run: Run
    batch: Batch

    def mini(self, chosen: Config, world: World) -> MiniBatch:
        trainer = chosen.trainer
        limits = micro_batch_limits(trainer, None)
        (mini,) = load_mini_batches(self.run, self.batch, trainer, limits, world, reduction_of(trainer, 33))
        return mini

    def loss(self, chosen: Config, policy: DiffusionPolicy) -> float:
        """Return the loss of these rows as a validation set."""
        validation = Validation.of(self.run, chosen, micro_batch_limits(chosen.trainer, None))
        file = open_tokens(self.run.dataset("train-0"))
        sums = validation.sums(policy, [(file, row) for row in range(ROWS)], lambda: None)
        assert sums["tokens"] == ROWS  # one noise level of each
        return validation.measure.means(sums)["loss"]


def prepared(run: Run, chosen: Config, count: int = ROWS) -> Learned:
    """Return the run with its dataset, and a batch of the first rows."""
    (source,) = training_sources(chosen.data)
    file = Tokenizer(run, 0, Recipe.of(chosen)).dataset("train-0", "pictures", source)
    rows = DatasetRows(run, [Rows(file, range(count))], [], 1)
    stream = PromptStream(count, count, 1, None)
    return Learned(run, Batch(1, [rows.in_order(stream)(index, 0) for index in range(count)], count))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    return prepared(make_run(tmp_path_factory.mktemp("sft") / "run"), config())


@pytest.mark.parametrize("scheme", ["logit_normal", "sigma_sqrt"])
def test_the_loss_is_that_of_diffusers_own_formulas(scheme: str, learned: Learned, alone: World) -> None:
    chosen = config(f"{SETTINGS}weighting_scheme={scheme}", f"{SETTINGS}logit_mean=0.3", f"{SETTINGS}logit_std=0.8")
    trainer = chosen.trainer
    sums = train(DiffusionPolicy(trainer, alone), mini := learned.mini(chosen, alone), objective_of(trainer)).sums
    source = transformer_source(trainer).pipeline
    pipeline = source.load(torch.float32)
    density, weighting = _formulas()
    rows = RowEncoder(source, torch.device("cpu"), trainer.seed).encoded(mini.rows.tensors, 0)
    expected = 0.0
    for tensors, row in zip(mini.rows.tensors, rows, strict=True):
        name = tensors["prompt"].numpy().tobytes().decode()
        picture = Image.open(CONFIGS / "diffusion_tiny/data/pictures" / f"{name.replace(' ', '_')}.png")
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 127.5 - 1
        with torch.no_grad():
            clean = pipeline.vae.encode(pixels).latent_dist.mode()
            clean = (clean - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
            torch.testing.assert_close(row[CLEAN], clean[0], rtol=1e-3, atol=1e-3)
            embeds, _, pooled, _ = pipeline.encode_prompt(
                name, None, None, do_classifier_free_guidance=False, max_sequence_length=32
            )
            generator = torch.Generator().manual_seed(int(row[NOISE_SEED]))
            u = density(scheme, 1, logit_mean=0.3, logit_std=0.8, mode_scale=1.29, generator=generator)
            sigma = pipeline.scheduler.sigmas[(u * 1000).long()]
            noise = torch.randn(clean.shape[1:], generator=generator)[None]
            x = (1 - sigma) * clean + sigma * noise
            found = pipeline.transformer(x, embeds, pooled, sigma * 1000).sample
        weight = weighting(scheme, sigma)
        expected += (weight * (found - (noise - clean)).square()).mean().item() / ROWS
    assert sums["final_loss"] == pytest.approx(expected, rel=1e-3)


def _formulas() -> tuple[Any, Any]:
    from diffusers import training_utils

    return training_utils.compute_density_for_timestep_sampling, training_utils.compute_loss_weighting_for_sd3


def test_a_resumed_run_learns_the_same(learned: Learned, tmp_path: Path, alone: World) -> None:
    chosen = config("trainer.policy.model.lora.rank=4", f"{SETTINGS}ema.enable=true", f"{SETTINGS}ema.decay=0.5")
    whole = DiffusionPolicy(chosen.trainer, alone)
    before = learned.loss(chosen, whole)
    assert learned.loss(chosen, whole) == before  # the noise of an evaluation is always the same
    losses = [_step(learned, chosen, whole, alone, step) for step in (1, 2)]
    assert losses[0] != losses[1]
    (tmp_path / "saved").mkdir()
    whole.save(tmp_path / "saved", torch.distributed.group.WORLD)  # pyright: ignore[reportArgumentType]
    resumed = DiffusionPolicy(chosen.trainer, alone)
    resumed.restore(tmp_path / "saved")
    assert _step(learned, chosen, resumed, alone, 3) == _step(learned, chosen, whole, alone, 3)
    assert learned.loss(chosen, resumed) == learned.loss(chosen, whole) != before


def _step(learned: Learned, chosen: Config, policy: DiffusionPolicy, world: World, step: int) -> float:
    sums = train(policy, learned.mini(chosen, world), objective_of(chosen.trainer)).sums
    policy.end_batch(step)
    return sums["final_loss"]


def test_frames_of_a_video_are_learned(tmp_path: Path, alone: World) -> None:
    frames = [Image.new("RGB", (32, 32), (40 * at, 0, 0)) for at in range(5)]
    frames[0].save(tmp_path / "video.png", save_all=True, append_images=frames[1:])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "it brightens", "images": "video.png"}) + "\n")
    video = f"{SETTINGS}is_video=true", f"{SETTINGS}train_frames=5"
    paths = f"data.train_data=['{tmp_path / 'rows.jsonl'}']", f"trainer.policy.model.path={write_wan(tmp_path / 'wan')}"
    chosen = config(*video, *paths)
    policy, one = DiffusionPolicy(chosen.trainer, alone), prepared(make_run(tmp_path / "run"), chosen, 1)
    losses = [_step(one, chosen, policy, alone, step) for step in range(1, 4)]
    assert all(0 < loss < 10 for loss in losses)
    encoder = RowEncoder(transformer_source(chosen.trainer).pipeline, torch.device("cpu"), 0)
    (row,) = encoder.encoded(one.mini(chosen, alone).rows.tensors, 0)
    assert row[CLEAN].shape == (4, 2, 4, 4)
