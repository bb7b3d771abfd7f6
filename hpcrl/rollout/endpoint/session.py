"""Session of one sample: its program's requests, the policy's responses, and the rows of tokens they form.

A conversation that goes on from an answer has the tokens of that answer and all before it, exactly; only what is new is tokenized. A
conversation whose past differs begins a further row. So answers form trees, and each path from a root to a
leaf is a row, in which each token is trained that no earlier row has trained.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hpcrl.config import GeneratorConfig, SamplingParams
from hpcrl.data.chat.encode import cut_messages
from hpcrl.data.chat.prompt_tokens import HALF_A_CHARACTER, ChatTurns
from hpcrl.data.tokenizer import decoder
from hpcrl.data.vision.messages import has_images, without_images
from hpcrl.data.vision.reader import Context, SeenImage
from hpcrl.envs.agents.score import EXPECTED, read_score
from hpcrl.envs.base import Messages, Turn
from hpcrl.errors import EngineError, RefusedRequestError
from hpcrl.rollout.endpoint.images import ShownImages
from hpcrl.rollout.endpoint.requests import MOST_OPEN, Declined, Request, session_ended, session_over
from hpcrl.rollout.endpoint.thoughts import count_thought, divided
from hpcrl.rollout.endpoint.tool_calls import Call, first_of_calls, tool_calls
from hpcrl.rollout.engines.base import Generation, Heard
from hpcrl.rollout.images.preparing import ImagePreparation
from hpcrl.rollout.transcript import Transcript
from hpcrl.rundir.commit import digest_of
from hpcrl.runtime.http_server import BadRequest
from hpcrl.text import said_in
from hpcrl.types import StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")
R = TypeVar("R")

Say = Callable[[int, Context, Mapping[str, Any], Heard | None], Awaitable[Generation]]
"""Generates a response to a prompt: number of the turn, the prompt, overrides of the run's sampling, and a callback of tokens as they
come."""

Tell = Callable[[Sequence[int], int, str, Sequence[int], Sequence[float]], None]
"""Sends a client a piece of a response: the prompt, the number of the choice, text, token ids and their log-probabilities."""

PER_SECOND, AT_ONCE = 50.0, 100.0
"""Requests of a session that are read, answered or not: on average, and in a burst; further ones wait."""

MOST_HELD = 32 << 20
"""Bytes of a session's bodies under way, from the first byte to the end of the answer; further ones wait."""

_QUICK = 1 << 14  # bytes of a body that the event loop itself reads and tokenizes, in some milliseconds
_UNCOUNTED = 1 << 16  # characters that are tokenized at any limit of the prompt


@dataclass(frozen=True, eq=False)
class SessionAnswer:
    """The policy's response to a request.

    Attributes:
        prompt: token ids that it continued.
        images: that the placeholders among them stand for.
        text: of the response, tool calls included.
        content, calls: the same as sent to the client.
        thought, shown: the two parts of `content`, as sent to clients of protocols that have a place for thoughts.
        thought_tokens: of the response, its marks included.
        stopped_by: the request's stop text that ended it, if one did.
        parent: the answer from which the conversation went on.
        asked: messages of the request; or the text that was completed.
    """

    prompt: list[int]
    images: tuple[SeenImage, ...]
    said: Generation
    text: str
    content: str
    calls: list[Call]
    thought: str
    shown: str
    thought_tokens: int
    stopped_by: str | None
    parent: SessionAnswer | None
    asked: list[dict[str, Any]] | str
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.said.token_ids]

    @property
    def context(self) -> Context:
        return Context(self.token_ids, self.images)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The response as a chat message: with its thought in a field of its own, and as one text."""
        calls = {"tool_calls": [{"function": call} for call in self.calls]} if self.calls else {}
        thought = {"reasoning_content": self.thought} if self.thought else {}
        parts = {"role": "assistant", "content": self.shown, **thought, **calls}
        return [parts, {"role": "assistant", "content": self.content, **calls}]

    def left_of(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a conversation after this response; None where it does not go on from it."""
        if isinstance(self.asked, str) or len(messages) <= len(self.asked) + 1:
            return []
        past, answer, left = messages[: len(self.asked)], messages[len(self.asked)], messages[len(self.asked) + 1 :]
        same = all(_plain(one) == _plain(other) for one, other in zip(self.asked, past, strict=True))
        return left if same and _plain(answer) in map(_plain, self.messages) else []


