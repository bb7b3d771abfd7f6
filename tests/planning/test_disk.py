"""What a run keeps on disk is told before it starts, from the headers of its models' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.launch.doctor.disk_space import Sizes
from hpcrl.planning.disk import describe_disk


def told(folder: Path | None, settings: dict[str, Any]) -> str:
    base = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "a/model"}
    config = build(Config, nested({**base, **settings}))
    return "\n".join(describe_disk(config, Sizes.of(config, lambda _: folder)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A million parameters in two files."""
    for number in (1, 2):
        tensors = {f"t{number}": torch.zeros(1000, 500, dtype=torch.bfloat16)}
        save_file(tensors, tmp_path / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, ["about 11.4 MiB", "the newest 3 stay", "with the one on its way 45.8 MiB", "weights have 1.9 MiB", "newest 2 versions", "5.7 MiB"]),
        ({"trainer.max_ckpts_to_keep": -1}, ["all are kept (trainer.max_ckpts_to_keep)\n"]),
        ({"trainer.keep_when_done": "last"}, ["once the run is done, what trainer.keep_when_done names stays: last"]),
        ({"trainer.max_ckpts_to_keep": 1}, ["the newest 2 stay", "34.3 MiB"]),
        ({"trainer.ckpt_keep_best": "reward"}, ["and the best by reward: with the one on its way 57.2 MiB"]),
        ({"trainer.ckpt_keep_every": 50}, ["and each of a multiple of 50 steps\n"]),
        ({"trainer.ckpt_interval": 0}, ["none is saved\n"]),
        ({"trainer.critic.model.path": "a/critic"}, ["about 22.9 MiB"]),
        ({"trainer.strategy": "megatron", "trainer.algorithm.use_kl_loss": False}, ["about 13.4 MiB"]),
        ({"trainer.policy.fsdp_config.mixed_precision.master_dtype": "bf16"}, ["about 5.7 MiB"]),
        ({"generator.inference_engine.model_dtype": "float32", "trainer.hf_save_interval": 5}, ["weights have 3.8 MiB", "an export has 1.9 MiB, and none is deleted"]),
        ({"generator.inference_engine.weight_copy_dir": "$TMPDIR"}, ["copies of them take 1.9 MiB of $TMPDIR on each", "3.8 MiB"]),
        (
            {"generator.inference_engine.weight_copy_dir": "$TMPDIR", "generator.inference_engine.full_weights_interval": 8},
            ["every 8th version is whole", "keep a version in host memory: 1.9 MiB"],
        ),
        ({"trainer.policy.model.lora.rank": 4}, ["published adapters have 23.4 KiB"]),
        ({"trainer.policy.model.lora.rank": 4, "generator.inference_engine.merge_lora": True}, ["weights have 1.9 MiB"]),
        ({"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.modules_to_save": ["t1"]}, ["weights have 1.9 MiB", "about 5.9 MiB"]),
    ],
)  # fmt: skip
def test_sizes(model: Path, settings: dict[str, Any], parts: list[str]) -> None:
    said = told(model, settings)
    for part in parts:
        assert part in said


def test_without_engines_nothing_is_published(model: Path) -> None:
    assert "published" not in told(model, {"trainer.mode": "sft", "trainer.max_length": 64})


def test_a_model_that_is_elsewhere(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        said = told(folder, {})
        assert "not known, since not all models have safetensors files" in said
        assert "the newest 3 stay" in said
