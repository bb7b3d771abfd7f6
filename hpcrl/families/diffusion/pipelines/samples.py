"""Rows of a diffusion policy's samples: the prompt's tokens, then one entry for each trained denoising step.

The id of such an entry is the size of the vocabulary plus the number of the step in the sampler, so that no id is both. Other data lie in
`Row.tensors`:

    steps         [S] int32, the numbers of these steps
    sigmas        [N + 1] float32, noise levels of the sampler
    clean         [...] float32, final latents
    before, after [S, ...] float32, latents before and after each of these steps, where steps were drawn and their probabilities count
    noise_seed    [1] int64, of the noise of the forward process in training
    given.*       conditions of the prompt (hpcrl/families/diffusion/pipelines/kinds.py), without the first dimension
    free.*        the same of the empty prompt, where guidance counts in training
    prompt        [L] uint8, the prompt in UTF-8, of a row of a dataset alone, whose latents and conditions are computed when it is trained
    image         [height, width, 3] uint8, or [frames, height, width, 3], where it is to be looked at
    latents       final latents of a video, float16 [channels, frames, height, width], beside it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEPS, SIGMAS, CLEAN, BEFORE, AFTER, NOISE_SEED = "steps", "sigmas", "clean", "before", "after", "noise_seed"
IMAGE, LATENTS, PROMPT = "image", "latents", "prompt"
GIVEN, FREE = "given.", "free."
"""How the names of conditions begin."""


def conditions_in(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the conditions that a row has, of its prompt (GIVEN) or of the empty one (FREE); empty: none."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
