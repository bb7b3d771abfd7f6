"""Probe of PI0.5's network: a few numbers of a velocity, by which engine and trainer are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpcrl.families.pi05.architecture import Pi05Architecture
from hpcrl.families.pi05.samples import read_inputs


def probe_velocity(
    network: Callable[..., torch.Tensor], sizes: Pi05Architecture, token_ids: Sequence[int], device: torch.device
) -> list[float]:
    """Return as many numbers of the velocity as there are tokens but the first.

    Args:
        network: computes as Pi05.forward.
        token_ids: the text; the first one is also the seed of an image and of noised actions.
    """
    generator, size = torch.Generator().manual_seed(token_ids[0]), sizes.image_size
    image = torch.randint(256, (1, size, size, 3), generator=generator, dtype=torch.uint8)
    x = torch.randn((1, 1, sizes.chunk_size, sizes.action_dim), generator=generator)
    inputs = read_inputs([torch.tensor(list(token_ids), device=device)], [image.to(device)], size)
    found = network(*inputs, x.to(device), torch.full((1, 1), 0.5, device=device)).flatten().float().cpu()
    return [float(found[at % len(found)]) for at in range(len(token_ids) - 1)]
