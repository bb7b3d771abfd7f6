"""An engine in the worker's own process, on a model of transformers: for trying, for tests, for machines without vLLM and models that it does not know."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hpcrl.data.vision.reader import SeenImage
from hpcrl.data.weight_files import Probe, PublishedWeights
from hpcrl.engines.embedded.batch import DecodingRequest
from hpcrl.engines.embedded.blocks import all_logits, computes_in_blocks
from hpcrl.engines.embedded.compute import Compute
from hpcrl.engines.embedded.model import replace_weights
from hpcrl.engines.embedded.sampling import Sampling
from hpcrl.errors import RefusedRequestError
from hpcrl.rollout.engines.base import Generation, Heard
from hpcrl.rollout.engines.in_process import SLEEP, UPDATE, InProcessEngine
from hpcrl.rollout.engines.tensors import read_tensors, replace_adapter
from hpcrl.rollout.engines.weight_check import check_probe, check_ranks, difference, tolerance
from hpcrl.rollout.limiter import Load
from hpcrl.rollout.threads import Notices
from hpcrl.runtime.threads import in_thread
from hpcrl.trainer.models.packed.blocks import compute_in_blocks


class EmbeddedEngine(InProcessEngine):
    """The engine.

    Args:
        model: only ever touched between two tokens.
        keep_cache: whether running requests keep their key-value caches over an update (generator.inference_engine.keep_cache_on_update).
        replica: name in errors.
    """

    def __init__(
        self, model: PreTrainedModel, compute: Compute, *, keep_cache: bool = False, replica: str = ""
    ) -> None:
        super().__init__(replica)
        self._model, self._compute, self._keep_cache = model, compute, keep_cache
        self._named: dict[str, tuple[DecodingRequest, set[int]]] = {}
        self._notices = Notices()
        self._device = model.device
        self._vocabulary = cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]
        self.version = compute.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        n_samples: int,
        seed: int | None,
        sampling: Mapping[str, Any],
        name: str | None = None,
        heard: Heard | None = None,
        images: Sequence[SeenImage] = (),
    ) -> list[Generation]:
        asked = Sampling.of({name: value for name, value in sampling.items() if name != "seed"}, self._vocabulary)
        room = self._compute.limits.length
        if not 0 < len(prompt_ids) < room:
            raise RefusedRequestError(
                f"{self._who} refuses a prompt of {len(prompt_ids)} tokens: with a response it has room for {room}"
            )
        if max(prompt_ids) >= self._vocabulary or min(prompt_ids) < 0:
            raise RefusedRequestError(
                f"{self._who} refuses a prompt with a token id that is not below {self._vocabulary}"
            )
        first = secrets.randbits(31) if seed is None else seed
        seeds = [first + number for number in range(1 if asked.greedy else n_samples)]
        await self._until_awake()
        with self._asked("generate"):
            request = self._compute.generate(list(prompt_ids), seeds, asked, heard and _in_loop(heard), images)
            if name is not None:
                self._named[name] = request, set()
            try:
                said = await self._responses(request)
            except asyncio.CancelledError:
                request.abandoned = True
                raise
            finally:
                if name is not None:
                    del self._named[name]
        return said * n_samples if asked.greedy else said

    async def _responses(self, request: DecodingRequest) -> list[Generation]:
        loop = asyncio.get_running_loop()
        known = loop.create_future()
        request.responses.add_done_callback(lambda _: self._notices.set(loop, known))
        await known
        return request.responses.result()

    async def top_tokens(self, token_ids: Sequence[int], count: int) -> list[list[int]]:
        await self._until_awake()
        with self._asked("top_tokens"):
            return await asyncio.wrap_future(
                self._compute.between_tokens(lambda: self._logits(token_ids).topk(count, -1).indices.tolist())
            )

    async def ended(self) -> dict[str, dict[int, Generation]]:
        found = dict[str, dict[int, Generation]]()
        for name, (request, told) in self._named.items():
            found[name] = {number: said for number, said in list(request.ended.items()) if number not in told}
            told.update(found[name])
        return found

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        def take() -> dict[str, float]:
            started = time.monotonic()
            woke = self._wake() if self.asleep else {}
            loading = time.monotonic()
            replace = replace_adapter if weights.adapter else replace_weights
            replace(self._model, tensors, weights.path)
            if computes_in_blocks(self._model):
                compute_in_blocks(self._model)  # the layers of a first adapter too
            loaded = time.monotonic()
            self._compute.version = weights.version
            if woke or not self._keep_cache:
                self._compute.recompute()
            self._compute.resting = False
            pause, load = time.monotonic() - started, loaded - loading
            return {"weights/pause_seconds": pause, "weights/load_seconds": load, **woke}

        with self._asked(UPDATE):
            tensors, proof = await in_thread(read_tensors, weights)
            check_ranks([proof], weights, self._who)
            metrics = await asyncio.wrap_future(self._compute.between_tokens(take))
        self.version = weights.version
        self._awake.set()
        return metrics

    async def sleep(self) -> None:
        def rest() -> None:
            self._compute.resting = True
            self._compute.drop_caches()
            cast(Any, self._model).to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        self._awake.clear()
        with self._asked(SLEEP):
            await asyncio.wrap_future(self._compute.between_tokens(rest))

    def _wake(self) -> dict[str, float]:
        started = time.monotonic()
        cast(Any, self._model).to(self._device)
        return {"weights/wake_seconds": time.monotonic() - started}

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        probe = weights.probe
        if probe is None:
            return None
        with self._asked("probe"):
            said = await asyncio.wrap_future(self._compute.between_tokens(lambda: self._logprobs(probe)))
        found = difference(probe.logprobs, said)
        check_probe(found, tolerance(probe, dtype, allowed), weights.version, self._who)
        return found

    @torch.inference_mode()
    def _logprobs(self, probe: Probe) -> list[float]:
        labels_T = torch.tensor(probe.token_ids[1:], device=self._model.device)
        return torch.log_softmax(self._logits(probe.token_ids), -1).gather(1, labels_T[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def _logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of each token but the first, [T - 1, V] float32."""
        tokens = torch.tensor([list(token_ids)], device=self._model.device)
        if computes_in_blocks(self._model):
            return all_logits(self._model, tokens)[0, :-1].float()
        return self._model(input_ids=tokens, use_cache=False).logits[0, :-1].float()

    async def tokens(self) -> float | None:
        return float(self._compute.tokens)

    async def load(self) -> Load | None:
        return Load(self._compute.usage, float(self._compute.waiting), 0.0)

    async def healthy(self) -> bool:
        return self._compute.failure is None

    async def close(self) -> None:
        pass


def _in_loop(heard: Heard) -> Heard:
    loop = asyncio.get_running_loop()

    def tell(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(heard, token_ids, logprobs)

    return tell
