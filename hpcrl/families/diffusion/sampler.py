"""Makes pictures with a pipeline: prompts to conditions, noise to latents step by step, latents to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hpcrl.algorithms.diffusion.samplers import Path, sample
from hpcrl.families.diffusion.pipelines.kinds import Conditions
from hpcrl.families.diffusion.pipelines.parts import Parts
from hpcrl.families.diffusion.pipelines.samples import (
    AFTER,
    BEFORE,
    CLEAN,
    FREE,
    GIVEN,
    IMAGE,
    LATENTS,
    NOISE_SEED,
    SIGMAS,
    STEPS,
)
from hpcrl.families.diffusion.pipelines.source import PipelineSource, sigmas_of
from hpcrl.types import Kind


@dataclass(frozen=True)
class Painted:
    """One sample.

    Attributes:
        steps: numbers of the denoising steps that are trained, ascending.
        logprobs: of these steps; 0 where they were not drawn.
        tensors: as of hpcrl/families/diffusion/pipelines/samples.py.
    """

    steps: list[int]
    logprobs: list[float]
    tensors: dict[str, np.ndarray]


class Sampler:
    """A pipeline on its device.

    Args:
        dtype: of the transformer.

    Attributes:
        transformer: whose weights others replace, while nothing is sampled.
        steps: denoising steps of samples that were made.
    """

    def __init__(self, source: PipelineSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._settings, self._device = source, source.settings, device
        self._parts = Parts(source, device)
        self._pipeline = self._parts.pipeline
        self.transformer: Any = self._pipeline.transformer.to(device, dtype).eval()
        self._tokenizer = deepcopy(self._pipeline.tokenizer)  # encoding sets the padding of its own, in another thread
        self._dtype, self.steps = dtype, 0

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens prompts have."""
        return len(self._tokenizer)

    def tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, at most trainer.policy.diffusers.max_prompt_length."""
        return list(self._tokenizer(prompt).input_ids[: self._settings.max_prompt_length])

    @torch.inference_mode()
    def paint(self, prompt: str, seeds: Sequence[int], kind: Kind, at_once: int) -> list[Painted]:
        """Return a sample for each seed, which depends on the weights, the prompt and the seed.

        Args:
            at_once: samples that are made together at most.
        """
        given = self._encoded(prompt)
        return [
            one
            for start in range(0, len(seeds), at_once)
            for one in self._together(given, seeds[start : start + at_once], kind)
        ]

    def _together(self, given: Conditions, seeds: Sequence[int], kind: Kind) -> list[Painted]:
        settings, sampling = self._settings, self._settings.sample
        frames = settings.train_frames if kind == "train" else settings.inference_frames
        shape = self._source.latent_shape(frames)
        count = sampling.num_steps if kind == "train" else sampling.eval_num_steps
        sigmas = sigmas_of(self._pipeline.scheduler, count, shape, self._source.patch)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]

        def drawn(like: torch.Tensor | None = None) -> torch.Tensor:
            noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
            return noise.to(self._device, torch.float32 if like is None else like.dtype)

        stochastic = kind == "train" and settings.sample.stochastic
        path = sample(
            self._velocity(given, len(seeds)),
            drawn(),
            sigmas,
            sampling.solver,
            sampling.noise_level,
            drawn if stochastic else None,
        )
        self.steps += count * len(seeds)
        images = self._parts.decoded(path.latents[-1])
        return [self._painted(path, sigmas, at, generators[at], images[at], given, kind) for at in range(len(seeds))]

    def _painted(
        self,
        path: Path,
        sigmas: list[float],
        at: int,
        generator: torch.Generator,
        image: torch.Tensor,
        given: Conditions,
        kind: Kind,
    ) -> Painted:
        settings, shown = self._settings, {IMAGE: image.numpy()}
        if settings.is_video:
            shown[LATENTS] = path.latents[-1][at].half().cpu().numpy()
        if kind == "eval":
            return Painted([0], [0.0], shown)
        count = settings.trained_steps
        steps = sorted(torch.randperm(len(sigmas) - 1, generator=generator)[:count].tolist())
        tensors = {
            STEPS: np.array(steps, np.int32),
            SIGMAS: np.array(sigmas, np.float32),
            **shown,
            **_named(GIVEN, given),
        }
        if settings.algorithm == "nft":
            seed = torch.randint(2**31, (1,), generator=generator)
            tensors |= {CLEAN: _array(path.latents[-1][at]), NOISE_SEED: seed.numpy()}
        else:
            tensors[BEFORE] = np.stack([_array(path.latents[step][at]) for step in steps])
            tensors[AFTER] = np.stack([_array(path.latents[step + 1][at]) for step in steps])
            tensors |= _named(FREE, self._free) if settings.sample.guidance_scale > 1 else {}
        return Painted(steps, [float(path.logprobs[step][at]) for step in steps], tensors)

    def _velocity(self, given: Conditions, count: int) -> Any:
        """Return what gives the velocity of `count` samples of one prompt, with guidance where there is one."""
        guidance = self._settings.sample.guidance_scale
        conditions = [self._free, given] if guidance > 1 else [given]
        rows = {
            name: torch.cat([each[name].expand(count, *each[name].shape[1:]) for each in conditions]) for name in given
        }

        def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
            inputs = torch.cat([x] * len(conditions)).to(self._dtype)
            t = torch.full((len(inputs),), sigma, device=self._device)
            found = self.velocity(inputs, t, rows)
            if len(conditions) == 1:
                return found
            unconditional, conditional = found.chunk(2)
            return unconditional + guidance * (conditional - unconditional)

        return velocity

    def velocity(self, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Return the velocity of the transformer as it is, without guidance."""
        cast = {
            name: value.to(self._device, self._dtype) if value.is_floating_point() else value.to(self._device)
            for name, value in conditions.items()
        }
        return self._source.kind.velocity(self.transformer, x.to(self._device, self._dtype), t.to(self._device), cast)

    @cached_property
    def _free(self) -> Conditions:
        return self._encoded("")

    def _encoded(self, prompt: str) -> Conditions:
        return self._parts.conditions([prompt])

    def to(self, device: torch.device) -> None:
        """Move the transformer."""
        self.transformer.to(device)


def _named(prefix: str, conditions: Conditions) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": _array(value[0]) for name, value in conditions.items()}


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as files of groups have it: float16 stays, other real numbers become float32."""
    keeps = tensor.dtype == torch.float16 or not tensor.is_floating_point()
    return (tensor if keeps else tensor.float()).cpu().numpy()
