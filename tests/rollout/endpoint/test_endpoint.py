"""Environments that ask the policy at its endpoint: exact tokens, branches, who may ask, and what a program is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.environment import AgentConfig, SkyRLGymConfig
from hpcrl.data.group_file import check_group
from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.envs.base import AgentEnvironment, Endpoint, Messages, Turn
from hpcrl.errors import ConfigError, EngineError, RunError, ServiceError
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.engines.base import Engine
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.runtime.http_server import MAX_BODY
from hpcrl.types import Prompt, Work
from tests.rollout.conftest import WithEngine, runner
from tests.rollout.material import QUICKSTART, logprobs
from tests.rollout.test_transcript import Script
from tests.rows import write_group

TOKENIZER = AutoTokenizer.from_pretrained(QUICKSTART)
CONFIG = GeneratorConfig(
    max_turns=6,
    max_input_length=120,
    sampling_params=SamplingParams(max_generate_length=8, temperature=0.8),
    inference_engine=InferenceEngineConfig(
        backend="transformers", enable_http_endpoint=True, served_model_name="policy"
    ),
)
HALF = b'{"model": "policy", "messages": [{"role": "user", "content": "\\uD800"}]}'
PLAYED: list[Callable[[Messages, Client], Turn]] = []


class Client:
    """What a program knows, and what it may do with it."""

    http = httpx.Client(timeout=60)

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def post(self, path: str = "chat/completions", key: str | None = None, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.endpoint.key}"}
        body = {"model": self.endpoint.model, **body}
        return self.http.post(f"{self.endpoint.base_url}/{path}", json=body, headers=headers)

    def post_bytes(self, body: bytes) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.endpoint.key}"}
        return self.http.post(f"{self.endpoint.base_url}/chat/completions", content=body, headers=headers)

    def chat(self, messages: Messages, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(messages=messages, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def say(self, messages: Messages, **body: Any) -> Messages:
        """Return the conversation with the policy's answer."""
        return [*messages, self.chat(messages, **body)[0]["message"]]


class Plays(AgentEnvironment):
    """Plays as the test says."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._extras = extras

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        return PLAYED[-1](messages, Client(endpoint))


class NeverBegins(Plays):
    def init(self, messages: Messages) -> Messages:  # noqa: ARG002
        raise ServiceError("no sandbox within 600 s")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def with_embedded(embedded: Embedded, models: list[Path]) -> WithEngine[Any]:
    return runner(embedded, models[0])


def played(
    with_engine: WithEngine[Group],
    play: Callable[[Messages, Client], Turn],
    config: GeneratorConfig = CONFIG,
    environment: EnvironmentConfig = EnvironmentConfig(),  # noqa: B008  frozen
    n_samples: int = 1,
    made: type[Plays] = Plays,
) -> Group:
    """Return a group whose samples were played by a function."""
    name = f"{__name__}:{made.__name__}"
    item = Work("g7", "train", Prompt("row3", [user("sort: bca")], name, {}, "letters"), n_samples, 40)
    PLAYED.append(play)

    async def generate(engine: Engine) -> Group:
        async with serving(config, TOKENIZER, 0) as server:
            return await GroupGenerator(engine, TOKENIZER, config, environment, server=server).generate(item)

    return with_engine(generate)


def chosen(row: Any) -> list[list[int]]:
    """Return the stretches of a row that are trained."""
    stretches, before = list[list[int]](), 0.0
    for token_id, mask in zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True):
        if mask:
            stretches[-1:] = [[*stretches[-1], token_id]] if before else [*stretches[-1:], [token_id]]
        before = mask
    return stretches


def check_logprobs(model: Path, row: Any) -> None:
    """Compare the log-probabilities of what is trained with transformers'."""
    ids, trained = row.token_ids.tolist(), row.loss_mask > 0
    expected = np.asarray(logprobs(model, ids[:1], ids[1:], temperature=0.8))
    np.testing.assert_allclose(row.rollout_logprobs[1:][trained[1:]], expected[trained[1:]], atol=1e-3)
    assert (row.versions == np.where(trained, 0, -1)).all()


def check_file(group: Group, folder: Path) -> None:
    """Let the trainer's reader find the group right."""
    path = folder / "g7.safetensors"
    meta = write_group(path, group.samples, group.meta(0, "g7.safetensors"))
    check_group(path, meta)


