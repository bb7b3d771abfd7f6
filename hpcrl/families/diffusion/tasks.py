"""Training tasks on the velocity: DiffusionNFT's losses, probabilities of denoising steps, or the loss of flow matching.

A task defines the points of the velocity, also for other weights, and computes the outputs of entries from it, as a language model
computes log-probabilities from logits. An objective uses nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hpcrl.algorithms.diffusion.flow_matching import draw_levels, flow_matching_loss
from hpcrl.algorithms.diffusion.nft import implicit_losses, noised, velocity_divergence
from hpcrl.algorithms.diffusion.samplers import STEPS as SOLVERS
from hpcrl.algorithms.diffusion.samplers import Step
from hpcrl.config.sections.diffusers import DiffusersConfig, DiffusionSamplingConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.families.diffusion.pipelines.samples import AFTER, BEFORE, CLEAN, NOISE_SEED, SIGMAS, STEPS
from hpcrl.families.diffusion.pipelines.source import PipelineSource
from hpcrl.families.diffusion.rows import StepRows
from hpcrl.families.diffusion.settings import trains_by_nft

Other = Literal["old", "reference"]
"""Weights beside those that are trained: what samples were made with, and the model without adapters."""


@dataclass(frozen=True)
class Points:
    """Points at which the velocity is computed.

    Attributes:
        x: latents [N, ...].
        t: noise levels [N].
        target: the velocity that is learned there, [N, ...]; None: none is given.
    """

    x: torch.Tensor
    t: torch.Tensor
    target: torch.Tensor | None = None


class Task(Protocol):
    """A training task.

    Attributes:
        compares: weights beside the trained ones whose velocity is wanted too.
        guided: whether the velocity is that with guidance.
    """

    @property
    def compares(self) -> Sequence[Other]: ...

    @property
    def guided(self) -> bool: ...

    def points(self, rows: StepRows) -> Points:
        """Return the points of each step; there are samples."""
        ...

    def outputs(
        self, rows: StepRows, points: Points, velocity: torch.Tensor, others: Mapping[Other, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return outputs [N] of each step.

        Args:
            velocity: [N, ...], with gradient.
            others: those of `compares`, without.
        """
        ...


@dataclass(frozen=True)
class NftTask:
    """Outputs are the losses of both implicit velocities, and the divergence from the reference; 0 without one."""

    beta: float
    reference: bool
    guided: bool = False

    @property
    def compares(self) -> Sequence[Other]:
        return ("old", "reference") if self.reference else ("old",)

    def points(self, rows: StepRows) -> Points:
        clean = rows.repeated(CLEAN)
        noise = torch.cat([_noise(*pair) for pair in zip(rows.samples, rows.counts, strict=True)])
        t = torch.cat([tensors[SIGMAS][tensors[STEPS].long()] for tensors in rows.samples])
        return Points(noised(clean, noise, t), t)

    def outputs(
        self, rows: StepRows, points: Points, velocity: torch.Tensor, others: Mapping[Other, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        clean = rows.repeated(CLEAN) if rows.samples else torch.zeros_like(velocity)
        losses = implicit_losses(velocity, others["old"], clean, points.x, points.t, self.beta)
        if not self.reference:
            return (*losses, torch.zeros_like(losses[0]))
        return (*losses, velocity_divergence(velocity, others["reference"]))


@dataclass(frozen=True)
class StepTask:
    """Outputs are log-probabilities of the sampler's steps, and entropies, both in nats per dimension of a sample."""

    sampling: DiffusionSamplingConfig
    compares: Sequence[Other] = ()

    @property
    def guided(self) -> bool:
        return self.sampling.guidance_scale > 1

    def points(self, rows: StepRows) -> Points:
        t = torch.cat([tensors[SIGMAS][tensors[STEPS].long()] for tensors in rows.samples])
        return Points(rows.flat(BEFORE), t)

    def outputs(
        self,
        rows: StepRows,
        points: Points,
        velocity: torch.Tensor,
        others: Mapping[Other, torch.Tensor],  # noqa: ARG002
    ) -> tuple[torch.Tensor, ...]:
        if not rows.samples:
            nothing = velocity.flatten(1).mean(1)
            return nothing, torch.zeros_like(nothing)
        logprobs, entropies, at = list[torch.Tensor](), list[torch.Tensor](), 0
        for tensors, count in zip(rows.samples, rows.counts, strict=True):
            sigmas, steps = tensors[SIGMAS].tolist(), tensors[STEPS].tolist()
            for place in range(count):
                one = slice(at + place, at + place + 1)
                step = self._step(velocity[one], points.x[one], sigmas, steps[place])
                logprobs.append(step.logprob(tensors[AFTER][place : place + 1]))
                entropy = 0.5 * math.log(2 * math.pi * math.e * step.std**2) if step.std else 0.0
                entropies.append(torch.full_like(logprobs[-1], entropy))
            at += count
        return torch.cat(logprobs), torch.cat(entropies)

    def _step(self, velocity: torch.Tensor, x: torch.Tensor, sigmas: list[float], at: int) -> Step:
        return SOLVERS[self.sampling.solver](velocity, x, sigmas, at, self.sampling.noise_level)


@dataclass(frozen=True)
class MatchTask:
    """Outputs are the losses of flow matching, negative, in the place of log-probabilities, and zeros in that of entropies.

    So the objective of supervised fine-tuning, the mean of negative log-probabilities, is the loss.

    Attributes:
        levels: [L], as of `draw_levels`.
    """

    levels: torch.Tensor
    settings: DiffusersConfig
    compares: Sequence[Other] = ()
    guided: bool = False

    def points(self, rows: StepRows) -> Points:
        clean, noises, levels = torch.stack([tensors[CLEAN] for tensors in rows.samples]), [], []
        for tensors in rows.samples:
            generator = torch.Generator().manual_seed(int(tensors[NOISE_SEED]))
            of = self.settings
            levels.append(draw_levels(self.levels, of.weighting_scheme, 1, of.logit_mean, of.logit_std, generator))
            noises.append(torch.randn(tensors[CLEAN].shape, generator=generator))
        noise, t = torch.stack(noises).to(clean), torch.cat(levels).to(clean)
        return Points(noised(clean, noise, t), t, noise - clean)

    def outputs(
        self,
        rows: StepRows,  # noqa: ARG002
        points: Points,
        velocity: torch.Tensor,
        others: Mapping[Other, torch.Tensor],  # noqa: ARG002
    ) -> tuple[torch.Tensor, ...]:
        target = torch.zeros_like(velocity) if points.target is None else points.target
        losses = flow_matching_loss(velocity, target, points.t, self.settings.weighting_scheme)
        return -losses, torch.zeros_like(losses)


def task_of(trainer: TrainerConfig, source: PipelineSource) -> Task:
    """Return what the configuration trains, of a pipeline."""
    diffusers = trainer.policy.diffusers
    if trainer.offline:
        return MatchTask(source.noise_levels(), diffusers)
    if trains_by_nft(trainer):
        return NftTask(diffusers.nft_beta, trainer.algorithm.use_kl_loss)
    return StepTask(diffusers.sample)


def _noise(tensors: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
    """Return noise for `count` steps of a sample, [count, ...]: the same wherever it is trained."""
    clean = tensors[CLEAN]
    generator = torch.Generator().manual_seed(int(tensors[NOISE_SEED]))
    return torch.randn((count, *clean.shape), generator=generator).to(clean)
