"""Talks to one vLLM server, as a rule over its unix socket: tokens in, tokens and logprobs out, and new weights."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from hpcrl.data.vision.reader import SeenImage
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.engines.vllm.address import Address
from hpcrl.engines.vllm.answers import Running, chosen_logprobs, generation_of, most_probable
from hpcrl.engines.vllm.images import features
from hpcrl.engines.vllm.middleware import CORES, ENDED, PATH
from hpcrl.errors import EngineError, RefusedRequestError
from hpcrl.rollout.engines.base import Drafts, Engine, Generation, Heard, leaves_out
from hpcrl.rollout.engines.weight_check import check_decoding, check_probe, check_ranks, difference, tolerance
from hpcrl.rollout.limiter import Load
from hpcrl.runtime.gpu_memory import describe_memory
from hpcrl.runtime.threads import in_thread

log = logging.getLogger(__name__)

_TOKENS = "vllm:generation_tokens_total"
_USAGE, _QUEUED = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"
_PREEMPTED = "vllm:num_preemptions_total"
_DRAFTS = tuple(f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
_PROOF, _ADAPTER_PROOF = "weight_proof", "adapter_proof"  # of vLLM's workers (weight_engine.WeightProof)
_ADD_ADAPTER, _DROP_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_GENERATE = "/inference/v1/generate"
_REFUSES = (400, 413, 422)  # a request to generate
_FAILS = (500, 501)  # at a request to generate; an engine that has died answers 500 too
_SLEEP, _WAKE = "/sleep", "/wake_up"
_LOADING = ("/start_weight_update", "/update_weights", "/finish_weight_update", _ADD_ADAPTER, _SLEEP, _WAKE)
_NAMED = "generate-tokens-"  # what vLLM puts before a request's id
_JSON = {"content-type": "application/json"}
_AT_ONCE = aiohttp.ClientTimeout(total=5.0)  # of routes that the server answers without the engine
_BUFFER = 2**26  # bytes of an answer that may wait to be read; twice as long may be one event of a stream
_DECODED = 8  # tokens of the check of decoding, and of its prompt
_GREEDY = 1e-5  # vLLM samples greedily at temperatures below


def _as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _name(version: int) -> str:
    return f"v{version}"


class EngineClient(Engine):
    """Client of one engine.

    Args:
        address: of the server, or its unix socket.
        headers: sent with every request; they carry the token.
        keep_cache: whether running requests keep their key-value caches over an update (generator.inference_engine.keep_cache_on_update).
        replica: name in errors.
        sleep_level: vLLM's: 1 keeps the weights in host memory while the engine sleeps, 2 forgets them, as all of them come with the next version.
        share: of a GPU's memory that it has when it is awake, for errors.
        graphs: whether it decodes by CUDA graphs, or by other code than it prefills with.
        adapters: whether it loads versions as adapters, and serves several.
    """

    def __init__(
        self,
        address: Address | Path,
        headers: Mapping[str, str],
        version: int = 0,
        *,
        replica: str = "",
        keep_cache: bool = False,
        sleep_level: int = 2,
        share: float = 1.0,
        graphs: bool = True,
        adapters: bool = False,
    ) -> None:
        super().__init__()
        self._who = f"the inference engine of {replica}" if replica else "the inference engine"
        address = Address(socket=address) if isinstance(address, Path) else address
        self._url = address.url
        self._http = aiohttp.ClientSession(
            connector=address.connector(),
            headers=headers,
            # a generation may take any time; the watchdog ends the wait when the server dies or hangs
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_BUFFER,
        )
        self.version, self._keep_cache = version, keep_cache
        self._sleep_level, self._share = sleep_level, share
        self._updates, self._dropped, self._shows = 0, 0, False
        self._unchecked = graphs
        self.answered = 0
        self._waiting: Counter[str] = Counter()
        self._running: dict[str, Running] = {}
        self.serves_versions, self._whole = adapters, version
        self._adapters: dict[int, int] = {}  # versions that the engine has as adapters, and vLLM's numbers of them
        self._loads = asyncio.Lock()

    @property
    def waiting(self) -> list[str]:
        return sorted(+self._waiting)

    @property
    def loading(self) -> bool:
        return any(self._waiting[path] for path in _LOADING)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        n_samples: int,
        seed: int | None,
        sampling: Mapping[str, Any],
        name: str | None = None,
        heard: Heard | None = None,
        images: Sequence[SeenImage] = (),
        *,
        version: int | None = None,
    ) -> list[Generation]:
        await self._until_awake()
        version = self.version if version is None else version
        greedy = sampling.get("temperature", 1.0) < _GREEDY  # the engine refuses to repeat itself
        asked = 1 if greedy else n_samples
        params = {"logprobs": 0, **sampling, "n": asked, "seed": seed, "detokenize": bool(sampling.get("stop"))}
        told, masked = params["logprobs"], leaves_out(params)
        if told and not masked:  # the sampled one may take the place of the last
            params["logprobs"] = told + 1
        request_id = uuid.uuid4().hex
        request = {"request_id": request_id, "token_ids": list(prompt_ids), "sampling_params": params}
        request |= self._adapter(version)
        salt = _name(version) if self._keep_cache else ""
        if salt:  # caches of older weights are there too, which no request that begins now may find
            request["cache_salt"] = salt
        running = self._running[_NAMED + request_id] = Running(
            name, told > 0 and masked, 0 if masked else told, version, len(prompt_ids)
        )
        try:
            if images:
                self._shows = True
                request["features"] = await in_thread(features, prompt_ids, images, salt)
            choices = await (self._listen(request, running, heard) if heard else self._choices(request))
        finally:
            del self._running[_NAMED + request_id]
        choices = sorted(choices, key=lambda choice: choice["index"])
        assert len(choices) == asked, f"asked for {asked} samples, got {len(choices)}"
        said = [generation_of(choice, running) for choice in choices]
        return said * n_samples if greedy else said

    def of_version(self, version: int) -> Callable[..., Awaitable[list[Generation]]]:
        return partial(self.generate, version=version)

    def holds(self, version: int) -> bool:
        return version in (self._whole, *self._adapters)

    async def _choices(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        # a photograph makes it megabytes of text, whose writing would keep the event loop for tens of milliseconds
        body = await in_thread(_as_json, request) if "features" in request else _as_json(request)
        return (await self._call("POST", _GENERATE, data=io.BytesIO(body), headers=_JSON))["choices"]

    async def _listen(self, request: dict[str, Any], running: Running, heard: Heard) -> list[dict[str, Any]]:
        """Return the only choice of a request, whose tokens are heard as they come."""
        content, whole = list[dict[str, Any]](), {"index": 0, "token_ids": [], "finish_reason": None}
        async for event in self._events(_GENERATE, {**request, "stream": True}):
            for piece in event["choices"]:
                tokens = piece["logprobs"]["content"]
                heard(piece["token_ids"], chosen_logprobs(tokens, running.masked)[0])
                whole["token_ids"] += piece["token_ids"]
                whole["finish_reason"] = piece["finish_reason"]
                whole["routed_experts"] = piece.get("routed_experts")
                content += tokens
        if whole["finish_reason"] is None:
            raise EngineError(f"the inference engine ended its answer to {_GENERATE} before it was whole")
        return [{**whole, "logprobs": {"content": content}}]

    async def top_tokens(self, token_ids: Sequence[int], count: int) -> list[list[int]]:
        await self._until_awake()
        *before, _ = token_ids  # whose own place is that of the token which is sampled
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count, "logprobs": count, "detokenize": False}
        request = {"token_ids": before, "sampling_params": params, **self._adapter(self.version)}
        answer = await self._call("POST", _GENERATE, json=request)
        found = list[list[int]]()
        for place in answer["prompt_logprobs"][1:]:
            ordered = sorted(place, key=lambda token: -place[token]["logprob"])
            found.append([int(token) for token in ordered[:count]])
        (token,) = answer["choices"][0]["logprobs"]["content"]
        return [*found, most_probable(token["top_logprobs"], count)]

    async def ended(self) -> dict[str, dict[int, Generation]]:
        found = dict[str, dict[int, Generation]]()
        for request_id, choices in json.loads(await self._asked_at_once(ENDED)).items():
            running = self._running.get(request_id)
            if running and running.name is not None:
                found[running.name] = {choice["index"]: generation_of(choice, running) for choice in choices}
        return found

    def _adapter(self, version: int) -> dict[str, str]:
        """Return the field of a request that names the adapter of a version, if it is one."""
        return {"model": _name(version)} if version in self._adapters else {}

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        if weights.adapter:
            return await self._load_adapter(weights, newest=True)
        version = weights.version
        started = time.monotonic()
        woke = await self._wake("weights")
        # vLLM's own route sleeps 20 ms behind it, until the last outputs are there: they are when tokens are counted below
        await self._on_each_core("pause_scheduler", "keep", False)
        loading = time.monotonic()
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", json={"update_info": {"path": str(weights.path)}})
        await self._call("POST", "/finish_weight_update", json={"weight_version": str(version)})
        loaded = time.monotonic() - loading
        counts = await self._call("GET", PATH)
        for name, running in self._running.items():
            had = {int(index): count for index, count in counts.get(name, {}).items()}
            running.changes.append((version, had))
        woke += await self._wake("kv_cache")  # with which an engine that slept goes on
        if (held := await self.weight_version()) != str(version):
            raise EngineError(f"{self._who} was given the weights of version {version} and reports version {held!r}")
        check_ranks(await self._proofs(_PROOF), weights, self._who)
        self.version = self._whole = version
        self._updates += 1
        if self.asleep or not self._keep_cache:
            self._dropped = sum(map(len, counts.values()))
        if not self.asleep and not self._keep_cache:  # sleep has emptied the caches
            await self.reset_cache()
        await self._call("POST", "/resume")
        return {
            "weights/pause_seconds": time.monotonic() - started,
            "weights/load_seconds": loaded,
            **self._woken(woke),
        }

    async def sleep(self) -> None:
        self._awake.clear()
        # "keep" preempts running requests, whose prefixes are computed again; "abort", vLLM's default, would end them
        await self._call("POST", _SLEEP, params={"level": str(self._sleep_level), "mode": "keep"})

    async def _wake(self, part: str) -> float:
        """Bring one of vLLM's two kinds of memory back, where the engine sleeps; return the seconds that it took."""
        if not self.asleep:
            return 0.0
        started = time.monotonic()
        try:
            await self._call("POST", _WAKE, params={"tags": part})
        except EngineError as error:
            found = await in_thread(describe_memory)
            raise EngineError(
                f"{self._who} does not wake (its {part}); it wants {self._share:.0%} of each of its GPUs "
                f"(generator.inference_engine.gpu_memory_utilization){found}: {error}"
            ) from error
        return time.monotonic() - started

    def _woken(self, seconds: float) -> dict[str, float]:
        woke = self.asleep
        self._awake.set()
        return {"weights/wake_seconds": seconds} if woke else {}

    async def add_version(self, weights: PublishedWeights) -> None:
        await self._until_awake()
        await self._load_adapter(weights)

    async def _load_adapter(self, weights: PublishedWeights, *, newest: bool = False) -> dict[str, float]:
        """Load a version beside the present ones: running requests keep the adapter that they began with."""
        async with self._loads:  # vLLM's number of an adapter is the highest
            started, version = time.monotonic(), weights.version
            woke = await self._wake("weights") + await self._wake("kv_cache")
            if version not in self._adapters:  # a running request may have kept it
                added = {"lora_name": _name(version), "lora_path": str(weights.path)}
                await self._call("POST", _ADD_ADAPTER, json=added)
                self._adapters[version] = max((await self._on_each_rank("list_loras"))[0][0])
            loaded, number = time.monotonic() - started - woke, self._adapters[version]
            check_ranks(await self._proofs(_ADAPTER_PROOF, str(weights.path), number), weights, self._who)
            if newest:  # before others go: requests that begin meanwhile ask for it
                self.version = version
            await self._drop_adapters({version, self.version, *self.evaluated()})
            self._updates += 1
        return {"weights/pause_seconds": 0.0, "weights/load_seconds": loaded, **self._woken(woke)}

    async def _drop_adapters(self, kept: set[int]) -> None:
        """Unload the adapters of other versions that no running request uses."""
        used = kept.union(running.version for running in self._running.values())
        for version in self._adapters.keys() - used:
            await self._call("POST", _DROP_ADAPTER, json={"lora_name": _name(version)})
            await self._on_each_rank("remove_lora", self._adapters.pop(version))

    async def _proofs(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Return the weight proof of each rank; the ranks of all copies of the weights are numbered consecutively."""
        cores = await self._on_each_rank(method, *args)
        return [
            {**proof, "rank": copy * proof["of"] + proof["rank"], "of": len(cores) * proof["of"]}
            for copy, proofs in enumerate(cores)
            for proof in proofs
        ]

    async def _on_each_rank(self, method: str, *args: Any) -> list[list[Any]]:
        return await self._on_each_core("collective_rpc", method, None, args, {})

    async def _on_each_core(self, method: str, *args: Any) -> list[Any]:
        return (await self._call("POST", CORES, json={"method": method, "args": args}))["results"]

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        if weights.probe is None:
            return None
        limit = tolerance(weights.probe, dtype, allowed)
        computed, _ = await self._computed(weights.probe.token_ids, weights.version)
        found = difference(weights.probe.logprobs, computed)
        check_probe(found, limit, weights.version, self._who)
        if self._unchecked:
            await self._check_decoding(weights.probe.token_ids[:_DECODED], weights.version, limit)
        return found

    async def _check_decoding(self, prompt: list[int], version: int, limit: float) -> None:
        """Compare tokens that the engine decodes with a prefill of the same: CUDA graphs of decoding might hold tensors of earlier weights."""
        _, (choice,) = await self._computed(prompt, version, _DECODED)
        tokens = choice["token_ids"]
        decoded = chosen_logprobs(choice["logprobs"]["content"], masked=False)[0]
        prefilled, _ = await self._computed([*prompt, *tokens], version)
        found = difference(decoded, prefilled[-len(tokens) :])
        check_decoding(found, limit, version, self._who)
        log.info("log-probabilities of %d decoded tokens differ by %.2g from those of a prefill", len(tokens), found)
        self._unchecked = False

    async def _computed(
        self, token_ids: list[int], version: int, decoded: int = 1
    ) -> tuple[list[float], list[dict[str, Any]]]:
        """Return the log-probabilities of all tokens but the first, and the answer's choices, of so many decoded tokens."""
        sampling = {"max_tokens": decoded, "temperature": 1.0, "seed": 0, "ignore_eos": True, "logprobs": 0}
        params = {**sampling, "prompt_logprobs": 0, "detokenize": False}
        request = {"token_ids": token_ids, "sampling_params": params, **self._adapter(version)}
        try:
            answer = await self._call("POST", _GENERATE, json=request)
        except RefusedRequestError as error:  # of this client itself
            raise EngineError(str(error)) from error
        places = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return [(place or {})[str(token)]["logprob"] for token, place in places], answer["choices"]

    async def reset_cache(self) -> None:
        """Drop the prefix cache and the caches of running requests, which are computed again, images included."""
        if not all(await self._on_each_core("reset_prefix_cache", True)):  # running requests included
            raise EngineError("the engine could not reset its prefix cache, so it might serve old weights")
        if self._shows:  # what the tower of older weights made of images
            await self._on_each_core("reset_encoder_cache")

    async def weight_version(self) -> str:
        """Return the version that the engine reports; "default" before the first update."""
        return (await self._call("GET", "/weight_info"))["weight_version"]

    async def tokens(self) -> float | None:
        found = await self._metrics(_TOKENS)
        return sum(found[_TOKENS]) if _TOKENS in found else None

    async def load(self) -> Load | None:
        found = await self._metrics(_USAGE, _QUEUED, _PREEMPTED, *_DRAFTS)
        if _DRAFTS[0] in found:
            self.drafts = Drafts(*(sum(found[name]) for name in _DRAFTS))
        if len(found.keys() - set(_DRAFTS)) < 3:
            return None
        fullest = max(found[_USAGE])  # each copy of the weights has a cache of its own
        return Load(fullest, sum(found[_QUEUED]), sum(found[_PREEMPTED]), self._updates, self._dropped)

    async def _metrics(self, *names: str) -> dict[str, list[float]]:
        """Return those of some metrics that the engine shows, each with its values for all labels."""
        lines = (await self._asked_at_once("/metrics")).decode().splitlines()
        found = defaultdict[str, list[float]](list)
        for line in lines:
            name = line.partition("{")[0].partition(" ")[0]
            if name in names:
                found[name].append(float(line.rpartition(" ")[2]))
        return found

    async def _asked_at_once(self, path: str) -> bytes:
        async with self._sent("GET", path, timeout=_AT_ONCE) as answer:
            return await answer.read()

    async def healthy(self) -> bool:
        try:
            async with self._sent("GET", "/health", timeout=_AT_ONCE) as answer:
                return answer.status == 200
        except EngineError:
            return False

    async def close(self) -> None:
        await self._http.close()

    async def prompt_logprobs(self, token_ids: Sequence[int], top_k: int) -> list[dict[str, Any] | None]:
        """Return for each token its log-probability, and those of the `top_k` most probable tokens at its position.

        Each has token id as a text -> {logprob, rank}, at temperature 1 and over the whole vocabulary. The first token has None.
        """
        params = {"prompt_logprobs": top_k, "max_tokens": 1, "detokenize": False}
        request = {"request_id": uuid.uuid4().hex, "token_ids": list(token_ids), "sampling_params": params}
        answer = await self._call("POST", _GENERATE, json=request)
        return answer["prompt_logprobs"]

    @asynccontextmanager
    async def _sent(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            # what a redirect names is another server, which must not get the key
            async with self._http.request(method, self._url + path, allow_redirects=False, **request) as answer:
                yield answer
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise EngineError(f"the inference engine does not answer {path}: {error!r}") from error

    @asynccontextmanager
    async def _asked(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Have the answer to a request that may take its time; the engine counts as waited for."""
        self._waiting[path] += 1
        self.changed()
        try:
            async with self._sent(method, path, **request) as answer:
                if answer.status != 200:
                    said = await answer.text(errors="replace")
                    raise await self._refusal(path, answer.status, said)
                yield answer
        finally:
            self._waiting[path] -= 1
            self.answered += 1
            self.changed()

    async def _refusal(self, path: str, status: int, said: str) -> EngineError | RefusedRequestError:
        """Return the error of a request, by who is at fault: the request where the engine refuses to generate for it and is well."""
        message = f"the inference engine refused {path} ({status}): {said}"
        refused = status in _REFUSES or (status in _FAILS and await self.healthy())
        return RefusedRequestError(message) if path == _GENERATE and refused else EngineError(message)

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        async with self._asked(method, path, **request) as answer:
            content = await answer.read()
            return json.loads(content) if answer.content_type == "application/json" else {}

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._asked("POST", path, json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if error := event.get("error"):
                    raise await self._refusal(path, error.get("code", 500), str(error.get("message", error)))
                yield event
