"""An engine in the worker's own process, on a pipeline of diffusers.

One thread computes: samples, one group after the other, and new weights in between. The tokens of a response are its trained denoising steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from hpcrl.data.pipelines.probe import probe_velocity
from hpcrl.data.pipelines.source import EVALUATION, PipelineSource
from hpcrl.data.vision.reader import SeenImage
from hpcrl.data.weight_files import ADAPTER_PREFIX, PublishedWeights
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Generation, Heard
from hpcrl.rollout.engines.diffusion.sampler import Painted, Sampler
from hpcrl.rollout.engines.embedded.model import read_tensors, replace_adapter
from hpcrl.rollout.engines.in_process import SLEEP, UPDATE, InProcessEngine
from hpcrl.rollout.engines.proof import check_probe, check_ranks, difference, tolerance
from hpcrl.rollout.limiter import Load
from hpcrl.types import Kind

R = TypeVar("R")
_EVALUATION = f"{ADAPTER_PREFIX}{EVALUATION}"


class DiffusionEngine(InProcessEngine):
    """The engine.

    Args:
        at_once: samples that are made together at most.
        replica: name in errors.
    """

    def __init__(
        self, sampler: Sampler, source: PipelineSource, at_once: int, *, version: int = 0, replica: str = ""
    ) -> None:
        super().__init__(replica)
        self._sampler, self._source, self._at_once, self.version = sampler, source, at_once, version
        self._thread = ThreadPoolExecutor(1, "engine")
        self._values: dict[Kind, dict[str, torch.Tensor]] = {}
        self._holds: Kind = "train"
        self._home = next(sampler.transformer.parameters()).device

    async def _computed(self, function: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._thread.submit(function))

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

    async def ended(self) -> dict[str, dict[int, Generation]]:
        return {}  # samples of a call are made together

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        tensors, proof = await self._computed(lambda: read_tensors(weights))
        check_ranks([proof], weights, self._who)
        sampled = {name: tensor for name, tensor in tensors.items() if not name.startswith(_EVALUATION)}
        others = {
            ADAPTER_PREFIX + name.removeprefix(_EVALUATION): tensor
            for name, tensor in tensors.items()
            if name.startswith(_EVALUATION)
        }

        def take() -> dict[str, float]:
            started = time.monotonic()
            self._sampler.to(self._home)
            if weights.adapter:
                replace_adapter(self._sampler.transformer, sampled, weights.path)
                self._values = {"train": sampled, "eval": others} if others else {}
            else:
                _replace_weights(self._sampler.transformer, sampled, weights)
            self._holds, self.version = "train", weights.version
            seconds = time.monotonic() - started
            return {"weights/pause_seconds": seconds, "weights/load_seconds": seconds}

        with self._asked(UPDATE):
            return await self._computed(take)

    def _hold(self, kind: Kind) -> None:
        """Have the weights that samples of a kind are made with."""
        if self._values and kind != self._holds:
            replace_adapter(self._sampler.transformer, self._values[kind], self._source.folder)
        self._holds = kind

    async def sleep(self) -> None:
        def rest() -> None:
            self._sampler.to(torch.device("cpu"))
            if self._home.type == "cuda":
                torch.cuda.empty_cache()

        with self._asked(SLEEP):
            await self._computed(rest)

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        probe = weights.probe
        if probe is None:
            return None
        shape = self._source.latent_shape(self._source.settings.train_frames)
        idle = self._source.kind.idle_conditions(self._source.transformer)

        @torch.inference_mode()
        def said() -> list[float]:
            self._hold("train")
            return probe_velocity(self._sampler.velocity, shape, idle, probe.token_ids)

        with self._asked("probe"):
            found = difference(probe, await self._computed(said))
        check_probe(found, tolerance(probe, dtype, allowed), weights.version, self._who)
        return found

    async def tokens(self) -> float | None:
        return float(self._sampler.steps)

    async def load(self) -> Load | None:
        return Load(0.0, 0.0, 0.0)

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@torch.inference_mode()
def _replace_weights(
    transformer: torch.nn.Module, tensors: Mapping[str, torch.Tensor], weights: PublishedWeights
) -> None:
    own = transformer.state_dict(keep_vars=True)
    if wrong := sorted(own.keys() ^ tensors.keys()):
        raise EngineError(f"{weights.path} has other weights than the transformer, by {', '.join(wrong[:8])}")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
