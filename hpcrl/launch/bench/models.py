"""Models that a bench trains where none is given: the quickstart's, and shapes of random ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hpcrl

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHAPES: Mapping[str, dict[str, Any]] = MappingProxyType({
    "0.6B": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "1.7B": _QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "8B": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "tie_word_embeddings": False,
    },
})  # fmt: skip
"""By their parameters, the smallest first: what the config.json of Qwen3 of that size has (huggingface.co/Qwen), with the quickstart's tokens."""

_BYTES = 16  # of a parameter in training: weight, gradient and two moments in float32
_SHARE = 0.5  # of the memory: the rest is for activations, and for the engine's weights where it shares the GPU


def fitting(memory: float) -> str:
    """Return the largest of `SHAPES` whose state in training takes half of the memory of all trainer ranks, in bytes; else the smallest."""
    names = list(SHAPES)
    fit = [name for name in names if float(name.removesuffix("B")) * 1e9 * _BYTES <= _SHARE * memory]
    return fit[-1] if fit else names[0]


def tiny_model() -> Path:
    """Return the folder of the quickstart's model: in the checkout, or inside the package in an installed wheel."""
    package = Path(hpcrl.__file__).parent
    inside = package / "_tiny_model"
    return inside if inside.is_dir() else package.parent / "configs" / "quickstart" / "model"
