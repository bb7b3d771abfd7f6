"""What a session may do: how many answers it may wait for, how long they are, and until when it is answered."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrl.config import EnvironmentConfig, SamplingParams
from hpcrl.data.tokenizer import decoder
from hpcrl.envs.agents.score import LONGEST_SCORE
from hpcrl.envs.base import Messages, Turn
from hpcrl.rollout.endpoint.session import MOST_OPEN
from hpcrl.rollout.engines.embedded.launch import Embedded
from hpcrl.rollout.generate import conversations
from hpcrl.rollout.worker import WorkerOptions, work
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
from tests.rollout.endpoint.test_streaming import Hesitates, asked, on
from tests.rollout.material import RUN_NAME, TOKEN, wait_for


def test_answers_that_are_waited_for_are_counted() -> None:
    engine = Hesitates("abc")

    def play(messages: Messages, client: Client) -> Turn:
        with asked(client, messages, n=MOST_OPEN) as answer:
            lines = answer.iter_lines()
            next(lines)  # all of them have begun
            refused = client.post(messages=messages)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "answers are waited for" in refused.json()["error"]["message"]
            engine.may_go_on.set()
            assert list(lines)[-2] == "data: [DONE]"
        client.say(messages)
        return Turn([], 1.0, True)

    assert not played(on(engine), play, replace(CONFIG, max_turns=3 * MOST_OPEN)).failures


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
        loop = work(options, embedded, maker, decoder(TOKENIZER), status)
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
