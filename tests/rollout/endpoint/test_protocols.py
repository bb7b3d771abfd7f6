"""Anthropic's messages and OpenAI's responses, with their own clients: what is sent back as it came goes on from the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.envs.base import Endpoint, Messages, Turn
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.types import Prompt, Work
from tests.rollout.endpoint.test_endpoint import PLAYED, Client
from tests.rollout.endpoint.test_tool_calls import CALL
from tests.rollout.test_transcript import Script, chosen, ended, text, tokenizer_of, user

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

SAID = (f"<think>\nadd them\n</think>\n\nso {CALL}", "<think>\nok\n</think>\n\n3", "bye")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SERVED = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
STREAMS = pytest.mark.parametrize("streams", [False, True])


def played(
    play: Callable[[Messages, Endpoint], None],
    said: Sequence[str] = SAID,
    tokenizer: Any = None,
    reason: str | None = None,
) -> tuple[Group, Script, Any]:
    """Return the group that a program has played, the engine and the tokenizer; the policy says what is given.

    Args:
        reason: why answers end; None: with the token for it.
    """
    tokenizer = tokenizer or tokenizer_of("thinking")
    engine = Script([(ended(tokenizer, one)[0][:-1], reason) if reason else ended(tokenizer, one) for one in said])
    config = GeneratorConfig(
        max_turns=9, max_input_length=4000, inference_engine=SERVED, sampling_params=SamplingParams()
    )
    work = Work("g", "train", Prompt("0", user("1 + 2?"), f"{Client.__module__}:Plays", {}), 1, seed=5)

    def plays(messages: Messages, client: Client) -> Turn:
        play(messages, client.endpoint)
        return Turn([], 1.0, True)

    async def generate() -> Group:
        async with serving(config, tokenizer, 0) as server:
            generator = GroupGenerator(engine, tokenizer, config, EnvironmentConfig(), server=server)  # type: ignore[arg-type]
            return await generator.generate(work)

    PLAYED.append(plays)
    group = asyncio.run(generate())
    assert not group.failures, group.failures
    return group, engine, tokenizer


def check_one_row(group: Group, engine: Script, tokenizer: Any, said: Sequence[str] = SAID) -> None:
    """Check that all answers are one row, with the tokens that were said."""
    ((row,),) = group.rows
    assert chosen(row) == [token_id for one in said for token_id in ended(tokenizer, one)[0]]
    for at, before in enumerate(engine.prompts[:-1]):
        whole = [*before, *ended(tokenizer, said[at])[0]]
        assert engine.prompts[at + 1][: len(whole)] == whole


def thoughts(tokenizer: Any, said: Sequence[str] = SAID) -> list[int]:
    """Return how many tokens the thought of each answer has, with its marks."""
    found = [one.rpartition("</think>") for one in said]
    return [len(tokenizer.encode(thought + mark, add_special_tokens=False)) for thought, mark, _ in found]


def by_anthropic(endpoint: Endpoint) -> Any:
    return anthropic.Anthropic(base_url=endpoint.base_url.removesuffix("/v1"), api_key=endpoint.key, max_retries=0)


def by_openai(endpoint: Endpoint) -> Any:
    return openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0)


def message_of(client: Any, streams: bool, **body: Any) -> Any:
    body = {"model": "m", "max_tokens": 1000, **body}
    if not streams:
        return client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        texts = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert texts == "".join(block.text for block in message.content if block.type == "text")
    return message


@STREAMS
def test_messages_of_anthropic(streams: bool) -> None:
    tools = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    heard = list[Any]()

    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_anthropic(endpoint) as client:
            asked = {
                "system": [{"type": "text", "text": "Be brief."}],
                "tools": tools,
                "thinking": {"type": "adaptive"},
            }
            history: list[Any] = list(messages)
            counted = client.messages.count_tokens(model="m", messages=history, **asked)
            heard.append(message_of(client, streams, messages=history, **asked))
            assert heard[0].usage.input_tokens == counted.input_tokens
            call = next(block for block in heard[0].content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))}
            history += [heard[0].to_param(), {"role": "user", "content": [result, {"type": "text", "text": "and?"}]}]
            heard.append(message_of(client, streams, messages=history, **asked))
            history += [{"role": "assistant", "content": heard[1].content}, {"role": "user", "content": "thanks"}]
            heard.append(message_of(client, streams, messages=history, **asked))

    group, engine, tokenizer = played(play)
    check_one_row(group, engine, tokenizer)
    thought, shown, call = heard[0].content
    assert (thought.thinking, shown.text, call.name, call.input) == ("add them", "so", "add", {"a": 1, "b": 2})
    assert [block.type for block in heard[1].content] == ["thinking", "text"]
    assert [one.stop_reason for one in heard] == ["tool_use", "end_turn", "end_turn"]
    assert heard[0].usage.output_tokens == len(ended(tokenizer, SAID[0])[0])
    assert [one.usage.output_tokens_details.thinking_tokens for one in heard] == thoughts(tokenizer)
    assert text(tokenizer, engine.prompts[0]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in text(tokenizer, engine.prompts[1])


@STREAMS
@pytest.mark.parametrize("by_name", [False, True], ids=["items", "previous_response_id"])
def test_responses_of_openai(streams: bool, by_name: bool) -> None:
    tools = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": False}]
    heard = list[Any]()

    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_openai(endpoint) as client:

            def ask(items: list[Any]) -> None:
                body: dict[str, Any] = {"model": "m", "input": items, "instructions": "Be brief.", "tools": tools}
                if by_name and heard:
                    body["previous_response_id"] = heard[-1].id
                if streams:
                    with client.responses.stream(**body) as stream:
                        events = list(stream)
                        heard.append(stream.get_final_response())
                    kinds = [event.type for event in events]
                    assert [event.sequence_number for event in events] == list(range(len(events)))
                    assert kinds[0] == "response.created"
                    assert kinds.count("response.output_item.done") == len(heard[-1].output)
                else:
                    heard.append(client.responses.create(**body))

            history: list[Any] = list(messages)
            for _ in SAID:
                ask(history)
                call = next((one for one in heard[-1].output if one.type == "function_call"), None)
                following: dict[str, Any] = {"role": "user", "content": "thanks"}
                if call:
                    result = str(sum(json.loads(call.arguments).values()))
                    following = {"type": "function_call_output", "call_id": call.call_id, "output": result}
                history = [following] if by_name else [*history, *heard[-1].output, following]

    group, engine, tokenizer = played(play)
    check_one_row(group, engine, tokenizer)
    thought, shown, call = heard[0].output
    assert (thought.content[0].text, shown.content[0].text, call.name) == ("add them", "so", "add")
    assert [one.output_text for one in heard] == ["so", "3", "bye"]
    assert [one.status for one in heard] == ["completed"] * 3
    assert heard[0].usage.output_tokens == len(ended(tokenizer, SAID[0])[0])
    assert [one.usage.output_tokens_details.reasoning_tokens for one in heard] == thoughts(tokenizer)
    assert heard[0].usage.total_tokens == heard[0].usage.output_tokens + len(engine.prompts[0])
    assert text(tokenizer, engine.prompts[0]).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_stop_texts_are_told() -> None:
    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_anthropic(endpoint) as client:
            stopped = message_of(client, False, messages=messages, stop_sequences=["x", "th"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "th")
            assert stopped.content[0].text == "so "

    played(play, ["so th"], reason="stop")


def test_answers_at_their_limit() -> None:
    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_anthropic(endpoint) as client:
            long = message_of(client, True, messages=messages)
            assert (long.stop_reason, [block.type for block in long.content]) == ("max_tokens", ["thinking"])
            said = [*messages, long.to_param(), *user("go on")]
            assert message_of(client, False, messages=said).content[0].text == "a"
        with by_openai(endpoint) as client:
            long = client.responses.create(model="m", input="?")
            assert (long.status, long.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    group, *_ = played(play, ["<think> hm", "a", "b"], reason="length")
    assert len(group.rows[0]) == 2, "an answer without an end goes on as others do"


def test_other_conversations_begin_rows() -> None:
    """The row of an answer whose thought is left out is another one, which the template writes."""

    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_anthropic(endpoint) as client:
            first = message_of(client, False, messages=messages)
            told = [block for block in first.content if block.type == "text"]
            history = [*messages, {"role": "assistant", "content": told}, *user("why?")]
            message_of(client, False, messages=history)

    group, engine, tokenizer = played(play, ["<think>\nhm\n</think>\n\nyes", "so"])
    assert [chosen(row) for row in group.rows[0]] == [
        ended(tokenizer, one)[0] for one in ("<think>\nhm\n</think>\n\nyes", "so")
    ]
    assert "<|im_start|>assistant\nyes<|im_end|>" in text(tokenizer, engine.prompts[1])


def test_a_conversation_goes_on_by_another_protocol() -> None:
    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_anthropic(endpoint) as client, by_openai(endpoint) as other:
            first = message_of(client, False, messages=messages).content[0].text
            history: list[Any] = [*messages, {"role": "assistant", "content": first}, *user("and?")]
            second = other.chat.completions.create(model="m", messages=history).choices[0].message.content
            other.responses.create(model="m", input=[*history, {"role": "assistant", "content": second}, *user("so?")])

    check_one_row(*played(play, ["a", "b", "c"]), ["a", "b", "c"])


def test_a_client_may_divide_a_text_itself() -> None:
    """As litellm does, which sends the thought of a chat completion back in a field of its own, with the line breaks."""
    said = ["<think>\nhm\n</think>\n\nso", "<think>\n\n</think>\n\nno", "bye"]
    counted = list[int]()

    def play(messages: Messages, endpoint: Endpoint) -> None:
        history: list[Any] = list(messages)
        with by_openai(endpoint) as client:
            for _ in said:
                answer = client.chat.completions.create(model="m", messages=history)
                content = answer.choices[0].message.content
                counted.append(answer.usage.completion_tokens_details.reasoning_tokens)
                thought, _, rest = content.removeprefix("<think>").rpartition("</think>")
                history += [{"role": "assistant", "content": rest, "reasoning_content": thought}, *user("and?")]

    group, engine, tokenizer = played(play, said)
    check_one_row(group, engine, tokenizer, said)
    assert counted == thoughts(tokenizer, said)


def test_refusals_are_errors_of_each_client() -> None:
    def play(messages: Messages, endpoint: Endpoint) -> None:
        with by_anthropic(endpoint) as client:
            assert client.models.list().data[0] == client.models.retrieve("m")
            with pytest.raises(anthropic.NotFoundError, match="there is only the model 'm'"):
                client.messages.create(model="claude", max_tokens=9, messages=messages)
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: it has") as found:
                client.messages.create(model="m", max_tokens=9, messages=user("ab" * 5000))
            assert found.value.body["error"]["type"] == "invalid_request_error"
            assert client.messages.count_tokens(model="m", messages=user("x" * 5000)).input_tokens > 5000
            with pytest.raises(anthropic.AuthenticationError, match="no sample that is under way has this key"):
                client.with_options(api_key="sk-nobodys").messages.create(model="m", max_tokens=9, messages=messages)
            message_of(client, False, messages=messages)
        with by_openai(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match="this sample has no response 'resp_1'"):
                client.responses.create(model="m", input="?", previous_response_id="resp_1")
            client.responses.create(model="m", input="?")

    group, *_ = played(play, ["a", "b"])
    assert len(group.rows[0]) == 2