def test_turns_share_their_tokens_exactly(with_embedded: WithEngine[Any], models: list[Path], tmp_path: Path) -> None:
    told = list[Messages]()

    def play(messages: Messages, client: Client) -> Turn:
        for word in ("abc", "cab"):
            messages = [*client.say(messages), user(word)]
        told.append(client.say(messages))
        return Turn([], 0.5, True, {"words": 2.0})

    group = played(with_embedded, play)
    ((row,),) = group.rows
    assert not group.failures
    assert len(chosen(row)) == 3
    check_logprobs(models[0], row)
    texts = [TOKENIZER.decode(said, skip_special_tokens=True) for said in chosen(row)]
    assert texts == [one["content"] for one in told[0] if one["role"] == "assistant"]
    opening = TOKENIZER.apply_chat_template([user("sort: bca")], add_generation_prompt=True, return_dict=False)
    assert row.token_ids[: len(opening)].tolist() == opening
    assert (row.rewards.sum(), row.rewards[-1], row.env_metrics) == (0.5, 0.5, {"words": 2.0})
    assert group.conversations[0] == told[0][1:]
    check_file(group, tmp_path)


def test_a_rewritten_past_is_a_further_row_and_nothing_is_trained_twice(
    with_embedded: WithEngine[Any], models: list[Path], tmp_path: Path
) -> None:
    def play(messages: Messages, client: Client) -> Turn:
        first = client.say(messages)
        client.say([*first, user("abc")])
        client.say([*first, user("cba")])  # the same past, another question
        client.say([*messages, {"role": "assistant", "content": "ab"}, user("abc")])  # it has never said that
        return Turn([], 1.0, True)

    group = played(with_embedded, play)
    (rows,) = group.rows
    assert [len(chosen(row)) for row in rows] == [2, 1, 1]
    first = chosen(rows[0])[0]
    begun = len(TOKENIZER.apply_chat_template([user("sort: bca")], add_generation_prompt=True, return_dict=False))
    assert rows[1].token_ids[begun : begun + len(first)].tolist() == first
    for row in rows:
        check_logprobs(models[0], row)
    assert [row.rewards.sum() for row in rows] == [0.0, 0.0, 1.0]
    meta = group.meta(0, "path")
    assert (meta.owners, meta.rewards) == ([0] * 3, [1.0])
    turns = meta.samples[0].turns
    assert [[(turn.end, turn.reward) for turn in row] for row in turns][1:] == [
        [(len(row.token_ids), reward)] for row, reward in zip(rows[1:], (0.0, 1.0), strict=True)
    ]
    assert [turn.anchor for row in turns for turn in row] == [0, 1, 2, 3], "what is new in each request"
    check_file(group, tmp_path)


def test_choices_are_rows_and_log_probabilities_are_those_of_the_tokens(with_embedded: WithEngine[Any]) -> None:
    heard = list[dict[str, Any]]()

    def play(messages: Messages, client: Client) -> Turn:
        heard.extend(client.chat(messages, n=3, logprobs=True, max_tokens=5))
        return Turn([], 1.0, True)

    group = played(with_embedded, play)
    (rows,) = group.rows
    assert len({one["message"]["content"] for one in heard}) > 1
    for row, choice in zip(rows, heard, strict=True):
        (said,) = chosen(row)
        assert len(said) <= 5
        assert choice["finish_reason"] == ("stop" if said[-1] == TOKENIZER.eos_token_id else "length")
        told = choice["logprobs"]["content"]
        assert [one["token"] for one in told] == [TOKENIZER.decode([token]) for token in said]
        np.testing.assert_allclose([one["logprob"] for one in told], row.rollout_logprobs[row.loss_mask > 0], atol=1e-6)


