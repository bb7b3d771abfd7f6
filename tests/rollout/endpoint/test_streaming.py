"""Answers as events while they are generated: at once, exact, and the same tokens as without."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hpcrl.config import EnvironmentConfig, SamplingParams
from hpcrl.envs.base import Messages, Turn
from hpcrl.errors import EngineError
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.engines.base import Generation, Heard
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.types import Prompt, Work
from tests.rollout.conftest import WithEngine
from tests.rollout.endpoint.test_endpoint import (
    CONFIG,
    PLAYED,
    TOKENIZER,
    Client,
    chosen,
    played,
    user,
    with_embedded,  # noqa: F401  a fixture
)

LONG = replace(CONFIG, sampling_params=SamplingParams(max_generate_length=20, temperature=0.8))
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def streamed(client: Client, path: str = "chat/completions", **body: Any) -> list[dict[str, Any]]:
    """Return the events of an answer."""
    answer = client.post(path, stream=True, **body)
    assert answer.headers["content-type"] == "text/event-stream", answer.text
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choice_of(events: Sequence[Mapping[str, Any]], index: int) -> dict[str, Any]:
    """Return what the events say of a choice, in the form of an answer that is not streamed."""
    parts = [one for event in events for one in event["choices"] if one["index"] == index]
    deltas = [part.get("delta", part) for part in parts]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "text": "".join(delta.get("content", delta.get("text", "")) for delta in deltas),
        "finish_reason": parts[-1]["finish_reason"],
        "logprobs": [token for one in logprobs for token in one.get("content", one.get("token_logprobs"))],
        "offsets": [offset for one in logprobs for offset in one.get("text_offset", [])],
        "events": len(parts),
    }


@pytest.mark.parametrize("stop", [[], ["b", "ca"]])
def test_the_same_is_said_with_events_and_without(with_embedded: WithEngine[Any], stop: list[str]) -> None:  # noqa: F811
    heard = list[dict[str, Any]]()

    def whole(messages: Messages, client: Client) -> Turn:
        for choice in client.chat(messages, n=2, logprobs=True, stop=stop):
            told = {"text": choice["message"]["content"], "finish_reason": choice["finish_reason"]}
            heard.append({**told, "logprobs": choice["logprobs"]["content"]})
        (text,) = client.post("completions", prompt="abc", logprobs=0, stop=stop).json()["choices"]
        told = {
            "text": text["text"],
            "finish_reason": text["finish_reason"],
            "offsets": text["logprobs"]["text_offset"],
        }
        heard.append({**told, "logprobs": text["logprobs"]["token_logprobs"]})
        return Turn([], 1.0, True)

    def in_pieces(messages: Messages, client: Client) -> Turn:
        events = streamed(client, messages=messages, n=2, logprobs=True, stop=stop)
        heard.extend(choice_of(events, index) for index in range(2))
        heard.append(choice_of(streamed(client, "completions", prompt="abc", logprobs=0, stop=stop), 0))
        return Turn([], 1.0, True)

    groups = [played(with_embedded, play, LONG) for play in (whole, in_pieces)]
    rows = [[(row.token_ids.tolist(), row.loss_mask.tolist()) for row in group.rows[0]] for group in groups]
    assert rows[0] == rows[1]
    for one, other in zip(heard[:3], heard[3:], strict=True):
        assert one == {name: other[name] for name in one}
    if not stop:
        assert max(one["events"] for one in heard[3:]) > 3


class Hesitates:
    """An engine that says a token, and the others when it is let."""

    version = 0

    def __init__(self, text: str, fails: bool = False) -> None:
        self._tokens, self._fails = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], fails
        self.may_go_on = threading.Event()
        self.cancelled = False

    async def generate(self, *asked: object) -> list[Generation]:
        heard: Heard | None = asked[5]  # type: ignore[assignment]
        logprobs = [-0.5] * len(self._tokens)
        if heard:
            heard(self._tokens[:1], logprobs[:1])
        try:
            while not self.may_go_on.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self._fails:
            raise EngineError("rollout-0: the engine died")
        if heard:
            heard(self._tokens[1:], logprobs[1:])
        return [Generation(self._tokens, logprobs, "stop", [0] * len(self._tokens))]


def on(engine: Hesitates) -> WithEngine[Group]:
    return lambda generate: asyncio.run(generate(engine))


def asked(client: Client, messages: Messages, **more: Any) -> Any:
    """Return a request whose answer is read as it comes."""
    headers = {"authorization": f"Bearer {client.endpoint.key}"}
    body = {"model": "policy", "messages": messages, "stream": True, **more}
    return client.http.stream("POST", f"{client.endpoint.base_url}/chat/completions", json=body, headers=headers)


def test_what_is_said_is_told_before_the_answer_is_whole() -> None:
    engine, texts = Hesitates("abc"), list[str]()

    def play(messages: Messages, client: Client) -> Turn:
        with asked(client, messages) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    texts.append(choice["delta"].get("content", ""))
                    engine.may_go_on.set()  # only now
        client.say([*messages, {"role": "assistant", "content": "".join(texts)}, user("cab")])
        return Turn([], 1.0, True)

    group = played(on(engine), play)
    assert not group.failures
    assert texts[:2] == ["a", "bc"]
    assert [len(chosen(row)) for row in group.rows[0]] == [2], "the conversation goes on from what was streamed"


def test_a_client_that_leaves_in_the_middle_gets_no_turn() -> None:
    engine = Hesitates("abc")

    def play(messages: Messages, client: Client) -> Turn:
        with asked(client, messages) as answer:
            next(answer.iter_lines())
        while not engine.cancelled:
            client.endpoint.ended.wait(0.01)
        engine.may_go_on.set()
        client.say([user("abc")])
        return Turn([], 1.0, True)

    group = played(on(engine), play)
    assert not group.failures
    assert len(group.rows[0]) == 1


def test_an_engine_that_fails_in_the_middle_is_told_of_in_an_event() -> None:
    engine, lines = Hesitates("abc", fails=True), list[str]()

    def play(messages: Messages, client: Client) -> Turn:
        with asked(client, messages) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                lines.append(line)
                engine.may_go_on.set()
        return Turn([], 1.0, True)

    with pytest.raises(EngineError, match="the engine died"):
        played(on(engine), play)
    error = json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
    assert (error["code"], "the engine died" in error["message"]) == ("engine_failed", True)


def test_a_stream_whose_sample_nobody_wants_ends_with_an_error() -> None:
    engine, lines, begun, over = Hesitates("abc"), list[str](), threading.Event(), threading.Event()

    def play(messages: Messages, client: Client) -> Turn:
        with asked(client, messages) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()
        over.set()
        return Turn([], 1.0, True)

    async def stop() -> None:
        item = Work("g7", "train", Prompt("row3", [user("abc")], f"{Client.__module__}:Plays", {}, "letters"), 1, 40)
        async with serving(CONFIG, TOKENIZER, 0) as server:
            generator = GroupGenerator(engine, TOKENIZER, CONFIG, EnvironmentConfig(), server=server)  # type: ignore[arg-type]
            group = asyncio.create_task(generator.generate(item))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            group.cancel()
            while not over.is_set():
                await asyncio.sleep(0.01)

    PLAYED.append(play)
    asyncio.run(stop())
    assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]["code"] == "session_over"


def test_what_is_refused_before_it_is_begun_has_a_status(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    def play(messages: Messages, client: Client) -> Turn:
        refused = client.post(messages=[user("abc" * 200)], stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        client.say(messages)
        return Turn([], 1.0, True)

    assert not played(with_embedded, play).failures


def test_the_client_of_openai_reads_events(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    openai = pytest.importorskip("openai")

    def play(messages: Messages, client: Client) -> Turn:
        endpoint = client.endpoint
        asks = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.key, http_client=httpx.Client())
        with asks, asks.chat.completions.stream(model=endpoint.model, messages=messages, tools=TOOLS) as stream:
            for _ in stream:
                pass
            said = stream.get_final_completion().choices[0].message.content
        client.say([*messages, {"role": "assistant", "content": said}, user("abc")], tools=TOOLS)
        return Turn([], 1.0, True)

    group = played(with_embedded, play)
    assert not group.failures
    assert [len(chosen(row)) for row in group.rows[0]] == [2]
