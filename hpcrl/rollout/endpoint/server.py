"""OpenAI's and Anthropic's protocols for the policy of a replica: a server in the rollout worker, with one key per sample.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/score
    GET  /v1/models, /v1/models/{model}

A key is a session, which is one sample while its environment plays it; it shows in no file and no log.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from hpcrl.config import GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import NODE
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.tokenizer import decoder
from hpcrl.data.vision.reader import ImageReader
from hpcrl.envs.base import Endpoint
from hpcrl.errors import EngineError, HpcrlError, RunError
from hpcrl.rollout.endpoint.anthropic_messages import MessageEvents, message_reply, messages_request
from hpcrl.rollout.endpoint.openai_responses import ResponseEvents, response_reply, responses_request
from hpcrl.rollout.endpoint.replies import Events, described, error, event, models, reply
from hpcrl.rollout.endpoint.requests import (
    Declined,
    Request,
    chat_request,
    completion_request,
    session_ended,
    session_over,
)
from hpcrl.rollout.endpoint.session import MOST_HELD, Say, Session, SessionAnswer
from hpcrl.rollout.endpoint.thoughts import Decode
from hpcrl.rollout.images.preparing import ImagePreparation
from hpcrl.runtime.http_server import (
    ADMITTED,
    JSON,
    REFUSED,
    WAITING,
    BadRequest,
    Receive,
    Refused,
    Scope,
    Send,
    bind,
    body_size,
    headers_of,
    json_body,
    read_body,
    send_body,
    serve,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Stream(Protocol):
    """An answer as events while it is generated."""

    def piece(
        self, prompt: Sequence[int], number: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float], /
    ) -> bytes:
        """Return the events of a piece, as of `Tell`."""
        ...

    def end(self, answers: Sequence[SessionAnswer]) -> Iterator[bytes]:
        """Return the events of the rest."""
        ...


@dataclass(frozen=True)
class _Protocol:
    """How the requests of a path are read and answered.

    Attributes:
        prefix: of names of answers.
        named: whether later requests may go on from an answer by its name.
    """

    parse: Callable[[bytes], Request]
    prefix: str
    reply: Callable[[Request, Sequence[SessionAnswer], str, Decode], dict[str, Any]]
    events: Callable[[Request, str, Decode], _Stream]
    named: bool = False


_PROTOCOLS = {
    "/v1/chat/completions": _Protocol(chat_request, "chatcmpl-", reply, Events),
    "/v1/completions": _Protocol(completion_request, "cmpl-", reply, Events),
    "/v1/messages": _Protocol(messages_request, "msg_", message_reply, MessageEvents),
    "/v1/responses": _Protocol(responses_request, "resp_", response_reply, ResponseEvents, named=True),
}
_COUNT = "/v1/messages/count_tokens"
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
        self._decode, self._images = decoder(tokenizer), ImagePreparation(reader)
        self._sessions = dict[bytes, Session]()
        self._over = dict[bytes, Callable[[], Declined]]()
        self._threads = ThreadPoolExecutor(_THREADS, "large-requests")
        self._held, self._released = 0, asyncio.Event()

    @asynccontextmanager
    async def session(self, say: Say, params: SamplingParams) -> AsyncIterator[tuple[Session, Endpoint]]:
        """Open a session as long as the block lasts; yields it and its URL."""
        session = Session(
            say,
            self._tokenizer,
            self._turns,
            self._config,
            params,
            self._images,
            self._threads,
            lambda: self._longest_token,
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
            self._released.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        stream = _EventStream(send)
        try:
            session = self._of(headers_of(scope))
            scope[ADMITTED] = True
            await session.admit()
            if scope["method"] == "GET" and f"{scope['path']}/".startswith(f"{_MODELS}/"):
                return await self._describe(scope["path"].removeprefix(_MODELS).removeprefix("/"), send)
            known = scope["path"] in (*_PROTOCOLS, _COUNT, _SCORE)
            if not known or scope["method"] != "POST":
                paths = ", ".join([*_PROTOCOLS, _COUNT, _SCORE])
                raise Declined(404, "not_found", f"expected GET {_MODELS}, or POST {paths}")
            async with self._holding(session, scope):
                body = await read_body(receive)
                await self._post(session, scope["path"], body, receive, send, stream)
        except Refused as refusal:
            await _refuse(send, stream, refusal, JSON if ADMITTED in scope else REFUSED)
        except (BadRequest, HpcrlError) as problem:
            broken = isinstance(problem, EngineError)
            code = "engine_failed" if broken else "invalid_request"
            await _refuse(send, stream, Declined(500 if broken else 400, code, str(problem)))
        except asyncio.CancelledError:  # with all tasks: the replica has failed, or the run ends
            await _refuse(send, stream, session_over())
        return None

    async def _describe(self, model: str, send: Send) -> None:
        if model:
            self._require(model)
        found = described(self._model) if model else models(self._model)
        await send_body(send, 200, json_body(found), JSON)

    async def _post(
        self, session: Session, path: str, body: bytes, receive: Receive, send: Send, stream: _EventStream
    ) -> None:
        if path == _SCORE:
            session.take_score(body)
            return await send_body(send, 200, json_body({}), JSON)
        protocol = _PROTOCOLS[path.removesuffix("/count_tokens")]
        request = await session.compute(len(body), protocol.parse, body)
        del body
        self._require(request.model)
        if path == _COUNT:
            return await send_body(send, 200, json_body({"input_tokens": await session.count(request)}), JSON)
        return await self._answer(session, protocol, session.resolved(request), receive, send, stream)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    @asynccontextmanager
    async def _holding(self, session: Session, scope: Scope) -> AsyncIterator[None]:
        """Count the bytes of a body as long as the block lasts, once there is room for them.

        They are counted before any is read: bodies read in part would wait for each other. Raises Declined if the sample ends meanwhile.
        """
        size = body_size(headers_of(scope))
        scope[WAITING] = True
        try:
            while session.held + size > MOST_HELD or self._held + size > _MOST_HELD:
                self._released.clear()
                await self._released.wait()
                session.check_open()
        finally:
            del scope[WAITING]
        session.held += size
        self._held += size
        try:
            yield
        finally:
            session.held -= size
            self._held -= size
            self._released.set()

    def _require(self, model: str) -> None:
        if model != self._model:
            raise Declined(404, "model_not_found", f"there is only the model {self._model!r}")

    def _of(self, headers: Mapping[str, str]) -> Session:
        """Return the session of a key, which OpenAI's and Anthropic's clients send in different headers."""
        given = (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key", ""))
        digests = [_digest(key) for key in given]
        for digest in digests:
            if session := self._sessions.get(digest):
                return session
        for digest in digests:
            if reason := self._over.get(digest):
                raise reason()
        raise Declined(401, "invalid_api_key", "no sample that is under way has this key")

    async def _answer(
        self,
        session: Session,
        protocol: _Protocol,
        request: Request,
        receive: Receive,
        send: Send,
        stream: _EventStream,
    ) -> None:
        name = f"{protocol.prefix}{secrets.token_hex(8)}"
        events, coming = protocol.events(request, name, self._decode), asyncio.Queue[bytes | None]()

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
            if protocol.named:
                session.remember(name, request, answers[0])
        finally:
            answering.cancel()
            gone.cancel()
        if not request.stream:
            return await send_body(send, 200, json_body(protocol.reply(request, answers, name, self._decode)), JSON)
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
    body = error(refusal.status, code, str(refusal))
    if stream.begun:  # its status was sent before the error
        await stream.send(event(body, "error"))
        return await stream.end()
    headers = {**headers, **({"retry-after": str(retry)} if retry else {})}
    return await send_body(send, refusal.status, json_body(body), headers)


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
