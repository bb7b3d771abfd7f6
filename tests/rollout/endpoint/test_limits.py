"""What a session may do: how many answers it may wait for, how long they are, and until when it is answered."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from openai import NotFoundError, OpenAI

from hpcrl.config import EnvironmentConfig, SamplingParams
from hpcrl.data.tokenizer import decoder
from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.envs.agents.score import LONGEST_SCORE
from hpcrl.envs.base import Messages, Turn
from hpcrl.rollout.endpoint.session import AT_ONCE, MOST_OPEN, PER_SECOND
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.generate import conversations
from hpcrl.rollout.worker import WorkerOptions, run_worker
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.types import Prompt, Work
from tests.rollout.conftest import WithEngine
from tests.rollout.controller import FakeController
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
from tests.rollout.endpoint.test_streaming import Hesitates, on
from tests.rollout.material import RUN_NAME, TOKEN, wait_for


class Counts(Hesitates):
    """An engine that counts the answers that it is asked for at a time."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.open = self.most = 0

    async def generate(self, *asked: object) -> list[Generation]:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            return await super().generate(*asked)
        finally:
            self.open -= 1


def test_more_requests_than_are_answered_at_a_time_wait() -> None:
    """Of a program with a plain OpenAI client, which asks 128 times in parallel and does not ask again."""
    engine, requests = Counts("abc"), 4 * MOST_OPEN

    def play(messages: Messages, client: Client) -> Turn:
        with (
            OpenAI(base_url=client.endpoint.base_url, api_key=client.endpoint.key, max_retries=0) as openai,
            ThreadPoolExecutor(requests) as threads,
        ):

            def asks(_: int) -> str | None:
                told = openai.chat.completions.create(model=client.endpoint.model, messages=cast(Any, messages))
                return told.choices[0].message.content

            answers = threads.map(asks, range(requests))
            wait_for(lambda: engine.open == MOST_OPEN, 60, "too few are generated")
            engine.may_go_on.set()
            assert set(answers) == {"abc"}
        return Turn([], 1.0, True)

    began = time.monotonic()
    group = played(on(engine), play, replace(CONFIG, max_turns=requests))
    assert not group.failures
    assert engine.most == MOST_OPEN
    assert time.monotonic() - began > (requests - AT_ONCE) / PER_SECOND, "no more are read per second"


def test_a_model_is_retrieved_by_its_name(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    named = replace(CONFIG.inference_engine, served_model_name="own/policy 1")

    def play(messages: Messages, client: Client) -> Turn:
        with OpenAI(base_url=client.endpoint.base_url, api_key=client.endpoint.key) as openai:
            (listed,) = openai.models.list().data
            assert openai.models.retrieve("own/policy 1") == listed
            assert listed.id == client.endpoint.model
            with pytest.raises(NotFoundError, match="there is only the model 'own/policy 1'"):
                openai.models.retrieve("other")
        client.say(messages)
        return Turn([], 1.0, True)

    assert not played(with_embedded, play, replace(CONFIG, inference_engine=named)).failures


def test_turns_and_requests_are_counted(with_embedded: WithEngine[Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("hpcrl.rollout.endpoint.session.PER_SECOND", 2.0)

    def play(messages: Messages, client: Client) -> Turn:
        began = time.monotonic()
        for _ in range(2):
            client.say(messages)
        over = client.post(messages=messages)
        assert (over.status_code, over.json()["error"]["code"]) == (400, "max_turns")
        headers = {"authorization": f"Bearer {client.endpoint.key}"}
        models = f"{client.endpoint.base_url}/models"
        asked = [client.http.get(models, headers=headers) for _ in range(int(AT_ONCE))]
        assert {one.status_code for one in asked} == {200}
        assert time.monotonic() - began > 1.4, "three were for answers, and as many of these wait"
        assert asked[0].json()["data"][0]["id"] == "policy"
        return Turn([], 1.0, True)

    assert not played(with_embedded, play, replace(CONFIG, max_turns=2)).failures


def test_what_waits_ends_with_the_sample() -> None:
    engine, heard, told = Hesitates("abc"), list[int](), threading.Event()

    def play(messages: Messages, client: Client) -> Turn:
        with ThreadPoolExecutor(MOST_OPEN + 1) as threads:
            asked = [threads.submit(client.post, messages=messages) for _ in range(MOST_OPEN + 1)]
            assert client.endpoint.ended.wait(60)
            heard.extend(one.result().status_code for one in asked)
            told.set()
        return Turn([], 1.0, True)

    limited = EnvironmentConfig(timeout_seconds=2)
    group = played(on(engine), play, replace(CONFIG, max_turns=2 * MOST_OPEN), environment=limited)
    assert group.failures
    assert told.wait(60), "the program is still at work"
    assert heard == [429] * (MOST_OPEN + 1)


def test_an_answer_is_no_longer_than_the_run_lets_it_be(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    def play(messages: Messages, client: Client) -> Turn:
        client.chat(messages, max_tokens=100_000)
        client.chat(messages, max_completion_tokens=3)
        return Turn([], 1.0, True)

    sampling = SamplingParams(max_generate_length=8, additional_kwargs={"ignore_eos": True})
    group = played(with_embedded, play, replace(CONFIG, sampling_params=sampling))
    assert [len(said) for row in group.rows[0] for said in chosen(row)] == [8, 3]


def test_a_score_is_small(with_embedded: WithEngine[Any]) -> None:  # noqa: F811
    def play(messages: Messages, client: Client) -> Turn:
        scored = client.endpoint.expect_score()
        assert client.post("score", reward=1.0, note="x" * LONGEST_SCORE).status_code == 400
        assert not scored.done()
        client.say(messages)
        assert client.post("score", reward=0.5).status_code == 200
        return scored.result(0)

    assert played(with_embedded, play).raw_rewards == [0.5]


def test_a_sample_that_would_be_too_stale_is_told_so(embedded: Embedded, tmp_path: Path) -> None:
    """The controller says that nobody wants its group any more; its program hears 429, and the worker goes on."""
    heard, said, over = list[tuple[int, str]](), threading.Event(), threading.Event()

    def play(messages: Messages, client: Client) -> Turn:
        client.say(messages)
        said.set()
        assert client.endpoint.ended.wait(60)
        late = client.post(messages=[user("abc")])
        heard.append((late.status_code, late.json()["error"]["code"]))
        over.set()
        return Turn([], 1.0, True)

    PLAYED.append(play)
    run = Run(tmp_path / RUN_NAME)
    write_text(run.token, TOKEN + "\n", mode=0o600)
    item = Work("g1", "train", Prompt("row", [user("sort: bca")], f"{Client.__module__}:Plays", {}, "letters"), 1, 40)
    options = WorkerOptions(run=run, attempt=1, replica=0, capacity=1, n_samples=1, dump_evals=False)
    status = StatusWriter(run, "rollout-0", 1)
    with FakeController().served(run, 1) as controller:
        controller.work.append(item)
        maker = conversations(TOKENIZER, CONFIG, EnvironmentConfig())
        loop = run_worker(options, embedded, maker, decoder(TOKENIZER), status)
        worker = threading.Thread(target=lambda: asyncio.run(loop))
        worker.start()
        try:
            assert said.wait(60)
            controller.unwanted = ["g1"]
            assert over.wait(60)
            wait_for(lambda: controller.claims[-1]["holding"] == [], 30, "it still holds g1")
        finally:
            controller.stop = "finished"
            worker.join(60)
    assert heard == [(429, "session_over")]
    assert not controller.completed
