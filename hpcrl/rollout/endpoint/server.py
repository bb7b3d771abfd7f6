"""OpenAI's protocol for the policy of a replica: a server in the rollout worker, with one key per sample.

    POST /v1/chat/completions, /v1/completions, /v1/score      GET /v1/models, /v1/models/{model}

A key is a session, which is one sample while its environment plays it; it shows in no file and no log.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpcrl.config import GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import NODE
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.tokenizer import decoder
from hpcrl.data.vision.reader import ImageReader
from hpcrl.envs.base import Endpoint
from hpcrl.errors import EngineError, HpcrlError, RunError
from hpcrl.rollout.endpoint.replies import Events, described, event, models, reply
from hpcrl.rollout.endpoint.requests import (
    Declined,
    Request,
    chat_request,
    completion_request,
    session_ended,
    session_over,
)
from hpcrl.rollout.endpoint.session import MOST_HELD, Say, Session
from hpcrl.runtime.http_server import (
    ADMITTED,
    JSON,
    REFUSED,
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
_MODELS, _SCORE = "/v1/models", "/v1/score"
_OVER = 4096  # keys of ended samples, whose programs get an error
_SHUT_S = 5.0
_MOST_HELD = 8 * MOST_HELD  # of all sessions together
_THREADS = 2  # for large requests: a conversation that is rendered and tokenized takes some times its size


class PolicyServer:
    """ASGI application: the sessions of one replica.

    Args:
        url: where it is reached, with /v1.
        model: its name in requests.
        source, reader: as of `ChatTurns`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: GeneratorConfig,
        url: str,
        model: str,
        source: Pretrained | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self._tokenizer, self._config, self._url, self._model = tokenizer, config, url, model
        special = config.chat_template.allow_special_tokens
        self._turns = ChatTurns(tokenizer, config.chat_template_kwargs, special, reader, source)
        self._decode = decoder(tokenizer)
        self._sessions = dict[bytes, Session]()
        self._over = dict[bytes, Callable[[], Declined]]()
        self._threads, self._held = ThreadPoolExecutor(_THREADS, "large-requests"), 0

    @asynccontextmanager
    async def session(self, say: Say, params: SamplingParams) -> AsyncIterator[tuple[Session, Endpoint]]:
        """Open a session as long as the block lasts; yields it and its URL."""
        session = Session(
            say, self._tokenizer, self._turns, self._config, params, self._threads, lambda: self._longest_token
        )
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        reason = session_ended
        try:
            yield session, Endpoint(self._url, key, self._model, session.ended, session.last_text, session.expect_score)
        except asyncio.CancelledError:
            reason = session_over
            raise
        finally:
            del self._sessions[_digest(key)]
            self._over[_digest(key)] = reason
            while len(self._over) > _OVER:
                del self._over[next(iter(self._over))]
            session.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        stream = _EventStream(send)
        try:
            session = self._of(headers_of(scope).get("authorization", ""))
            scope[ADMITTED] = True
            await session.admit()
            if (scope["method"], scope["path"]) == ("GET", _MODELS):
                return await send_body(send, 200, json_body(models(self._model)), JSON)
            if scope["method"] == "GET" and scope["path"].startswith(f"{_MODELS}/"):
                self._require(scope["path"].removeprefix(f"{_MODELS}/"))
                return await send_body(send, 200, json_body(described(self._model)), JSON)
            if (scope["method"], scope["path"]) == ("POST", _SCORE):
                with self._holding(session) as hold:
                    session.take_score(await read_body(receive, hold))
                return await send_body(send, 200, json_body({}), JSON)
            parser = _PARSERS.get(scope["path"])
            if parser is None or scope["method"] != "POST":
                raise Declined(404, "not_found", f"expected GET {_MODELS}, or POST {', '.join([*_PARSERS, _SCORE])}")
            with self._holding(session) as hold:
                body = await read_body(receive, hold)
                request = await session.compute(len(body), parser, body)
                del body
                self._require(request.model)
                await self._answer(session, request, receive, send, stream)
        except Refused as refusal:
            await _refuse(send, stream, refusal, JSON if ADMITTED in scope else REFUSED)
        except (BadRequest, HpcrlError) as error:
            broken = isinstance(error, EngineError)
            code = "engine_failed" if broken else "invalid_request"
            await _refuse(send, stream, Declined(500 if broken else 400, code, str(error)))
        except asyncio.CancelledError:  # with all tasks: the replica has failed, or the run ends
            await _refuse(send, stream, session_over())
        return None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    @contextmanager
    def _holding(self, session: Session) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body as long as the block lasts; what is yielded declines those that are too many."""
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            held, session.held, self._held = held + count, session.held + count, self._held + count
            if session.held > MOST_HELD or self._held > _MOST_HELD:
                raise Declined(429, "too_many_bytes", "too many bytes of other requests are under way", retry=1)

        try:
            yield hold
        finally:
            session.held -= held
            self._held -= held

    def _require(self, model: str) -> None:
        if model != self._model:
            raise Declined(404, "model_not_found", f"there is only the model {self._model!r}")

    def _of(self, authorization: str) -> Session:
        digest = _digest(authorization.removeprefix("Bearer "))
        if session := self._sessions.get(digest):
            return session
        if reason := self._over.get(digest):
            raise reason()
        raise Declined(401, "invalid_api_key", "no sample that is under way has this key")

    async def _answer(
        self, session: Session, request: Request, receive: Receive, send: Send, stream: _EventStream
    ) -> None:
        name = f"{'chatcmpl' if request.messages is not None else 'cmpl'}-{secrets.token_hex(8)}"
        events, coming = Events(request, name, self._decode), asyncio.Queue[bytes | None]()

        def tell(*piece: Any) -> None:
            coming.put_nowait(events.piece(*piece))

        answering = asyncio.create_task(session.answer(request, tell if request.stream else None))
        gone = asyncio.ensure_future(receive())
        for end in (answering, gone):
            end.add_done_callback(lambda _: coming.put_nowait(None))
        try:
            while (piece := await coming.get()) is not None:
                await stream.send(piece)
            if not answering.done():
                return None
            if answering.cancelled():
                raise session_over()
            answers = answering.result()
        finally:
            answering.cancel()
            gone.cancel()
        if not request.stream:
            return await send_body(send, 200, json_body(reply(request, answers, name, self._decode)), JSON)
        for piece in events.end(answers):
            await stream.send(piece)
        return await stream.end()


class _EventStream:
    """Response as server-sent events, the first of which is ready."""

    def __init__(self, send: Send) -> None:
        self._send, self.begun = send, False

    async def send(self, event: bytes) -> None:
        if not event:
            return
        if not self.begun:
            self.begun = True
            kind = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": kind})
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


def _digest(key: str) -> bytes:
    """Return the digest under which a key is stored; its time does not depend on how much of a wrong key is right."""
    return hashlib.sha256(key.encode()).digest()


async def _refuse(send: Send, stream: _EventStream, refusal: Refused, headers: Mapping[str, str] = JSON) -> None:
    code, retry = (refusal.code, refusal.retry) if isinstance(refusal, Declined) else (None, None)
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": code}
    if stream.begun:  # its status was sent before the error
        await stream.send(event({"error": error}))
        return await stream.end()
    headers = {**headers, **({"retry-after": str(retry)} if retry else {})}
    return await send_body(send, refusal.status, json_body({"error": error}), headers)


@asynccontextmanager
async def serving(
    config: GeneratorConfig,
    tokenizer: PreTrainedTokenizerBase,
    replica: int,
    source: Pretrained | None = None,
    reader: ImageReader | None = None,
) -> AsyncIterator[PolicyServer | None]:
    """Serve the policy as long as the block lasts, if the configuration wants it; `source` and `reader` are as of `PolicyServer`.

    Raises:
        RunError: the address or the port is not to be had.
    """
    engine = config.inference_engine
    if not engine.enable_http_endpoint:
        yield None
        return
    own = engine.http_endpoint_host == NODE
    listener = _listen(
        os.environ["HPCRL_ADDRESS"] if own else engine.http_endpoint_host, engine.http_endpoint_port, replica
    )
    host, port = listener.getsockname()[:2]
    model = engine.served_model_name or tokenizer.name_or_path
    server = PolicyServer(tokenizer, config, f"http://{host}:{port}/v1", model, source, reader)
    done = asyncio.Event()
    print(f"the policy answers at http://{host}:{port}/v1 as {model}", flush=True)
    task = asyncio.create_task(serve(server, listener, done.wait()))
    try:
        yield server
    finally:
        done.set()
        with suppress(asyncio.CancelledError, asyncio.TimeoutError):  # with all tasks, where the work has ended
            await asyncio.wait_for(task, _SHUT_S)
        server.close()


def _listen(host: str, port: int | None, replica: int) -> socket.socket:
    try:
        return bind(host, port + replica if port else 0)
    except OSError as error:
        where = f"{host}:{port + replica if port else ''}"
        raise RunError(
            f"generator.inference_engine.http_endpoint_host, http_endpoint_port: {where} is not to be had ({error.strerror}); "
            "choose another, or leave the port out, and each replica finds a free one"
        ) from error
