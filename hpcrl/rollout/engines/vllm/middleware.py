"""Middleware that puts vLLM's whole HTTP surface behind the run's token, and adds one route to it.

vLLM's own `--api-key` protects only the paths under /v1; the development routes that change weights or run code on the workers
stay open. This class is given to `--middleware`, sits outside the router, and lets nothing through without the token: known
routes, unknown paths, documentation pages and websockets alike.
"""

from __future__ import annotations

import hmac
import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from hpcrl.runtime.token import RUN, authorized, read_token_file

TOKEN_FILE = "HPCRL_TOKEN_FILE"
RUN_NAME = "HPCRL_RUN_NAME"

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

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._admits(dict(scope["headers"])):
            if scope.get("path") == PATH:
                counts = tokens_so_far(scope["app"].state.engine_client)
                await _answer(send, 200, json.dumps(counts).encode())
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


def tokens_so_far(engine: Any) -> dict[str, dict[int, int]]:
    """Return the tokens generated so far, by request id and index of the sample. Finished samples are missing.

    Args:
        engine: the server's `vllm.v1.engine.async_llm.AsyncLLM`.
    """
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for state in engine.output_processor.request_states.values():
        counts[state.external_req_id][state.request_index] = state.detokenizer.num_output_tokens()
    return dict(counts)
