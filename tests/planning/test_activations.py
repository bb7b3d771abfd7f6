"""What `hpcrl plan` says of the activations of a pipeline's transformer is what a pass on a device keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hpcrl.config import Config
from hpcrl.families.diffusion.model import transformer_source
from hpcrl.families.diffusion.plan import activations_of_a_pass, describe_policy, passes
from hpcrl.planning.activations import kept_bytes
from tests.paths import CONFIGS

pytest.importorskip("diffusers")

TINY, TOKENS = CONFIGS / "diffusion_tiny.toml", 7


def made(device: str) -> tuple[torch.nn.Module, Any]:
    """Return the tiny transformer, all of it trained, and a pass of it, on a device."""
    source = transformer_source(Config.from_toml([TINY]).trainer)
    model: Any = source.empty(torch.float32, "").to_empty(device=device)
    with torch.device(device):
        inputs = torch.zeros(1, 4, 8, 8), torch.zeros(1, TOKENS, 32), torch.zeros(1, 32), torch.zeros(1)
    return model, lambda: model(*inputs, return_dict=False)[0]


def test_it_is_what_a_pass_keeps() -> None:
    planned = kept_bytes(*made("meta"), recomputed=False)
    model, forward = made("cpu")
    own, kept = {each.untyped_storage()._cdata for each in model.parameters()}, dict[int, Any]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    assert output.requires_grad
    assert planned == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.05)


def test_a_plan_counts_steps_guidance_and_recomputation() -> None:
    settings = ["trainer.micro_train_batch_size_per_gpu=2", "trainer.policy.diffusers.sample.num_steps=10"]
    config = Config.from_toml([TINY], settings)
    assert passes(config.trainer) == 2 * 5  # half of the steps
    whole = Config.from_toml([TINY], [*settings, "trainer.policy.diffusers.inference_size=[64, 64]"])
    assert 1.5 < activations_of_a_pass(whole.trainer) / activations_of_a_pass(config.trainer) < 3  # prompts stay
    lines, parts = describe_policy(config)
    assert sum(parts.values()) > 10 * activations_of_a_pass(config.trainer)
    assert any("10 passes of the transformer at a time" in line for line in lines)
    rows, _ = describe_policy(Config.from_toml([CONFIGS / "diffusion_sft_tiny.toml"]))
    assert any("flow matching, a noise level of each row" in line for line in rows)
    assert not any(line.startswith("engine: ") for line in rows)
