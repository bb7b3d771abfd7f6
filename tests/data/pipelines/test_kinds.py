"""Our sampler paints what diffusers' own pipelines paint, with guidance; pipelines that are none, or unknown, are refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.config.sections.diffusers import DiffusersConfig, DiffusionSamplingConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import DataError
from hpcrl.families.diffusion.pipelines.samples import CLEAN
from hpcrl.families.diffusion.pipelines.source import PipelineSource
from hpcrl.families.diffusion.sampler import Sampler
from tests.data.pipelines.material import TINY, write_cosmos, write_sana, write_sana_video, write_wan

pytest.importorskip("diffusers")

STEPS, GUIDANCE, PROMPT = 9, 2.5, "photo of a city"


def settings(solver: Any, *, is_video: bool = False) -> DiffusersConfig:
    sample = DiffusionSamplingConfig(
        num_steps=STEPS,
        guidance_scale=GUIDANCE,
        solver=solver,
        deterministic_sampling=True,
    )
    return DiffusersConfig(
        enable=True,
        dtype="float32",
        inference_size=[SIZE, SIZE],
        max_prompt_length=16,
        sample=sample,
        train_frames=FRAMES,
        is_video=is_video,
    )


MADE = {"sana": write_sana, "sana_video": write_sana_video, "wan": write_wan, "cosmos": write_cosmos}
SIZE, FRAMES = 32, 5


class Harmless:
    """Finds no prompt unsafe."""

    def to(self, _: torch.device) -> None: ...

    def check_text_safety(self, _: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "solver"),
    [("stable_diffusion_3", "dpm1"), ("sana", "dpm2"), ("sana_video", "dpm1"), ("wan", "dpm1"), ("cosmos", "dpm1")],
)
def test_a_sample_is_what_the_pipeline_itself_paints(kind: str, solver: str, tmp_path: Path) -> None:
    folder = MADE[kind](tmp_path / kind) if kind in MADE else TINY / "model"
    video = kind in ("sana_video", "wan", "cosmos")
    source = PipelineSource(Pretrained(str(folder)), settings(solver, is_video=video))
    sampler = Sampler(source, torch.float32, torch.device("cpu"))
    (painted,) = sampler.paint(PROMPT, [11], "train", 4)
    shape = source.latent_shape(FRAMES)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(11))
    options: dict[str, Any] = {"max_sequence_length": 16, "output_type": "latent"}
    if kind.startswith("sana"):
        options |= {"complex_human_instruction": None, "use_resolution_binning": False}
    if video:
        options |= {"frames" if kind == "sana_video" else "num_frames": FRAMES}
    scale = GUIDANCE
    if kind == "cosmos":  # counts from the prompted velocity on, and has words of its own for what is not wanted
        scale, sampler._pipeline.safety_checker = GUIDANCE - 1, Harmless()
        options |= {"negative_prompt": ""}
    asked = functools.partial(
        sampler._pipeline, prompt=PROMPT, height=SIZE, width=SIZE, num_inference_steps=STEPS, guidance_scale=scale
    )
    theirs = asked(latents=noise[None], **options)
    latents = (theirs.frames if video else theirs.images)[0]
    torch.testing.assert_close(torch.from_numpy(painted.tensors[CLEAN]), latents, rtol=1e-3, atol=1e-3)
    image = painted.tensors["image"]
    assert image.shape == ((FRAMES, SIZE, SIZE, 3) if video else (SIZE, SIZE, 3))
    shown = asked(latents=noise[None], **{**options, "output_type": "np"})
    found = (shown.frames if video else shown.images)[0]
    np.testing.assert_allclose(image / 255, found, atol=0.01)
    again = sampler._parts.latents(torch.from_numpy(image)[None])
    assert again.shape == (1, *shape)


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    source = PipelineSource(Pretrained(str(tmp_path)), settings("dpm2"))
    with pytest.raises(DataError, match="cannot be loaded"):
        _ = source.kind
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    with pytest.raises(DataError, match="is a KandinskyPipeline; the pipelines that can be trained are"):
        _ = source.kind
    odd = PipelineSource(Pretrained(str(TINY / "model")), DiffusersConfig(inference_size=[36, 32]))
    with pytest.raises(DataError, match="expected multiples of 8"):
        odd.latent_shape(1)


def test_an_index_of_a_stranger_runs_no_code(tmp_path: Path) -> None:
    """A part whose class a file of its folder has, a class that is a list, and a part that is no pair."""
    (tmp_path / "scheduler").mkdir()
    for name in ("theirs.py", "scheduler/theirs.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Theirs:\n    pass\n")
    for index, told in (
        ({"_class_name": "SanaPipeline", "scheduler": ["theirs", "Theirs"]}, "custom code in theirs.py"),
        ({"_class_name": ["theirs", "Theirs"]}, r"is a \['theirs', 'Theirs'\]; the pipelines that can be trained are"),
        (
            {"_class_name": "SanaPipeline", "scheduler": ["diffusers"]},
            r"expected library and class of each part, found \['diffusers'\]",
        ),
    ):
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        source = PipelineSource(Pretrained(str(tmp_path)), settings("dpm2"))
        with pytest.raises(DataError, match=told):
            _ = source.kind, source.load(torch.float32)
    assert not (tmp_path / "ran").exists()
