"""An engine in the worker's own process, on PI0.5: chunks of actions in the place of tokens.

Waiting requests of one kind are computed in one batch when the thread is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcrl.config import Config
from hpcrl.data.vision.reader import SeenImage
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import EngineError
from hpcrl.families.pi05.architecture import Pi05Architecture, own_name
from hpcrl.families.pi05.sampler import ActionSampler, Ask, Chunk
from hpcrl.families.pi05.samples import PATH
from hpcrl.rollout.engines.base import Engine, Generation, Heard
from hpcrl.rollout.engines.in_process import InProcess
from hpcrl.rollout.engines.tensors import replace_adapter
from hpcrl.rollout.engines.worker_thread import WorkerThreadEngine, replace_whole


class ActionEngine(WorkerThreadEngine):
    """The engine.

    Args:
        at_once: chunks that are made together at most.
        replica: name in errors.
    """

    def __init__(self, sampler: ActionSampler, at_once: int, *, version: int = 0, replica: str = "") -> None:
        super().__init__(version, replica, next(sampler.network.parameters()).device)
        self._sampler, self._at_once = sampler, at_once
        self._queue: list[tuple[Ask, asyncio.Future[tuple[Chunk, int]]]] = []
        self._working: asyncio.Task[None] | None = None

    @property
    def architecture(self) -> Pi05Architecture:
        """Sizes of the network."""
        return self._sampler.network.architecture

    @property
    def vocabulary(self) -> int:
        """How many tokens texts have."""
        return int(self.architecture.vlm.text_config.vocab_size)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        n_samples: int,
        seed: int | None,
        sampling: Mapping[str, Any],
        name: str | None = None,  # noqa: ARG002
        heard: Heard | None = None,  # noqa: ARG002
        images: Sequence[SeenImage] = (),  # noqa: ARG002
    ) -> list[Generation]:
        """Return `n_samples` chunks of actions.

        Args:
            prompt_ids: the text of a turn.
            sampling: "kind", train or eval; "images", as cameras show them, [C, size, size, 3] uint8, or None; "action_size", how many numbers the robot has.
        """
        shown = sampling["images"], sampling["action_size"]
        asks = [Ask(prompt_ids, *shown, (seed or 0) + number, sampling["kind"]) for number in range(n_samples)]
        with self._asked("generate"):
            made = await asyncio.gather(*(self._act(ask) for ask in asks))
        return [
            Generation(
                token_ids=[self.vocabulary + place for place in range(len(chunk.logprobs))],
                logprobs=chunk.logprobs.tolist(),
                stop_reason="stop",
                versions=[version] * len(chunk.logprobs),
                tensors={PATH: chunk.path},
            )
            for chunk, version in made
        ]

    async def _act(self, ask: Ask) -> tuple[Chunk, int]:
        future: asyncio.Future[tuple[Chunk, int]] = asyncio.get_running_loop().create_future()
        self._queue.append((ask, future))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._queue:
            await self._until_awake()
            kind = self._queue[0][0].kind
            waiting, rest = [], []
            for ask, future in self._queue:
                if future.done():  # its group was given up
                    continue
                (waiting if ask.kind == kind and len(waiting) < self._at_once else rest).append((ask, future))
            self._queue = rest
            asks = [ask for ask, _ in waiting]
            try:
                made = await self._computed(lambda asks=asks: [(one, self.version) for one in self._sampler.make(asks)])
            except BaseException as error:  # noqa: BLE001  it is raised again by the waiting call
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), one in zip(waiting, made, strict=True):
                if not future.done():
                    future.set_result(one)

    async def top_tokens(self, token_ids: Sequence[int], count: int) -> list[list[int]]:  # noqa: ARG002
        raise EngineError(f"{self._who} moves robots: an action is not chosen among tokens")

    def _load(self, tensors: dict[str, torch.Tensor], weights: PublishedWeights) -> None:
        if weights.adapter:
            replace_adapter(self._network, tensors, weights.path)
        else:
            replace_whole(self._network, tensors, weights, own_name)

    @property
    def _network(self) -> Any:
        return self._sampler.network

    def _move(self, device: torch.device) -> None:
        self._network.to(device)

    def _probed(self, token_ids: Sequence[int]) -> list[float]:
        return self._sampler.probe(token_ids)

    async def tokens(self) -> float | None:
        return float(self._sampler.actions)


class Actions(InProcess[ActionSampler]):
    """The engine of this process."""

    def __init__(self, config: Config) -> None:
        engine, self._sampling = config.generator.inference_engine, config.vla.pi05
        self._model, self._at_once = config.trainer.policy.model.pretrained, engine.max_num_seqs
        self._device = torch.device("cpu" if config.slurm.gpus == 0 else "cuda")
        self._dtype = getattr(torch, engine.model_dtype)
        super().__init__(f"the model {self._model}")

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        return ActionEngine(self._loaded.result(), self._at_once, version=version, replica=replica)

    def _load(self) -> ActionSampler:
        return ActionSampler(self._model, self._sampling, self._dtype, self._device)
