"""Prepares images for OpenVLA: resized to one size, and normalised for each of its vision transformers. Without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import hf_hub_download

from hpcrl.data.entries import read_entries

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_FILE = "preprocessor_config.json"
_CROPPED = 0.9
"""Share of an image's area that is kept where a policy has learned from random crops, as OpenVLA's evaluations have it."""


@dataclass(frozen=True)
class OpenVLAImageProcessor:
    """Prepares images; names as in OpenVLA's preprocessor_config.json.

    Attributes:
        means, stds: of each vision transformer, of its three channels.
        input_sizes: of each, [3, height, width]; all are the same.
        image_resize_strategy: "resize-naive": images are resized whatever their shape.
        center_crop: the middle of an image is shown, 0.9 of its area (data.image_processor_kwargs).
    """

    means: list[list[float]]
    stds: list[list[float]]
    input_sizes: list[list[int]]
    image_resize_strategy: str = "resize-naive"
    center_crop: bool = False
    do_center_crop: bool = field(default=False, init=False)

    @classmethod
    def from_pretrained(cls, path: str, revision: str | None = None, **options: Any) -> OpenVLAImageProcessor:
        """Return the image processor of a model. Raises OSError, ValueError or TypeError where it has none, or another one."""
        file = Path(path) / _FILE if Path(path).is_dir() else Path(hf_hub_download(path, _FILE, revision=revision))
        entries = read_entries(file)
        names = "means", "stds", "input_sizes", "image_resize_strategy"
        found = cls(**{name: entries[name] for name in names if name in entries}, **options)
        if found.image_resize_strategy != "resize-naive":
            raise ValueError(f'image_resize_strategy is "{found.image_resize_strategy}", and resize-naive is known')
        return found

    def save_pretrained(self, folder: Path) -> None:
        entries = {name: getattr(self, name) for name in ("means", "stds", "input_sizes", "image_resize_strategy")}
        (folder / _FILE).write_text(
            json.dumps({"image_processor_type": "PrismaticImageProcessor", **entries}, indent=2)
        )

    @property
    def size(self) -> dict[str, int]:
        _, height, width = self.input_sizes[0]
        return {"height": height, "width": width}

    def __call__(self, images: Sequence[Image], **_: Any) -> dict[str, np.ndarray]:
        """Return the pixels of images, [N, channels of all vision transformers, height, width] float32."""
        import numpy as np

        return {"pixel_values": np.stack([self._pixels(image) for image in images])}

    def _pixels(self, image: Image) -> np.ndarray:
        import numpy as np
        from PIL.Image import Resampling

        size = self.size["width"], self.size["height"]
        image = image.resize(size, Resampling.BICUBIC)
        if self.center_crop:
            cut = [(1 - _CROPPED**0.5) / 2 * length for length in size]
            box = (cut[0], cut[1], size[0] - cut[0], size[1] - cut[1])
            image = image.resize(size, Resampling.BILINEAR, box=box)
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / 255
        parts = [
            (pixels - np.array(mean, np.float32)[:, None, None]) / np.array(std, np.float32)[:, None, None]
            for mean, std in zip(self.means, self.stds, strict=True)
        ]
        return np.concatenate(parts)
