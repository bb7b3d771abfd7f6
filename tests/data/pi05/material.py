"""A tiny PI0.5 with random weights, as a directory that a run begins from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcrl.config.sections.model import Pretrained
from hpcrl.families.pi05.architecture import Pi05Architecture, file_name
from hpcrl.families.pi05.inputs import load_tokenizer
from hpcrl.families.pi05.network import Pi05
from hpcrl.families.pi05.statistics import PROCESSOR
from tests.paths import CONFIGS

TEXT: dict[str, Any] = {
    "model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 8, "vision_use_head": False,
}  # fmt: skip
TINY: dict[str, Any] = {
    "type": "pi05",
    "vlm_config": {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32, "image_token_id": 63},
    "expert_config": {**TEXT, "hidden_size": 24},
    "chunk_size": 4,
    "max_action_dim": 6,
}


def tiny() -> Pi05:
    """Return the network; its norms depend on the noise level."""
    torch.manual_seed(0)
    return Pi05(Pi05Architecture.of(TINY))


def write_tiny(folder: Path) -> Path:
    """Write the network as openpi would, with the tokenizer of the tiny arm."""
    folder.mkdir(parents=True, exist_ok=True)
    network = tiny()
    (folder / "config.json").write_text(network.architecture.written())
    tensors = {file_name(name): value.detach().contiguous() for name, value in network.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    load_tokenizer(Pretrained(str(CONFIGS / "reach" / "model"))).save_pretrained(folder)
    return folder


def write_lerobot(folder: Path, mode: str = "QUANTILES", relative: bool = False, stored: bool = True) -> None:
    """Write the processor of a policy as lerobot does, as far as it is read."""
    kept = "policy_preprocessor_step_1_normalizer_processor.safetensors"
    normalizer: dict[str, Any] = {"config": {"norm_map": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}}}
    if stored:
        normalizer["state_file"] = kept
    steps = [
        {"registry_name": "relative_actions_processor", "config": {"enabled": relative}},
        {"registry_name": "normalizer_processor", **normalizer},
    ]
    (folder / PROCESSOR).write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    numbers = {
        "observation.state.q01": [0.0],
        "observation.state.q99": [2.0],
        "action.q01": [-1.0],
        "action.q99": [3.0],
    }
    save_file({name: torch.tensor(each) for name, each in numbers.items()}, folder / kept)
