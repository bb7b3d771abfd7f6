"""Families of vision-language models in transformers, and their processing of images. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PIXELS, GRID, STATES = "pixel_values", "image_grid_thw", "states"
"""What models call the pixels of images, the patches that an image has along time, height and width, and what is measured of a robot."""
SECONDS = "second_per_grid_ts"
"""What they call the time from one pair of a video's frames to the next."""

Videos = Literal["order", "seconds", "timestamps"]
"""How a model knows when the frames of a video are seen: by their order, by positions that go on with time, or in words before each pair."""


@dataclass(frozen=True)
class VisionFamily:
    """Models that take images in the same way.

    Attributes:
        processor: class of transformers that prepares images with Pillow, or one of hpcrl's as "module:name"; None: preprocessor_config.json
            names it.
        grid: an image has as many tokens as its size gives, and a row of GRID; otherwise each has the same number.
        videos: what they make of videos; None: they take none.
        vllm: whether vLLM 0.31 has such models, and loads the names that transformers gives to their weights.
    """

    processor: str | None
    grid: bool
    videos: Videos | None = None
    vllm: bool = True


_QWEN = "Qwen2VLImageProcessorPil"
FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(_QWEN, grid=True, videos="order"),
    "qwen2_5_vl": VisionFamily(_QWEN, grid=True, videos="seconds"),
    "qwen3_vl": VisionFamily(_QWEN, grid=True, videos="timestamps"),
    "llava": VisionFamily(None, grid=False, vllm=False),
    "openvla": VisionFamily("hpcrl.data.vision.openvla:OpenVLAImageProcessor", grid=False, vllm=False),
}
"""Each by the `model_type` of its config.json."""


def family_of(config: Any) -> VisionFamily | None:
    """Return the family of a model, by its configuration or the entries of its config.json; None: it sees nothing."""
    kind = config.get("model_type") if isinstance(config, Mapping) else config.model_type
    return FAMILIES.get(str(kind))


def placeholders(config: Any) -> list[int]:
    """Return the ids of the tokens that stand for images and videos, which a policy may not say: its own inputs would be taken for images.

    Args:
        config: as of `family_of`.
    """
    entries = config if isinstance(config, Mapping) else vars(config)
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    if family_of(config) is None:
        return []
    return sorted({entries[name] for name in names if isinstance(entries.get(name), int)})
