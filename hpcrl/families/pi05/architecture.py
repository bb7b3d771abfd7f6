"""PI0.5 on disk: its sizes, and the names of its weights.

A directory has config.json, model*.safetensors and the tokenizer's files. Weights have the names that openpi and lerobot give them; lerobot's begin with "model.".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import CONFIG, read_entries
from hpcrl.errors import DataError

KIND = "pi05"
"""What config.json calls it, as `type`."""
_HEAD_DIM = 256
_GEMMA = {  # width, layers, width of the MLP, heads
    "gemma_300m": (1024, 18, 4096, 8),
    "gemma_2b": (2048, 18, 16384, 8),
}
_VOCABULARY = 257152  # of PaliGemma
_FILES = "*.json", "*.safetensors", "*.model"
_IN_FILES = (
    (
        re.compile(r"^(model\.)?paligemma_with_expert\.paligemma\.lm_head\.weight$"),
        "vlm.language_model.embed_tokens.weight",
    ),
    (
        re.compile(r"^(model\.)?paligemma_with_expert\.paligemma\.model\.vision_tower\.vision_model\."),
        "vlm.vision_tower.",
    ),
    (re.compile(r"^(model\.)?paligemma_with_expert\.paligemma\.model\."), "vlm."),
    (re.compile(r"^(model\.)?paligemma_with_expert\.gemma_expert\.model\."), "expert."),
    (re.compile(r"^model\."), ""),
)
_PALIGEMMA = "paligemma_with_expert.paligemma.model."
_TO_FILES = (
    ("vlm.vision_tower.", f"{_PALIGEMMA}vision_tower.vision_model."),
    ("vlm.", _PALIGEMMA),
    ("expert.", "paligemma_with_expert.gemma_expert.model."),
)
_UNUSED = re.compile(
    r"gemma_expert\.lm_head\.|gemma_expert\.model\.embed_tokens\.|vision_tower\.(vision_model\.)?head\."
)


@dataclass(frozen=True)
class Pi05Architecture:
    """Sizes of a model.

    Attributes:
        vlm: PaliGemmaConfig of transformers, of what reads images and text.
        expert: GemmaConfig, of what moves the actions, whose layers see those of `vlm`; as many layers, and keys of the same size.
        chunk_size: actions of a chunk, H.
        action_dim: numbers of an action, D; a robot that has fewer leaves the others without effect.
        min_period, max_period: of the sines by which a noise level is embedded.
    """

    vlm: Any
    expert: Any
    chunk_size: int
    action_dim: int
    min_period: float = 4e-3
    max_period: float = 4.0

    @property
    def image_size(self) -> int:
        """Height and width of the images that it reads, in pixels."""
        return int(self.vlm.vision_config.image_size)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Pi05Architecture:
        """Return that of a config.json: of lerobot, of openpi, or with `vlm_config` and `expert_config` as transformers' configurations.

        Raises:
            KeyError, TypeError, ValueError: it is none of them.
        """
        from transformers import GemmaConfig, PaliGemmaConfig

        if entries.get("type", KIND) != KIND or "model_type" in entries:
            raise ValueError(f"it is a {entries.get('model_type', entries.get('type'))}")
        width, layers, mlp, heads = _GEMMA[entries.get("paligemma_variant", "gemma_2b")]
        text = {"model_type": "gemma", **_sizes(width, layers, mlp, heads)}
        resolution = entries.get("image_resolution", [224, 224])
        vision = {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "patch_size": 14, "image_size": resolution[0], "vision_use_head": False,
        }  # fmt: skip
        whole = {"text_config": text, "vision_config": vision, "projection_dim": width}
        expert = _sizes(*_GEMMA[entries.get("action_expert_variant", "gemma_300m")])
        return cls(
            PaliGemmaConfig(**entries.get("vlm_config", whole)),
            GemmaConfig(**entries.get("expert_config", expert)),
            int(entries.get("chunk_size", entries.get("action_horizon", 50))),
            int(entries.get("max_action_dim", entries.get("action_dim", 32))),
            float(entries.get("min_period", 4e-3)),
            float(entries.get("max_period", 4.0)),
        )

    def written(self) -> str:
        """Return the config.json that `of` reads."""
        entries = {
            "type": KIND,
            "vlm_config": self.vlm.to_dict(),
            "expert_config": self.expert.to_dict(),
            "chunk_size": self.chunk_size,
            "max_action_dim": self.action_dim,
            "min_period": self.min_period,
            "max_period": self.max_period,
        }
        return json.dumps(entries, indent=2, default=str)


def _sizes(width: int, layers: int, mlp: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": mlp, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": _HEAD_DIM, "vocab_size": _VOCABULARY,
    }  # fmt: skip


def own_name(name: str) -> str | None:
    """Return the network's name of a tensor of a file; None: it is not used."""
    if _UNUSED.search(name):
        return None
    for pattern, own in _IN_FILES:
        name = pattern.sub(own, name)
    return name


def file_name(name: str) -> str:
    """Return openpi's name of a parameter of the network."""
    for own, there in _TO_FILES:
        if name.startswith(own):
            return there + name.removeprefix(own)
    return name


def folder_of(model: Pretrained) -> Path:
    """Return the directory with a model's files, downloaded where they are not here. Raises DataError where there are none."""
    path = Path(model.path).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model.path, allow_patterns=list(_FILES), **model.at_revision))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise not_pi05(model, error) from error


def architecture_of(model: Pretrained) -> Pi05Architecture:
    """Return the sizes of a model. Raises DataError where it is no PI0.5."""
    try:
        entries = read_entries(folder_of(model) / CONFIG)
        return Pi05Architecture.of(entries)
    except (OSError, DataError, ValueError, KeyError, TypeError) as error:
        raise not_pi05(model, error) from error


def not_pi05(model: Pretrained, error: Exception | str) -> DataError:
    said = " ".join(str(error).split())
    return DataError(
        f"trainer.policy.model.path: the PI0.5 model {model} cannot be loaded: expected config.json of lerobot or openpi, model*.safetensors and "
        f"the tokenizer's files ({said})"
    )
