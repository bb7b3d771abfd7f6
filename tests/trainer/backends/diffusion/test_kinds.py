"""Other pipelines than Stable Diffusion 3 are trained too: pictures of Sana, videos of Sana, Wan and Cosmos, by DiffusionNFT and by Flow-GRPO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hpcrl.config.sections.model import Pretrained
from hpcrl.families.diffusion.model import transformer_source
from hpcrl.families.diffusion.pipelines.tokens import load_tokenizer
from hpcrl.families.diffusion.policy import DiffusionPolicy
from hpcrl.planning.memory import Weight
from hpcrl.trainer.backends.fsdp.muon import matrices_of
from hpcrl.trainer.distributed import World

pytest.importorskip("diffusers")

from tests.data.pipelines.material import write_cosmos, write_sana, write_sana_video, write_wan
from tests.trainer.backends.diffusion import material
from tests.trainer.backends.diffusion.material import GRPO, launched, minis, paint, painted_alone, tiny, train_steps

FRAMES = 5
VIDEO = "trainer.policy.diffusers.is_video=true", f"trainer.policy.diffusers.train_frames={FRAMES}"
MADE = {"sana": write_sana, "sana_video": write_sana_video, "wan": write_wan, "cosmos": write_cosmos}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("sana", "nft"), ("sana", "grpo"), ("sana_video", "nft"), ("sana_video", "grpo"), ("wan", "nft")),
        *(("cosmos", "nft"), ("cosmos", "grpo")),
    ],
)
def test_it_trains_what_its_engine_made(kind: str, way: str, tmp_path: Path, alone: World) -> None:
    folder, video = MADE[kind](tmp_path / kind), kind != "sana"
    ways = GRPO if way == "grpo" else ()
    own = [f"environment.reward_function={{'{material.__name__}:latent_frames'=1.0}}"] if kind == "wan" else []
    config = tiny(f"trainer.policy.model.path={folder}", *(VIDEO if video else ()), *ways, *own)
    painted = paint(tmp_path / "run", config, launched(config), size=2)
    policy = DiffusionPolicy(config.trainer, alone)
    assert policy.vocabulary == len(load_tokenizer(Pretrained(str(folder))))
    (mini,) = minis(painted, alone)
    before = {name: value.clone() for name, value in policy._trained().items()}
    if way == "grpo":
        mask = mini.rows.loss_mask > 0
        told = mini.rows.rollout_logprobs[mask]
        torch.testing.assert_close(mini.scored(policy.logprobs)[mask], told, rtol=1e-3, atol=1e-3)
        painted = painted_alone(painted)
    (sums,) = train_steps(policy, painted, alone, [1])
    if way == "nft":  # nothing has moved yet
        assert sums["loss_metrics/positive"] == pytest.approx(sums["loss_metrics/negative"], rel=1e-5)
    assert any(not torch.equal(before[name], value) for name, value in policy._trained().items())
    with Image.open(painted.run.picture("g1-0.1")) as kept:
        assert getattr(kept, "n_frames", 1) == (FRAMES if video else 1)
        pixels = [
            np.asarray(kept.convert("RGB"), np.float64) / 255
            for at in range(FRAMES if video else 1)
            if not kept.seek(at)
        ]
    red, green, blue = np.stack(pixels).reshape(-1, 3).mean(0)
    expected = red - (green + blue) / 2
    if kind == "wan":  # one frame of latents for the first of the video, one for the four others; and how bright it is
        expected += 2 + np.stack(pixels).mean()
    assert painted.batch.groups[0].rewards[1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["sd3", "wan"])
def test_muon_moves_the_matrices_of_its_layers(kind: str, tmp_path: Path) -> None:
    """Neither what embeds latents, times and prompts, nor what gives the velocity, nor scales and shifts."""
    given = (f"trainer.policy.model.path={write_wan(tmp_path / kind)}", *VIDEO) if kind == "wan" else ()
    model = transformer_source(tiny(*given).trainer).empty(torch.float32, "")
    moved, layers = matrices_of(model), "blocks" if kind == "wan" else "transformer_blocks"
    names = {name for name, each in model.named_parameters() if each in moved}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert names == {name for name in linear if name.startswith(f"{layers}.")}
    assert "proj_out.weight" in linear - names
    assert {name for name, each in model.named_parameters() if Weight(name, tuple(each.shape)).moved_by_muon} == names
