"""Middleware that puts vLLM's whole HTTP surface behind the run's token, and adds some routes to it.

vLLM's own `--api-key` protects only the paths under /v1; the development routes that change weights or run code on the workers
stay open. This class is given to `--middleware`, sits outside the router, and lets nothing through without the token: known
routes, unknown paths, documentation pages and websockets alike. A server outside of runs (`hpcrl engine`) wants a lease too, beside its key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.rollout.engines.experts import experts_text
from hpcrl.runtime.http_server import ADMITTED, JSON, REFUSED, json_body, send_body
from hpcrl.runtime.token import RUN, authorized, read_token_file, same

TOKEN_FILE = "HPCRL_TOKEN_FILE"
RUN_NAME = "HPCRL_RUN_NAME"
LEASED = "HPCRL_ENGINE_LEASED"
LEASE, OWNER = "x-hpcrl-lease", "x-hpcrl-owner"
LEASE_S = 60.0  # without a request of its holder a lease ends; a worker asks every second

LEFT_OUT = -9999.0  # what vLLM's answers have for the logarithm of 0, which JSON has not
TOKEN_ID = "token_id:"  # how they name a token
_REFUSAL = "this server answers only requests that carry the token of its run"
_NO_LEASE = "this request shows no lease that the server knows: it was restarted, or has another client since; it holds other weights"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TokenRequired:
    """ASGI middleware: 401 without the token, 401 for the name of another run, 409 without a lease where one is wanted.

    The token is read once, from the file that HPCRL_TOKEN_FILE names, so it is neither in argv nor in the environment.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = read_token_file(Path(os.environ[TOKEN_FILE]))
        self._run_name = os.environ[RUN_NAME].encode()
        self._leases = Leases() if LEASED in os.environ else None
        self._told: dict[str, set[int]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope.get("path")
        if not self._admits(headers):
            await _refuse(scope, send, 401, _REFUSAL)
            return
        scope[ADMITTED] = True
        if self._leases and path == LEASE_PATH and scope.get("method") in ("POST", "DELETE"):
            await self._lease(self._leases, scope, headers, send)
        elif self._leases and path != "/health" and not self._leases.holds(_text(headers, LEASE), time.monotonic()):
            await _refuse(scope, send, 409, _NO_LEASE)
        elif path in (PATH, ENDED, CORES):
            await _answer(send, 200, await self._own(path, scope["app"].state.engine_client, receive))
        else:
            await self._app(scope, receive, send)

    async def _own(self, path: str, engine: Any, receive: Receive) -> Any:
        if path == PATH:
            return tokens_so_far(engine)
        if path == CORES:
            asked = json.loads(await _body(receive))
            return {"results": await on_each_core(engine, asked["method"], asked["args"])}
        said, self._told = ended_samples(engine, self._told)
        return said

    async def _lease(self, leases: Leases, scope: Message, headers: dict[bytes, bytes], send: Send) -> None:
        if scope["method"] == "DELETE":
            leases.end(_text(headers, LEASE))
            await _answer(send, 200, {})
            return
        lease = leases.take(_text(headers, OWNER), time.monotonic())
        if lease is None:
            await _answer(send, 409, {"error": f"it works for {leases.owner}"})
        else:
            await _answer(send, 200, {"lease": lease, **await facts(scope["app"].state.engine_client)})

    def _admits(self, headers: dict[bytes, bytes]) -> bool:
        run_name = headers.get(RUN.encode(), self._run_name)
        return authorized(_text(headers, "authorization"), self._token) and hmac.compare_digest(
            run_name, self._run_name
        )


class Leases:
    """Lease of a server that works for one client at a time.

    Attributes:
        owner: name of who has it; empty: nobody.
    """

    def __init__(self) -> None:
        self.owner, self._lease, self._used = "", "", 0.0

    def take(self, owner: str, now: float) -> str | None:
        """Return a new lease, or None where somebody else has asked lately.

        Args:
            owner: a process that starts again under the same name takes the place of the one before.
            now: seconds of a clock that only goes forward.
        """
        if self.owner not in ("", owner) and now - self._used < LEASE_S:
            return None
        self.owner, self._lease, self._used = owner, secrets.token_hex(16), now
        return self._lease

    def holds(self, lease: str, now: float) -> bool:
        """Return whether this is the lease that was given last, which it renews."""
        if not self._lease or not same(lease, self._lease):
            return False
        self._used = now
        return True

    def end(self, lease: str) -> None:
        """Release the server, if this is the lease."""
        if self._lease and same(lease, self._lease):
            self.owner, self._lease = "", ""


def _text(headers: Mapping[bytes, bytes], name: str) -> str:
    return headers.get(name.encode(), b"").decode("latin-1")


async def _body(receive: Receive) -> bytes:
    content, more = b"", True
    while more:
        message = await receive()
        content, more = content + message.get("body", b""), message.get("more_body", False)
    return content


async def _refuse(scope: Message, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await send_body(send, status, json_body({"error": reason}), JSON if ADMITTED in scope else REFUSED)


async def _answer(send: Send, status: int, content: Any) -> None:
    await send_body(send, status, json_body(content), JSON)


PATH = "/hpcrl/tokens"
ENDED = "/hpcrl/ended"
CORES = "/hpcrl/cores"
LEASE_PATH = "/hpcrl/lease"


async def on_each_core(engine: Any, method: str, args: Sequence[Any]) -> list[Any]:
    """Call each of a server's engine cores, of which there are data_parallel_size, and return what each answers.

    vLLM's own routes call all cores too, and return the first one's answer.

    Args:
        engine: the server's `vllm.v1.engine.async_llm.AsyncLLM`.
        method: of `vllm.v1.engine.core.EngineCore`.
    """
    client = engine.engine_core
    calls = [client._call_utility_async(method, *args, engine=core) for core in client.core_engines]
    return list(await asyncio.gather(*calls))


async def facts(engine: Any) -> dict[str, Any]:
    """Return a server's properties for the holder of a lease.

    Args:
        engine: as in `on_each_core`.
    """
    model = engine.vllm_config.model_config
    return {
        "model": model.model,
        "max_model_len": model.max_model_len,
        "logprobs_mode": model.logprobs_mode,
        "max_logprobs": model.max_logprobs,
        "weight_version": await engine.get_weight_version(),
    }


def tokens_so_far(engine: Any) -> dict[str, dict[int, int]]:
    """Return the tokens generated so far, by request id and index of the sample. Finished samples are missing.

    Args:
        engine: as in `on_each_core`.
    """
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for state in engine.output_processor.request_states.values():
        counts[state.external_req_id][state.request_index] = state.detokenizer.num_output_tokens()
    return dict(counts)


def ended_samples(
    engine: Any, told: Mapping[str, set[int]]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, set[int]]]:
    """Return the finished samples of unfinished requests, as vLLM answers them at the end, and the keys of all reported samples.

    Args:
        engine: as in `on_each_core`.
        told: samples that were reported before, by request id and index.
    """
    parents = {state.external_req_id: state.parent_req for state in engine.output_processor.request_states.values()}
    said, now_told = dict[str, list[dict[str, Any]]](), dict[str, set[int]]()
    for name, parent in parents.items():
        ended = [output for output in parent.output_aggregator if output is not None] if parent else []
        most = max(parent.sampling_params.logprobs, 1) if parent else 0
        said[name] = [_choice(output, most) for output in ended if output.index not in told.get(name, ())]
        now_told[name] = {output.index for output in ended}
    return said, now_told


def _choice(output: Any, most: int) -> dict[str, Any]:
    """Return a `vllm.outputs.CompletionOutput` as an answer of vLLM's has it.

    Args:
        most: log-probabilities of a token at most.
    """
    content = [
        {
            "logprob": max(tops[token].logprob, LEFT_OUT),
            "top_logprobs": [
                {"token": f"{TOKEN_ID}{other}", "logprob": max(top.logprob, LEFT_OUT)}
                for other, top in islice(tops.items(), most)
            ],
        }
        for token, tops in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "logprobs": {"content": content},
        "routed_experts": None if output.routed_experts is None else experts_text(output.routed_experts),
    }
