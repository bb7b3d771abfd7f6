"""The random Qwen3 of 0.6 billion parameters that programs of this folder train, and the memory of a process."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""torchrun's variables for a process group of one rank."""
_WHOLE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_TINY: dict[str, Any] = _WHOLE | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def make_model(place: Path, *, tiny: bool) -> None:
    config = Qwen3Config(**(_TINY if tiny else _WHOLE))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.bfloat16().save_pretrained(place)


def peak_memory(device: torch.device) -> int:
    """Return bytes: torch's allocator at its highest on a GPU, else the peak of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
