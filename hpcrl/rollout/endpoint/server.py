"""OpenAI's protocol for the policy that a replica holds: a server in the rollout worker, which answers those who have the key of a sample.

    POST /v1/chat/completions, /v1/completions      GET /v1/models

A key is a session, which is one sample while its environment plays it; it shows in no file and no log.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from hpcrl.config import GeneratorConfig, SamplingParams
from hpcrl.data.chat import decoder
from hpcrl.envs.base import Endpoint
from hpcrl.errors import EngineError, HpcrlError, RunError
from hpcrl.rollout.endpoint.replies import events, models, reply
from hpcrl.rollout.endpoint.requests import Declined, Request, chat_request, completion_request, session_over
from hpcrl.rollout.endpoint.session import Answer, Say, Session
from hpcrl.runtime.http_server import (
    BadRequest,
    Receive,
    Refused,
    Scope,
    Send,
    bind,
    headers_of,
    json_body,
    read_body,
    send_body,
    serve,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARSERS: dict[str, Callable[[bytes], Request]] = {
    "/v1/chat/completions": chat_request,
    "/v1/completions": completion_request,
}
_MODELS = "/v1/models"
_UNWANTED = 4096  # keys of samples that were given up, whose programs are told so
_SHUT_S = 5.0


class PolicyServer:
    """ASGI application: the sessions of one replica.

    Args:
        url: where it is reached, with /v1.
        model: its name in requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: GeneratorConfig, url: str, model: str) -> None:
        self._tokenizer, self._config, self._url, self._model = tokenizer, config, url, model
        self._decode = decoder(tokenizer)
        self._sessions = dict[bytes, Session]()
        self._unwanted = deque[bytes](maxlen=_UNWANTED)

    @asynccontextmanager
    async def session(self, say: Say, params: SamplingParams) -> AsyncIterator[tuple[Session, Endpoint]]:
        """Have a session as long as the block lasts, and where it is reached."""
        session, key = Session(say, self._tokenizer, self._config, params), secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        try:
            yield session, Endpoint(self._url, key, self._model, session.ended, session.last_text)
        except asyncio.CancelledError:
            self._unwanted.append(_digest(key))
            raise
        finally:
            del self._sessions[_digest(key)]
            session.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        try:
            session = self._of(headers_of(scope).get("authorization", ""))
            session.admit()
            if (scope["method"], scope["path"]) == ("GET", _MODELS):
                return await send_body(send, 200, json_body(models(self._model)), {"content-type": "application/json"})
            parser = _PARSERS.get(scope["path"])
            if parser is None or scope["method"] != "POST":
                raise Declined(404, "not_found", f"expected GET {_MODELS}, or POST {' or '.join(_PARSERS)}")
            request = parser(await read_body(receive))
            if request.model != self._model:
                raise Declined(404, "model_not_found", f"there is only the model {self._model!r}")
            answers = await self._answers(session, request, receive)
        except Refused as refusal:
            return await _refuse(send, refusal)
        except (BadRequest, HpcrlError) as error:
            broken = isinstance(error, EngineError)
            code = "engine_failed" if broken else "invalid_request"
            return await _refuse(send, Declined(500 if broken else 400, code, str(error)))
        if answers is not None:
            await self._send(send, request, answers)
        return None

    def _of(self, authorization: str) -> Session:
        digest = _digest(authorization.removeprefix("Bearer "))
        if session := self._sessions.get(digest):
            return session
        if digest in self._unwanted:
            raise session_over()
        raise Declined(401, "invalid_api_key", "no sample that is under way has this key")

    async def _answers(self, session: Session, request: Request, receive: Receive) -> list[Answer] | None:
        """Return the choices of a request; None if who has sent it has gone."""
        answering = asyncio.create_task(session.answer(request))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return None
            if answering.cancelled():
                raise session_over()
            return answering.result()
        finally:
            answering.cancel()
            gone.cancel()

    async def _send(self, send: Send, request: Request, answers: list[Answer]) -> None:
        name = f"{'chatcmpl' if request.messages is not None else 'cmpl'}-{secrets.token_hex(8)}"
        if not request.stream:
            body = json_body(reply(request, answers, name, self._decode))
            return await send_body(send, 200, body, {"content-type": "application/json"})
        kind = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for event in events(request, answers, name, self._decode):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        return await send({"type": "http.response.body", "body": b""})


def _digest(key: str) -> bytes:
    """Return what a key is found by, which takes as long for one that is nearly right."""
    return hashlib.sha256(key.encode()).digest()


async def _refuse(send: Send, refusal: Refused) -> None:
    code, retry = (refusal.code, refusal.retry) if isinstance(refusal, Declined) else (None, None)
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": code}
    headers = {"content-type": "application/json", **({"retry-after": str(retry)} if retry else {})}
    await send_body(send, refusal.status, json_body({"error": error}), headers)


@asynccontextmanager
async def serving(
    config: GeneratorConfig, tokenizer: PreTrainedTokenizerBase, replica: int
) -> AsyncIterator[PolicyServer | None]:
    """Serve the policy as long as the block lasts, if the configuration wants it.

    Raises:
        RunError: the address or the port is not to be had.
    """
    engine = config.inference_engine
    if not engine.enable_http_endpoint:
        yield None
        return
    listener = _listen(engine.http_endpoint_host, engine.http_endpoint_port, replica)
    host, port = listener.getsockname()[:2]
    model = engine.served_model_name or tokenizer.name_or_path
    server, done = PolicyServer(tokenizer, config, f"http://{host}:{port}/v1", model), asyncio.Event()
    print(f"the policy answers at http://{host}:{port}/v1 as {model}", flush=True)
    task = asyncio.create_task(serve(server, listener, done.wait()))
    try:
        yield server
    finally:
        done.set()
        with suppress(asyncio.CancelledError, asyncio.TimeoutError):  # with all tasks, where the work has ended
            await asyncio.wait_for(task, _SHUT_S)


def _listen(host: str, port: int | None, replica: int) -> socket.socket:
    try:
        return bind(host, port + replica if port else 0)
    except OSError as error:
        where = f"{host}:{port + replica if port else ''}"
        raise RunError(
            f"generator.inference_engine.http_endpoint_host, http_endpoint_port: {where} is not to be had ({error.strerror}); "
            "choose another, or leave the port out, and each replica finds a free one"
        ) from error
