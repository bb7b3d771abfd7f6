"""Parts of a pipeline beside its transformer: text encoders and VAE, on the device, or there only while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpcrl.families.diffusion.pipelines.kinds import Conditions
from hpcrl.families.diffusion.pipelines.source import PipelineSource

if TYPE_CHECKING:
    import torch

_ENCODERS, _VAE = ("text_encoder", "text_encoder_2", "text_encoder_3"), "vae"


class Parts:
    """A pipeline whose encoders have a device.

    Args:
        encoders_only: as of `PipelineSource.load`.

    Attributes:
        pipeline: diffusers' own, its transformer on the CPU.
    """

    def __init__(self, source: PipelineSource, device: torch.device, *, encoders_only: bool = False) -> None:
        import torch

        self._source, self._device = source, device
        self.pipeline = source.load(getattr(torch, source.settings.dtype), encoders_only=encoders_only)
        self._offloads = source.settings.offload and device.type == "cuda"
        if not self._offloads:
            for part in self._found(*_ENCODERS, _VAE):
                part.to(device)

    def conditions(self, prompts: Sequence[str]) -> Conditions:
        """Return the transformer's conditions of prompts, [N, ...] each, on the device."""
        with self._on_device(*_ENCODERS):
            found = self._source.kind.encode(self.pipeline, prompts, self._source.settings.max_prompt_length)
        return {name: value.to(self._device) for name, value in found.items()}

    def decoded(self, latents: torch.Tensor) -> torch.Tensor:
        """Return pictures or videos of latents [N, ...], as of `PipelineKind.decode`."""
        with self._on_device(_VAE):
            return self._source.kind.decode(self.pipeline, latents)

    def latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return latents [N, ...] of pictures or videos uint8, [N, (frames,) height, width, 3]."""
        with self._on_device(_VAE):
            return self._source.kind.latents(self.pipeline, pixels.to(self._device))

    def _found(self, *names: str) -> list[Any]:
        parts = [getattr(self.pipeline, name, None) for name in names]
        return [part for part in parts if part is not None]

    @contextmanager
    def _on_device(self, *names: str) -> Iterator[None]:
        parts = self._found(*names) if self._offloads else []
        for part in parts:
            part.to(self._device)
        try:
            yield
        finally:
            for part in parts:
                part.to("cpu")
