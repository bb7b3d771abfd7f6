"""Makes of rows of datasets what a transformer is trained with: latents of the picture, by the VAE, and what the text encoders say of the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from hpcrl.data.pipelines.parts import Parts
from hpcrl.data.pipelines.samples import CLEAN, GIVEN, IMAGE, NOISE_SEED, PROMPT, STEPS
from hpcrl.data.pipelines.source import PipelineSource


class RowEncoder:
    """The encoders of a pipeline on a rank's device, or in host memory but while they are used (trainer.policy.diffusers.offload).

    Args:
        seed: of all noise.

    Raises:
        DataError: the pipeline cannot be loaded.
    """

    def __init__(self, source: PipelineSource, device: torch.device, seed: int) -> None:
        self._source, self._device, self._seed = source, device, seed
        self._parts = Parts(source, device, encoders_only=True)

    @torch.no_grad()
    def encoded(self, rows: Sequence[Mapping[str, torch.Tensor]], update: int | None) -> list[dict[str, torch.Tensor]]:
        """Return what each row is trained with, under the names of samples that were made, with one step of each.

        Args:
            rows: as `PictureRows.tensors` (hpcrl/data/pipelines/pictures.py) returns them.
            update: optimizer steps that were made, for each of which noise is drawn anew; None: always the same noise.
        """
        if not rows:
            return []
        prompts = [bytes(row[PROMPT].cpu().numpy()).decode() for row in rows]
        given = self._parts.conditions(prompts)
        clean = self._parts.latents(torch.stack([row[IMAGE] for row in rows])).float()
        return [
            {
                STEPS: torch.zeros(1, dtype=torch.int32),
                CLEAN: clean[at],
                NOISE_SEED: torch.tensor([self._drawn(int(row[NOISE_SEED]), update)]),
                **{f"{GIVEN}{name}": value[at] for name, value in given.items()},
            }
            for at, row in enumerate(rows)
        ]

    def _drawn(self, row: int, update: int | None) -> int:
        digest = hashlib.blake2b(f"{self._seed} {row} {update}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
