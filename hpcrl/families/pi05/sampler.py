"""Makes chunks of actions with PI0.5: text and images are read once, then noise becomes actions step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcrl.algorithms.diffusion.actions import action_logprobs, walk
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import Pi05Config
from hpcrl.families.pi05.probe import probe_velocity
from hpcrl.families.pi05.samples import read_inputs
from hpcrl.families.pi05.source import loaded
from hpcrl.types import Kind


@dataclass(frozen=True, eq=False)
class Ask:
    """Request for one chunk.

    Attributes:
        token_ids: the text.
        images: [C, size, size, 3] uint8; None: there are no cameras.
        action_size: how many numbers the robot has.
        kind: in training steps are drawn.
    """

    token_ids: Sequence[int]
    images: np.ndarray | None
    action_size: int
    seed: int
    kind: Kind


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk that was made.

    Attributes:
        path: [S + 1, H, D] float32, from noise to actions.
        logprobs: [H] of each action; 0 where nothing was drawn.
    """

    path: np.ndarray
    logprobs: np.ndarray


class ActionSampler:
    """PI0.5 on its device.

    Attributes:
        network: whose weights others replace, while nothing is sampled.
        actions: that were made.
    """

    def __init__(self, model: Pretrained, settings: Pi05Config, dtype: torch.dtype, device: torch.device) -> None:
        self._settings, self._device, self.actions = settings, device, 0
        self.network = loaded(model, dtype).to(device).eval()

    @torch.inference_mode()
    def make(self, asks: Sequence[Ask]) -> list[Chunk]:
        """Return a chunk for each ask, all of one kind; it depends on the weights, what is shown and the seed."""
        if not asks:
            return []
        sizes, settings = self.network.architecture, self._settings
        images = [None if ask.images is None else torch.from_numpy(ask.images).to(self._device) for ask in asks]
        texts = [torch.tensor(list(ask.token_ids), device=self._device) for ask in asks]
        prefix = self.network.read(*read_inputs(texts, images, sizes.image_size))
        generators = [torch.Generator().manual_seed(ask.seed) for ask in asks]
        shape = sizes.chunk_size, sizes.action_dim

        def drawn(_: object = None) -> torch.Tensor:
            return torch.stack([torch.randn(shape, generator=each) for each in generators]).to(self._device)

        def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            return self.network.velocity(x, torch.full((len(x),), sigma, device=self._device), prefix)

        stochastic = asks[0].kind == "train"
        method, level = settings.noise_method, settings.noise_level
        path, velocities = walk(velocity, drawn(), settings.num_steps, method, level, drawn if stochastic else None)
        self.actions += len(asks) * sizes.chunk_size
        if stochastic:
            robot = torch.tensor([ask.action_size for ask in asks], device=self._device)
            logprobs, _ = action_logprobs(velocities, path, robot, method, level)
        else:
            logprobs = torch.zeros(len(asks), sizes.chunk_size)
        return [Chunk(*pair) for pair in zip(path.cpu().numpy(), logprobs.cpu().numpy(), strict=True)]

    @torch.inference_mode()
    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the engine's values for the trainer's probe."""
        return probe_velocity(self.network, self.network.architecture, token_ids, self._device)