def test_events_and_completions_say_the_same(with_embedded: WithEngine[Any]) -> None:
    def play(messages: Messages, client: Client) -> Turn:
        streamed = client.post(messages=messages, stream=True, stream_options={"include_usage": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        *events, done = [line.removeprefix("data: ") for line in streamed.text.strip().split("\n\n")]
        found = [json.loads(event) for event in events]
        said = "".join(one["choices"][0]["delta"].get("content", "") for one in found if one["choices"])
        assert (done, found[-1]["choices"]) == ("[DONE]", [])
        assert found[-1]["usage"]["total_tokens"] > found[-1]["usage"]["prompt_tokens"] > 0
        history = [*messages, {"role": "assistant", "content": said}, user("abc")]
        client.say(history)  # goes on from what was streamed
        text = client.post("completions", prompt="abc").json()["choices"][0]["text"]
        client.post("completions", prompt=f"abc{text}cb", logprobs=0)
        client.post("completions", prompt=TOKENIZER("cab")["input_ids"])
        return Turn([], 1.0, True)

    group = played(with_embedded, play)
    assert not group.failures
    assert [len(chosen(row)) for row in group.rows[0]] == [2, 2, 1]
    assert group.rows[0][2].token_ids[:3].tolist() == TOKENIZER("cab")["input_ids"]


def test_token_ids_go_on_from_the_answer_with_most_of_them() -> None:
    """Not from one whose prompt was longer and whose response was shorter."""
    a, b, c = TOKENIZER("abc")["input_ids"]
    engine: Any = Script([([c, a, b], "length"), ([a], "length"), ([b], "length")])

    def play(_: Messages, client: Client) -> Turn:
        for prompt in ([a, b], [a, b, c], [a, b, c, a, b, c]):
            client.post("completions", prompt=prompt)
        return Turn([], 1.0, True)

    group = played(lambda generate: asyncio.run(generate(engine)), play)
    assert not group.failures
    assert sorted(map(chosen, group.rows[0]), key=len) == [[[a]], [[c, a, b], [b]]]


def test_who_may_ask_and_how_much(with_embedded: WithEngine[Any]) -> None:
    keys, statuses = list[str](), dict[str, int]()

    def play(messages: Messages, client: Client) -> Turn:
        keys.append(client.endpoint.key)
        requests = {
            "a wrong key": lambda: client.post(key="sk-nobodys", messages=messages),
            "another model": lambda: client.post(messages=messages, model="gpt"),
            "another path": lambda: client.post("embeddings", input="x"),
            "no messages": lambda: client.post(messages=[]),
            "half a character": lambda: client.post_bytes(HALF),
            "no JSON": lambda: client.post_bytes(b"{"),
            "an image": lambda: client.post(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "too long a prompt": lambda: client.post(messages=[user("abc" * 200)]),
            "too large a body": lambda: client.post(messages=messages, filler="x" * MAX_BODY),
            "too many choices": lambda: client.post(messages=messages, n=7),
            "special tokens in tools": lambda: client.post(messages=messages, tools=[{"name": TOKENIZER.eos_token}]),
        }
        statuses.update({name: ask().status_code for name, ask in requests.items()})
        client.say(messages)
        return Turn([], 1.0, True)

    group = played(with_embedded, play)
    assert not group.failures
    assert statuses == {
        "a wrong key": 401,
        "another model": 404,
        "another path": 404,
        "no messages": 400,
        "half a character": 400,
        "no JSON": 400,
        "an image": 400,
        "too long a prompt": 400,
        "too large a body": 413,
        "too many choices": 400,
        "special tokens in tools": 400,
    }
    assert group.samples[0].stop_reason == "length", "a prompt was too long"

    def late(messages: Messages, client: Client) -> Turn:
        assert client.post(key=keys[0], messages=messages).status_code == 401, "the key of another server's sample"
        client.say(messages)
        return Turn([], 1.0, True)

    assert not played(with_embedded, late).failures


def test_samples_do_not_hear_of_each_other(with_embedded: WithEngine[Any]) -> None:
    """What one has said is no past of another, though both have the same messages."""
    together, said, lock = threading.Barrier(2, timeout=20), list[Messages](), threading.Lock()

    def play(messages: Messages, client: Client) -> Turn:
        own = client.say(messages)
        with lock:
            said.append(own)
        together.wait()
        other = next(one for one in said if one is not own)
        client.say([*other, user("abc")])
        return Turn([], 1.0, True)

    group = played(with_embedded, play, n_samples=2)
    assert said[0] != said[1]
    assert [[len(chosen(row)) for row in rows] for rows in group.rows] == [[1, 1], [1, 1]]


def test_a_sample_that_nobody_wants_is_told_so(with_embedded: WithEngine[Any]) -> None:
    begun, heard = threading.Event(), list[Any]()
    over = threading.Event()

    def play(messages: Messages, client: Client) -> Turn:
        client.say(messages)
        begun.set()
        client.endpoint.ended.wait(20)
        late = client.post(messages=messages)
        heard.extend([late.status_code, late.headers["retry-after"], late.json()["error"]["code"]])
        over.set()
        return Turn([], 1.0, True)

    async def stop(engine: Engine) -> None:
        item = Work("g7", "train", Prompt("row3", [user("abc")], f"{__name__}:Plays", {}, "letters"), 1, 40)
        async with serving(CONFIG, TOKENIZER, 0) as server:
            generator = GroupGenerator(engine, TOKENIZER, CONFIG, EnvironmentConfig(), server=server)
            group = asyncio.create_task(generator.generate(item))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            group.cancel()
            while not over.is_set():
                await asyncio.sleep(0.01)

    PLAYED.append(play)
    with_embedded(stop)
    assert heard == [429, "30", "session_over"]


def test_a_program_that_fails_takes_too_long_or_asks_nothing_has_failed(with_embedded: WithEngine[Any]) -> None:
    ended, number = list[bool](), iter(range(9))

    def play(messages: Messages, client: Client) -> Turn:
        match next(number):
            case 0:
                client.say(messages)
                raise ZeroDivisionError("no reward")
            case 1:
                client.say(messages)
                ended.append(client.endpoint.ended.wait(20))
            case 2:
                return Turn([], 9.0, True)
        client.say(messages)
        return Turn([], 1.0, True)

    group = played(with_embedded, play, environment=EnvironmentConfig(timeout_seconds=2.0), n_samples=4)
    assert len(group.failures) == 3
    words = (
        "raised ZeroDivisionError: no reward",
        "longer than environment.timeout_seconds (2 s)",
        "had asked the policy nothing",
    )
    for word in words:
        assert any(word in failure for failure in group.failures), group.failures
    assert sorted(row.stop_reason == "failed" for row in group.samples) == [False, True, True, True]
    assert [row.rewards.sum() for row in group.samples] == [1.0] * 4, "the failed count as the mean of the others"
    assert sum(bool(row.loss_mask.any()) for row in group.samples) == 1
    assert ended == [True]


def test_a_client_that_leaves_gets_no_turn(with_embedded: WithEngine[Any]) -> None:
    def play(messages: Messages, client: Client) -> Turn:
        headers = {"authorization": f"Bearer {client.endpoint.key}"}
        body = {"model": "policy", "messages": messages}
        with pytest.raises(httpx.TimeoutException):
            client.http.post(f"{client.endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=0.01)
        client.say([user("abc")])
        return Turn([], 1.0, True)

    long = replace(
        CONFIG, sampling_params=SamplingParams(max_generate_length=150, additional_kwargs={"ignore_eos": True})
    )
    group = played(with_embedded, play, long)
    assert not group.failures
    assert len(group.rows[0]) == 1


class Broken:
    """An engine that has failed."""

    version = 0

    async def generate(self, *_: object) -> list[Any]:
        raise EngineError("rollout-0: the engine died")


def test_an_engine_that_fails_ends_the_group_and_not_the_sample_alone() -> None:
    heard = list[Any]()

    def play(messages: Messages, client: Client) -> Turn:
        failed = client.post(messages=messages)
        heard.extend([failed.status_code, failed.json()["error"]["code"], client.endpoint.ended.is_set()])
        return Turn([], 1.0, True)

    with pytest.raises(EngineError, match="the engine died"):
        played(lambda generate: asyncio.run(generate(Broken())), play)
    assert heard == [500, "engine_failed", True]


def test_what_is_lacking_is_said(with_embedded: WithEngine[Any]) -> None:
    silent = replace(CONFIG, inference_engine=InferenceEngineConfig(backend="transformers"))
    with pytest.raises(ConfigError, match=r"set generator\.inference_engine\.enable_http_endpoint=true"):
        played(with_embedded, lambda *_: Turn([], 1.0, True), silent)
    taken = InferenceEngineConfig(enable_http_endpoint=True, http_endpoint_host="203.0.113.7")
    with pytest.raises(RunError, match=r"http_endpoint_host.*203\.0\.113\.7: is not to be had"):
        played(with_embedded, lambda *_: Turn([], 1.0, True), replace(CONFIG, inference_engine=taken))


HANGS = """
import json, os, sys, time, urllib.request
body = json.dumps({"model": os.environ["HPCRL_MODEL"], "messages": json.load(open(os.environ["HPCRL_ROW"]))["prompt"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]["content"]
try:
    os.mkdir(sys.argv[1])
except FileExistsError:
    json.dump({"reward": len(said) + 1}, open(os.environ["HPCRL_REWARD"], "w"))
else:
    time.sleep(60)
"""


def test_a_program_that_hangs_is_ended_and_its_sample_counts_as_the_others(
    with_embedded: WithEngine[Any], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(HANGS)
    command = ["python", "-S", str(tmp_path / "agent.py"), str(tmp_path / "taken")]
    environment = EnvironmentConfig(skyrl_gym=SkyRLGymConfig(agent=AgentConfig(command=command)), timeout_seconds=3.0)
    item = Work("g7", "train", Prompt("row3", [user("sort: bca")], "agent", {}, "letters"), 3, 40)

    async def generate(engine: Engine) -> Group:
        async with serving(CONFIG, TOKENIZER, 0) as server:
            return await GroupGenerator(engine, TOKENIZER, CONFIG, environment, server=server).generate(item)

    group = with_embedded(generate)
    assert len(group.failures) == 1
    assert "took longer than environment.timeout_seconds (3 s)" in group.failures[0]
    rewards = [row.rewards.sum() for row in group.samples if row.stop_reason != "failed"]
    assert rewards == [
        len(text) + 1 for row, text in zip(group.samples, group.texts, strict=True) if row.loss_mask.any()
    ]
    assert [row.rewards.sum() for row in group.samples if row.stop_reason == "failed"] == [np.mean(rewards)]


def test_an_agent_that_cannot_begin_does_not_play(with_engine: WithEngine[Any]) -> None:
    def play(*_: Any) -> Turn:
        raise AssertionError("it has not begun")

    group = played(with_engine, play, made=NeverBegins)
    assert group.failures[0].endswith("no sandbox within 600 s")
