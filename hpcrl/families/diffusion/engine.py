"""An engine in the worker's own process, on a pipeline of diffusers.

Samples are made one group after the other. The tokens of a response are its trained denoising steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcrl.config import Config
from hpcrl.data.vision.reader import SeenImage
from hpcrl.data.weight_files import ADAPTER_PREFIX, PublishedWeights
from hpcrl.errors import EngineError
from hpcrl.families.diffusion.pipelines.probe import probe_velocity
from hpcrl.families.diffusion.pipelines.source import EVALUATION, PipelineSource
from hpcrl.families.diffusion.sampler import Painted, Sampler
from hpcrl.rollout.engines.base import Engine, Generation, Heard
from hpcrl.rollout.engines.in_process import InProcess
from hpcrl.rollout.engines.tensors import replace_adapter
from hpcrl.rollout.engines.worker_thread import WorkerThreadEngine, replace_whole
from hpcrl.types import Kind

_EVALUATION = f"{ADAPTER_PREFIX}{EVALUATION}"


class DiffusionEngine(WorkerThreadEngine):
    """The engine.

    Args:
        at_once: samples that are made together at most.
        replica: name in errors.
    """

    def __init__(
        self, sampler: Sampler, source: PipelineSource, at_once: int, *, version: int = 0, replica: str = ""
    ) -> None:
        super().__init__(version, replica, next(sampler.transformer.parameters()).device)
        self._sampler, self._source, self._at_once = sampler, source, at_once
        self._values: dict[Kind, dict[str, torch.Tensor]] = {}
        self._holds: Kind = "train"

    @property
    def vocabulary(self) -> int:
        """How many tokens prompts have."""
        return self._sampler.vocabulary

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self._sampler.tokens(prompt)

    async def generate(
        self,
        prompt_ids: Sequence[int],  # noqa: ARG002
        n_samples: int,
        seed: int | None,
        sampling: Mapping[str, Any],
        name: str | None = None,  # noqa: ARG002
        heard: Heard | None = None,  # noqa: ARG002
        images: Sequence[SeenImage] = (),  # noqa: ARG002
    ) -> list[Generation]:
        """Return `n_samples` samples of a prompt.

        Args:
            prompt_ids: only a text has conditions; see `sampling`.
            sampling: "prompt", the text, and "kind", train or eval.
        """
        kind: Kind = sampling["kind"]
        seeds = [(seed or 0) + number for number in range(n_samples)]

        def paint() -> tuple[int, list[Painted]]:
            self._hold(kind)
            return self.version, self._sampler.paint(sampling["prompt"], seeds, kind, self._at_once)

        await self._until_awake()
        with self._asked("generate"):
            version, painted = await self._computed(paint)
        return [
            Generation(
                token_ids=[self.vocabulary + step for step in one.steps],
                logprobs=one.logprobs,
                stop_reason="stop",
                versions=[version] * len(one.steps),
                tensors=one.tensors,
            )
            for one in painted
        ]

    async def top_tokens(self, token_ids: Sequence[int], count: int) -> list[list[int]]:  # noqa: ARG002
        raise EngineError(f"{self._who} makes pictures: a denoising step is not chosen among tokens")

    def _load(self, tensors: dict[str, torch.Tensor], weights: PublishedWeights) -> None:
        sampled = {name: tensor for name, tensor in tensors.items() if not name.startswith(_EVALUATION)}
        others = {
            ADAPTER_PREFIX + name.removeprefix(_EVALUATION): tensor
            for name, tensor in tensors.items()
            if name.startswith(_EVALUATION)
        }
        if weights.adapter:
            replace_adapter(self._sampler.transformer, sampled, weights.path)
            self._values = {"train": sampled, "eval": others} if others else {}
        else:
            replace_whole(self._sampler.transformer, sampled, weights)
        self._holds = "train"

    def _move(self, device: torch.device) -> None:
        self._sampler.to(device)

    def _hold(self, kind: Kind) -> None:
        if self._values and kind != self._holds:
            replace_adapter(self._sampler.transformer, self._values[kind], self._source.folder)
        self._holds = kind

    @torch.inference_mode()
    def _probed(self, token_ids: Sequence[int]) -> list[float]:
        self._hold("train")
        shape = self._source.latent_shape(self._source.settings.train_frames)
        idle = self._source.kind.idle_conditions(self._source.transformer)
        return probe_velocity(self._sampler.velocity, shape, idle, token_ids)

    async def tokens(self) -> float | None:
        return float(self._sampler.steps)


class PipelineEngine(InProcess[Sampler]):
    """The engine of this process.

    Args:
        dtype: of the transformer, such as "bfloat16".
        at_once: samples that are made together at most.
    """

    def __init__(self, source: PipelineSource, dtype: str, at_once: int, *, on_cpu: bool) -> None:
        self._source, self._at_once = source, at_once
        self._dtype, self._device = getattr(torch, dtype), torch.device("cpu" if on_cpu else "cuda")
        super().__init__(f"the pipeline {source.model}")

    @classmethod
    def of(cls, config: Config) -> PipelineEngine:
        engine = config.generator.inference_engine
        source = PipelineSource(config.trainer.policy.model.pretrained, config.trainer.policy.diffusers)
        return cls(source, engine.model_dtype, engine.max_num_seqs, on_cpu=config.slurm.gpus == 0)

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        return DiffusionEngine(self._loaded.result(), self._source, self._at_once, version=version, replica=replica)

    def _load(self) -> Sampler:
        return Sampler(self._source, self._dtype, self._device)
