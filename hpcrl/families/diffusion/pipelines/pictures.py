"""Rows of datasets that a diffusion policy learns from: a prompt, and the picture or the frames that it is to become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.config.sections.diffusers import DiffusersConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.conversations import Columns, Tokens
from hpcrl.data.vision.images import Frames, image_text, size_of
from hpcrl.errors import DataError
from hpcrl.families.diffusion.pipelines.samples import IMAGE, NOISE_SEED, PROMPT
from hpcrl.families.diffusion.pipelines.tokens import load_tokenizer, row_decoder

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PictureRows:
    """Rows of a prompt and a picture or a video: a RowFormat (hpcrl/data/family.py).

    Attributes:
        size: height and width of a picture, to which what is larger or smaller is scaled, and cut around its middle.
        frames: of a video, the first ones of those that a row has; None: rows have pictures.
        longest: tokens of a prompt; further ones are cut off.
    """

    size: list[int]
    frames: int | None
    longest: int

    limit: ClassVar[str] = "with max_prompt_length and a noise level at most"

    @classmethod
    def of(cls, settings: DiffusersConfig) -> PictureRows:
        frames = settings.train_frames if settings.is_video else None
        return cls(settings.inference_size, frames, settings.max_prompt_length)

    def renderer(self, model: Pretrained, columns: Columns) -> PictureRenderer:
        """Return the renderer of rows; errors as of `load_tokenizer`."""
        return PictureRenderer(model, columns, self)

    def tensors(self, contents: Sequence[bytes], row: int) -> dict[str, np.ndarray]:
        """Return a sample's tensors: the prompt in UTF-8, the picture or the frames of the size that is trained, and the seed of their noise.

        Args:
            contents: the prompt, then files of pictures.
            row: its number in the dataset.
        """
        import numpy as np
        from PIL import Image, ImageOps

        height, width = self.size
        pixels = list[np.ndarray]()
        for picture in _pictures(contents[1:], self.frames or 1):
            fitted = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
            pixels.append(np.array(fitted, np.uint8))
        return {
            PROMPT: np.frombuffer(contents[0], np.uint8).copy(),
            IMAGE: pixels[0] if self.frames is None else np.stack(pixels),
            NOISE_SEED: np.array([row], np.int64),
        }


class PictureRenderer:
    """Makes sequences of rows: the tokens of the prompt, then one entry that is trained, which stands for a noise level.

    Errors as of `load_tokenizer`.
    """

    def __init__(self, model: Pretrained, columns: Columns, rows: PictureRows) -> None:
        self._tokenizer, self._columns, self._rows = load_tokenizer(model), columns, rows
        self.decode = row_decoder(model)

    def sequences(self, row: Any, folder: Path | None = None) -> list[Tokens]:
        """Return a row as it is trained, one sequence; arguments and errors as of `Renderer.sequences`."""
        if not isinstance(row, Mapping):
            raise DataError(f"expected an object with columns, found {type(row).__name__}")
        prompt = _prompt(row.get(self._columns.prompt), self._columns.prompt)
        given = row.get(self._columns.images)
        files = [image_text(one, folder) for one in (given if isinstance(given, list) else [given])]
        self._check(files)
        ids = list(self._tokenizer(prompt).input_ids)[: self._rows.longest]
        shown = [(0, 0, file) for file in files]
        return [Tokens([*ids, len(self._tokenizer)], [False] * len(ids) + [True], images=shown, prompt=prompt)]

    def _check(self, files: Sequence[str]) -> None:
        """Raise DataError where a row has not the pictures that it needs; only headers are read."""
        if self._rows.frames is None:
            if len(files) != 1:
                raise DataError(
                    f"column `{self._columns.images}` (data.image_column) has {len(files)} pictures; expected one, or, of a video, "
                    "trainer.policy.diffusers.is_video"
                )
            size_of(files[0])
            return
        there = sum(len(Frames(file)) for file in files)
        if there < self._rows.frames:
            raise DataError(
                f"column `{self._columns.images}` (data.image_column) has {there} frames; expected trainer.policy.diffusers.train_frames = "
                f"{self._rows.frames} at least, as several pictures or as an animated PNG, WebP or GIF"
            )


def _pictures(files: Sequence[bytes], count: int) -> Iterator[Any]:
    for content in files:
        for frame in Frames(image_text(content)):
            if count == 0:
                return
            yield frame
            count -= 1


def _prompt(value: Any, column: str) -> str:
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column `{column}` (data.prompt_column): expected a text, found {value!r:.80}")
    return value
