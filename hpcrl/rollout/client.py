"""Talks to one vLLM server over its unix socket: tokens in, tokens and logprobs out, and new weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hpcrl.errors import EngineError
from hpcrl.types import StopReason

_GREEDY = 1e-5  # vLLM samples greedily at temperatures below


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        token_ids: generated tokens, the end-of-sequence token included where it was sampled.
        logprobs: of each token under the distribution it was sampled from.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason


class EngineClient:
    """Client of one engine.

    Args:
        socket: unix socket of the server.
        headers: sent with every request; they carry the token.

    Attributes:
        version: policy version of the weights that the engine holds.
    """

    def __init__(self, socket: Path, headers: Mapping[str, str], version: int = 0) -> None:
        # the server closes a connection that was idle for 5 s; one that is reused at that moment would break a request
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
        # a generation may take any time; whoever watches the server's process ends the wait when it dies
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://engine", headers=dict(headers), timeout=None
        )
        self.version = version

    async def generate(
        self, prompt_ids: Sequence[int], n_samples: int, seed: int | None, sampling: Mapping[str, Any]
    ) -> list[Generation]:
        """Return `n_samples` responses to one prompt; sample i depends on the weights, the prompt, `sampling` and seed + i.

        Args:
            sampling: fields of vLLM's SamplingParams.

        Raises:
            EngineError: the engine refused the request or failed.
        """
        greedy = sampling.get("temperature", 1.0) < _GREEDY  # the engine refuses to repeat itself
        asked = 1 if greedy else n_samples
        params = {**sampling, "n": asked, "seed": seed, "logprobs": 0, "detokenize": bool(sampling.get("stop"))}
        answer = await self._call(
            "POST", "/inference/v1/generate", json={"token_ids": list(prompt_ids), "sampling_params": params}
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert len(choices) == asked, f"asked for {asked} samples, got {len(choices)}"
        said = [
            Generation(
                token_ids=choice["token_ids"],
                logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                stop_reason=choice["finish_reason"],
            )
            for choice in choices
        ]
        return said * n_samples if greedy else said

    async def update_weights(self, directory: Path, version: int) -> float:
        """Load the safetensors files of a local directory as policy `version`; return the seconds that generation paused.

        Running requests go on with the new weights. Their key-value caches are dropped and computed again, as is the prefix
        cache, so that each token's logprob belongs to exactly one version.

        Raises:
            EngineError: the engine could not load them. It is unusable then.
        """
        started = time.monotonic()
        await self._call("POST", "/pause", params={"mode": "keep"})
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", json={"update_info": {"path": str(directory), "version": version}})
        await self._call("POST", "/finish_weight_update", json={"weight_version": str(version)})
        self.version = version
        await self.reset_cache()
        await self._call("POST", "/resume")
        return time.monotonic() - started

    async def reset_cache(self) -> None:
        """Drop the prefix cache and the caches of running requests, which are computed again."""
        answer = await self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not answer["success"]:
            raise EngineError("the engine could not reset its prefix cache, so it might serve old weights")

    async def weight_version(self) -> str:
        """Return the version that the engine says it holds; "default" before the first update."""
        return (await self._call("GET", "/weight_info"))["weight_version"]

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise EngineError(f"the inference engine does not answer {path}: {error!r}") from error
        if answer.status_code != 200:
            raise EngineError(f"the inference engine refused {path} ({answer.status_code}): {answer.text}")
        return answer.json()