def _hearing(tell: Tell, prompt: Sequence[int], number: int, text: TextInPieces) -> Heard:
    return lambda token_ids, logprobs: tell(prompt, number, text.add(token_ids), token_ids, logprobs)


class _TooLong(Declined):
    """A prompt that is longer than generator.max_input_length."""


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without fields that clients make up: the names of calls."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**{name: value for name, value in message.items() if name != "tool_call_id"}, "tool_calls": calls}


class Session:
    """The policy for one sample.

    Args:
        params: the run's sampling.
        images: prepares those of requests.
        threads: a few for all sessions, in which large requests are read and tokenized.
        longest_token: returns how many characters the longest token of the tokenizer has.

    Attributes:
        answers: of the policy, in the order in which they came.
        too_long: whether a request was declined since its prompt was longer than generator.max_input_length.
        ended: set when no more is answered.
        failure: of the engine, or its refusal of a request, which ends the sample.
        held: bytes of the session's bodies under way.
        score: what the sample is worth, where somebody waits for it to be posted.
    """

    def __init__(
        self,
        say: Say,
        tokenizer: PreTrainedTokenizerBase,
        turns: ChatTurns,
        config: GeneratorConfig,
        params: SamplingParams,
        images: ImagePreparation,
        threads: Executor,
        longest_token: Callable[[], int],
    ) -> None:
        self._say, self._tokenizer, self._config, self._params = say, tokenizer, config, params
        self._template, self._threads, self._longest_token = turns, threads, longest_token
        self._preparation, self._shown = images, ShownImages()
        self.answers = list[SessionAnswer]()
        self.too_long = False
        self.failure: EngineError | RefusedRequestError | None = None
        self.score: Future[Turn] | None = None
        self.ended = threading.Event()
        self._named = dict[str, tuple[list[dict[str, Any]], int]]()  # conversations, and their size
        self._begun = self._open = self.held = 0
        self._running = set[asyncio.Task[Any]]()
        self._allowed, self._counted = AT_ONCE, time.monotonic()
        self._freed, self._over, self._large = asyncio.Event(), asyncio.Event(), asyncio.Lock()

    async def admit(self) -> None:
        """Count a request, and wait where there were too many in the last seconds.

        Raises:
            Declined: the sample ended meanwhile.
        """
        now = time.monotonic()
        self._allowed = min(AT_ONCE, self._allowed + (now - self._counted) * PER_SECOND) - 1
        self._counted = now
        if self._allowed < 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), -self._allowed / PER_SECOND)
                raise session_over()

    async def compute(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what a function makes of a body of `size` bytes: of a large one in a thread, one of the session at a time."""
        return function(*args, **kwargs) if size <= _QUICK else await self._in_thread(function, *args, **kwargs)

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        async with self._large:
            # who goes away leaves its thread at work: the number of threads bounds what is computed
            return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))

    async def answer(self, request: Request, tell: Tell | None = None) -> list[SessionAnswer]:
        """Return the choices of a request, once fewer than MOST_OPEN others are generated.

        Args:
            tell: called with pieces of them as they come, with all tokens and with text that their contents begin with.

        Raises:
            BadRequest, HpcrlError: the chat template refuses the messages, or they have no tokens.
            Declined: the sample may have no more turns, or none of this length, or it ended.
            RefusedRequestError: the engine refuses the request; the sample has failed.
            EngineError: the engine failed.
        """
        task = asyncio.current_task()
        assert task is not None
        self._check_turns(request.n)
        try:
            parent, prompt = await self._tokenized(request)
            self._check_turns(request.n)  # others may have begun meanwhile
            self._check_length(len(prompt.token_ids))
        except _TooLong:
            self.too_long = True
            raise
        if request.messages is not None:
            request = replace(request, messages=self._shown.held(request.messages))
        turns = range(self._begun, self._begun + request.n)
        self._begun += request.n
        self._running.add(task)
        try:
            limits = {
                "max_tokens": min(request.max_tokens or self._longest, self._longest),
                "stop": [*(self._params.stop or []), *request.stop],
            }
            texts = [self._pieces(request, limits["stop"]) for _ in turns]
            heard = [tell and _hearing(tell, prompt.token_ids, at, text) for at, text in enumerate(texts)]
            async with self._room(request.n):
                every = (self._say(turn, prompt, limits, heard[at]) for at, turn in enumerate(turns))
                said = await asyncio.gather(*every)
        except (EngineError, RefusedRequestError) as error:
            self.failure = error
            self.ended.set()
            raise
        finally:
            self._running.discard(task)
        told = [text.sent for text in texts]
        answers = [self._answered(request, parent, prompt, *one) for one in zip(said, told, strict=True)]
        self.answers += answers
        return answers

    async def count(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt; errors as of `answer`."""
        self.check_open()
        _, prompt = await self._tokenized(request)
        return len(prompt.token_ids)

    def resolved(self, request: Request) -> Request:
        """Return a request with the conversation of the previous answer that it names. Raises Declined where the session has no such answer."""
        if request.previous is None:
            return request
        before = self._named.get(request.previous)
        if before is None:
            raise Declined(400, "previous_response_not_found", f"this sample has no response {request.previous!r:.80}")
        messages, at = request.messages or [], request.instructions
        conversation, size = before
        return replace(request, messages=[*messages[:at], *conversation, *messages[at:]], size=request.size + size)

    def remember(self, name: str, request: Request, answer: SessionAnswer) -> None:
        """Keep the conversation of an answer for requests that name it."""
        assert not isinstance(answer.asked, str), "responses are chats"
        conversation = [*answer.asked[request.instructions :], answer.messages[0]]
        self._named[name] = conversation, request.size + len(str(answer.messages[0]))

    def expect_score(self) -> Future[Turn]:
        """Accept a score over HTTP with the sample's key; as of `Endpoint`."""
        self.score = Future()
        return self.score

    def take_score(self, content: bytes) -> None:
        """Take the score that a request has.

        Raises:
            BadRequest: it is none.
            Declined: nobody waits for one, or there is one already.
        """
        if self.score is None:
            raise Declined(404, "not_found", "the reward of this sample comes from elsewhere")
        turn = read_score(content)
        if turn is None:
            raise BadRequest(f"expected {EXPECTED}")
        if self.score.done():
            raise Declined(409, "scored", "the sample has a score already")
        self.score.set_result(turn)

    def end(self) -> None:
        """Answer no more."""
        self.ended.set()
        self._over.set()
        for task in self._running:
            task.cancel()

    @property
    def _longest(self) -> int:
        return self._params.max_generate_length

    @asynccontextmanager
    async def _room(self, n: int) -> AsyncIterator[None]:
        """Hold the places of `n` answers, once they are free."""
        while self._open + n > MOST_OPEN:
            self._freed.clear()
            await self._freed.wait()
        self.check_open()
        self._open += n
        try:
            yield
        finally:
            self._open -= n
            self._freed.set()

    def check_open(self) -> None:
        """Raise Declined where no more is answered."""
        if self.ended.is_set():
            raise session_ended() if isinstance(self.failure, RefusedRequestError) else session_over()

    def _check_turns(self, n: int) -> None:
        self.check_open()
        most = self._config.max_turns
        if self._begun + n > most:
            raise Declined(400, "max_turns", f"the sample has no more turns (generator.max_turns = {most})")

    def _check_length(self, length: int, unit: str = "tokens", tokens: float = 1) -> None:
        """Decline a prompt whose units, each at least `tokens` tokens, exceed the longest prompt."""
        longest = self._config.max_input_length
        if longest is not None and length * tokens > longest:
            reason = f"prompt is too long: it has {length} {unit}, and generator.max_input_length is {longest} tokens"
            raise _TooLong(400, "context_length_exceeded", reason)

    def _check_size(self, request: Request) -> None:
        """Decline what cannot be short enough, before a template or a tokenizer takes time and memory for it."""
        if request.size <= _UNCOUNTED or self._config.max_input_length is None:
            return
        if isinstance(request.prompt, list):
            self._check_length(len(request.prompt))
        self._check_length(len(request.messages or ()), "messages")
        messages, _ = without_images(request.messages or [])
        characters = _characters([request.prompt, messages, request.tools])
        if characters > _UNCOUNTED:
            self._check_length(characters, "characters", 1 / self._longest_token())

    async def _tokenized(self, request: Request) -> tuple[SessionAnswer | None, Context]:
        messages = request.messages or []
        if has_images(messages):
            await self._in_thread(self._check_images, messages)
        _held = await self._preparation.prepare(messages)  # until the template wants them
        try:
            parent, prompt = await self.compute(request.size, self._prompt, request)
        # such as half a character
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"the messages have no tokens: {error}") from error
        if not prompt.token_ids:
            raise BadRequest("the prompt has no tokens")
        return parent, prompt

    def _check_images(self, messages: Messages) -> None:
        """Decline images that are too many, too large or have too many tokens, before any is decoded for the policy."""
        tokens, counts = 0, self._template.count_images(messages)
        self._shown.check(messages)
        for count in counts:
            tokens += count
            self._check_length(tokens, "tokens of images")

    def _prompt(self, request: Request) -> tuple[SessionAnswer | None, Context]:
        """Return the answer from which a request goes on, if there is one, and the tokens that it wants continued."""
        self._check_size(request)
        if request.messages is None:
            return self._completed(request.prompt)
        self._check_tools(request.tools)
        end = self._config.append_eos_token_after_stop_str_in_multi_turn
        chats = [one for one in self.answers if not isinstance(one.asked, str) and one.tools == request.tools]
        for parent in sorted(chats, key=lambda one: len(one.asked), reverse=True):  # most often it is the first
            if left := parent.left_of(request.messages):
                before = parent.context
                between = self._template.between(before.token_ids, left, request.tools, end=end)
                return parent, before.followed_by(between)
        return None, self._template.opening(request.messages, request.tools)

    def _completed(self, prompt: str | list[int]) -> tuple[SessionAnswer | None, Context]:
        parent = None
        if isinstance(prompt, list):
            known = [
                one for one in self.answers if prompt[: len(one.prompt) + len(one.said.token_ids)] == one.token_ids
            ]
            if max(prompt) >= len(self._tokenizer) or min(prompt) < 0:
                raise BadRequest(f"prompt: expected token ids below {len(self._tokenizer)}")
            parent = max(known, key=lambda one: len(one.token_ids), default=None)
            before = Context([]) if parent is None else parent.context
            if stands := set(prompt[len(before.token_ids) :]).intersection(self._template.never_said):
                raise BadRequest(
                    f"prompt: token {min(stands)} stands for an image, which token ids cannot show; send it in a chat message"
                )
            return parent, Context(prompt, before.images)
        texts = [(one, one.asked + one.content) for one in self.answers if isinstance(one.asked, str)]
        parent, before = max(
            (found for found in texts if prompt.startswith(found[1])),
            key=lambda found: len(found[1]),
            default=(None, ""),
        )
        if parent is None:
            return None, Context(self._template.encoded(prompt))
        new = self._template.continued(parent.token_ids, prompt[len(before) :])
        return parent, parent.context.followed_by(Context(new))

    def _check_tools(self, tools: list[dict[str, Any]]) -> None:
        """Refuse special tokens that are written in tools."""
        special = self._config.chat_template.allow_special_tokens
        if tools and not special and cut_messages(self._tokenizer, tools) != tools:
            raise BadRequest("tools: special tokens of the tokenizer are not text")

    def _pieces(self, request: Request, stop: list[str]) -> TextInPieces:
        marks = [*stop, first_of_calls(self._tokenizer)] if request.tools else stop
        return TextInPieces(self._template.decoded, marks, trims=bool(request.tools))

    def _answered(
        self, request: Request, parent: SessionAnswer | None, shown: Context, said: Generation, told: str
    ) -> SessionAnswer:
        template, params, prompt = self._template, self._params, shown.token_ids
        text = template.text(said.token_ids, params.stop or [], keep=params.include_stop_str_in_output)
        whole, stopped_by = text, None
        if request.stop:
            text = min(text, template.text(said.token_ids, request.stop, keep=False), key=len)
            rest = whole[len(text) :]
            stopped_by = next((stop for stop in request.stop if rest.startswith(stop)), None)
        content, calls = text, list[Call]()
        if request.tools:
            content, calls = tool_calls(self._tokenizer, prompt, said.token_ids, text, request.tools)
        if not content.startswith(told):  # a tokenizer that writes a text otherwise once more follows
            content = told
        asked = request.messages
        if asked is None:
            asked = request.prompt if isinstance(request.prompt, str) else template.decoded(request.prompt)
        parsed = calls and not first_of_calls(self._tokenizer)  # a response template has taken the thought out
        decode, said_ids = decoder(self._tokenizer), said.token_ids
        said_ids = said_ids[:-1] if template.ends.issuperset(said_ids[-1:]) else said_ids
        thought, rest = ("", content) if parsed else divided(decode, prompt, content)
        thoughts = count_thought(decode, prompt, said_ids)
        return SessionAnswer(
            prompt,
            shown.images,
            said,
            text,
            content,
            calls,
            thought,
            rest,
            thoughts,
            stopped_by,
            parent,
            asked,
            request.tools,
        )

    def last_text(self) -> str:
        """Return the policy's last response; empty without one."""
        return self.answers[-1].text if self.answers else ""

    @property
    def stop_reason(self) -> StopReason:
        return "length" if self.too_long or not self.answers else self.answers[-1].said.stop_reason

    def transcripts(self) -> list[Transcript]:
        """Return the rows; the last one ends with the last answer."""
        parents, trained, rows = {one.parent for one in self.answers}, set[SessionAnswer](), list[Transcript]()
        for leaf in self.answers:
            if leaf in parents:
                continue
            path = [leaf]
            while (parent := path[-1].parent) is not None:
                path.append(parent)
            row = Transcript(path[-1].prompt, path[-1].images)
            for one in reversed(path):
                asked = one.prompt[len(row.token_ids) if one.parent else 0 :]
                new = one.images[len(row.images) if one.parent else 0 :]
                row.follow(Context(one.prompt, one.images))
                if one in trained:
                    row.add_context(one.said.token_ids)
                else:
                    row.add_response(one.said)
                    row.end_turn("", digest_of(json.dumps([*asked, *(image.digest for image in new)]).encode()))
            trained.update(path)
            rows.append(row)
        return rows

    def conversation(self, opening: Messages) -> Messages:
        """Return the messages of the last row after its prompt."""
        if not self.answers:
            return []
        last = self.answers[-1]
        asked = [{"role": "user", "content": last.asked}] if isinstance(last.asked, str) else last.asked
        shown = [{"role": one["role"], "content": _shown(one)} for one in asked]
        # the texts alone: a row may have the path of an image that a client sends as bytes
        said, opened = ([(one["role"], said_in(one["content"])) for one in of] for of in (shown, opening))
        begins = said[: len(opened)] == opened
        return [*(shown[len(opening) :] if begins else shown), {"role": "assistant", "content": last.text}]


