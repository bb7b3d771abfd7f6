"""Middleware that puts vLLM's whole HTTP surface behind the run's token, and adds two routes to it.

vLLM's own `--api-key` protects only the paths under /v1; the development routes that change weights or run code on the workers
stay open. This class is given to `--middleware`, sits outside the router, and lets nothing through without the token: known
routes, unknown paths, documentation pages and websockets alike.
"""

from __future__ import annotations

import hmac
import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.runtime.token import RUN, authorized, read_token_file

TOKEN_FILE = "HPCRL_TOKEN_FILE"
RUN_NAME = "HPCRL_RUN_NAME"

LEFT_OUT = -9999.0  # what vLLM's answers have for the logarithm of 0, which JSON has not
TOKEN_ID = "token_id:"  # how they name a token
_REFUSAL = b'{"error": "this server answers only requests that carry the token of its run"}'

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TokenRequired:
    """ASGI middleware: 401 without the token, 401 for the name of another run.

    The token is read once, from the file that HPCRL_TOKEN_FILE names, so it is neither in argv nor in the environment.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = read_token_file(Path(os.environ[TOKEN_FILE]))
        self._run_name = os.environ[RUN_NAME].encode()
        self._told: dict[str, set[int]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._admits(dict(scope["headers"])):
            if scope.get("path") == PATH:
                counts = tokens_so_far(scope["app"].state.engine_client)
                await _answer(send, 200, json.dumps(counts).encode())
            elif scope.get("path") == ENDED:
                said, self._told = ended_samples(scope["app"].state.engine_client, self._told)
                await _answer(send, 200, json.dumps(said).encode())
            else:
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, _REFUSAL)

    def _admits(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"").decode("latin-1")
        run_name = headers.get(RUN.encode(), self._run_name)
        return authorized(given, self._token) and hmac.compare_digest(run_name, self._run_name)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


PATH = "/hpcrl/tokens"
ENDED = "/hpcrl/ended"


def tokens_so_far(engine: Any) -> dict[str, dict[int, int]]:
    """Return the tokens generated so far, by request id and index of the sample. Finished samples are missing.

    Args:
        engine: the server's `vllm.v1.engine.async_llm.AsyncLLM`.
    """
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for state in engine.output_processor.request_states.values():
        counts[state.external_req_id][state.request_index] = state.detokenizer.num_output_tokens()
    return dict(counts)


def ended_samples(
    engine: Any, told: Mapping[str, set[int]]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, set[int]]]:
    """Return the samples that have ended of requests which have not, as vLLM answers them at the end, and which ones have been told.

    Args:
        engine: as in `tokens_so_far`.
        told: those that were told before, by request id and index.
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
    }