def _characters(value: Any) -> int:
    """Return how many characters the texts in a value have, names of fields left out."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, parts))


def _shown(message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    if not isinstance(message["content"], str):
        return message["content"]
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
    return "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])


class TextInPieces:
    """The text of one response, token by token.

    A piece ends where a character is whole, and before anything that may become a mark, such as a stop text. Once there is a mark
    no more text is sent before the end of the response.

    Args:
        decode: token ids to text, without special tokens.
        marks: texts before which pieces end.
        trims: whether white space at the end is held until more follows.

    Attributes:
        sent: the pieces so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], marks: Sequence[str], trims: bool = False) -> None:
        self._decode, self._marks, self._trims = decode, marks, trims
        self._tokens, self._marked = list[int](), False
        # the text of tokens from `_read` on is what they add to those from `_begin` on: alone they might lack their first space
        self._begin = self._read = 0
        self._held = self.sent = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that is complete with these tokens."""
        if self._marked:
            return ""
        self._tokens += token_ids
        before, text = (self._decode(self._tokens[self._begin : end]) for end in (self._read, len(self._tokens)))
        if len(text) <= len(before) or text.endswith(HALF_A_CHARACTER):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        self._held += text[len(before) :]
        sure = self._sure()
        piece, self._held = self._held[:sure], self._held[sure:]
        self.sent += piece
        return piece

    def _sure(self) -> int:
        """Return the number of held characters that cannot belong to a mark."""
        text = self._held
        found = [at for at in (text.find(mark) for mark in self._marks) if at >= 0]
        self._marked = bool(found)
        begun = (at for at in range(len(text)) if any(mark.startswith(text[at:]) for mark in self._marks))
        sure = min([*found, next(begun, len(text))])
        return len(text[:sure].rstrip()) if self._trims else sure
