"""A reward service over HTTP: by hpcrl's own client, by what others may send, and as a process that is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import RemoteRewardConfig, RewardServiceConfig
from hpcrl.envs.rewards.remote import RemoteRewards, exported
from hpcrl.envs.rewards.response import Response
from hpcrl.errors import ServiceError
from hpcrl.reward_service.scoring import Scoring
from hpcrl.runtime.http_server import Bearer
from tests.reward_service.material import Running, Slow, load, running, write_reward_model

PROMPT = [{"role": "user", "content": "sort: dbca"}]
TOKEN = {"authorization": "Bearer s3cret"}
HTTP = httpx.Client(verify=False, timeout=60)  # one for all: each loads certificates, which nothing here has
REMOTE = RemoteRewardConfig(
    enable=True, service=RewardServiceConfig(model="tiny"), batch_size=4, clip_min=-100.0, clip_max=100.0
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def refusing() -> Iterator[Running]:
    """A service that is asked for nothing it could score."""
    model = Slow()
    with running(model, Bearer("s3cret")) as service:
        yield service
        model.may.release(100)


@pytest.fixture
def slow() -> Iterator[tuple[Running, Slow]]:
    """A service of a model that waits for the test, with room for ten responses."""
    model = Slow()
    with running(model, Bearer("s3cret"), lambda one: Scoring(one, most_waiting=10, kept_s=1.5)) as service:
        yield service, model
        model.may.release(100)


def client(url: str, token: str = "s3cret", seconds: float = 60.0) -> RemoteRewards:
    variables = {"REMOTE_REWARD_ENQUEUE_URL": f"{url}/enqueue", "REMOTE_REWARD_FETCH_URL": f"{url}/fetch"}
    environment = EnvironmentConfig(remote_reward=REMOTE, timeout_seconds=seconds)
    service = exported(environment, variables | {"REMOTE_REWARD_TOKEN": token})
    return RemoteRewards(REMOTE, lambda: service)


def enqueue(url: str, *texts: str, **more: Any) -> httpx.Response:
    body = {"media_type": "text", "messages": [PROMPT] * len(texts), "completions": texts, **more}
    return HTTP.post(f"{url}/enqueue", content=json.dumps(body).encode() + b"\n", headers=TOKEN)


def fetch(url: str, uuid: str, **more: str) -> httpx.Response:
    return HTTP.post(f"{url}/fetch", data={"uuid": uuid, "type": "reward_model", **more}, headers=TOKEN)


def test_hpcrls_own_client_gets_the_scores_of_the_model(path: Path) -> None:
    model = load(path)
    with running(model, Bearer("s3cret")) as service:
        for text in ("abcd", "dcba"):
            (expected,) = load(path).scores([model.tokens(PROMPT, text)])
            turn = client(service.url)(Response(text=text, messages=PROMPT))
            assert turn.reward == pytest.approx(expected, abs=1e-5)
            assert turn.metrics == {"reward_model": pytest.approx(expected, abs=1e-5)}
        health = HTTP.get(f"{service.url}/health", headers=TOKEN)
        assert health.json() == {
            "status": "serving", "model": "tiny", "reward": "reward_model", "waiting": 0, "scored": 2,
        }  # fmt: skip
        with pytest.raises(ServiceError, match=r"answered 400 .*takes at most"):
            client(service.url)(Response(text="ab" * 1000, messages=PROMPT))
    assert service.told[0] == {"waiting": 0, "scored": 0}
    assert not service.errors


def test_strangers_are_refused_on_every_route(path: Path) -> None:
    with running(load(path), Bearer("s3cret")) as service:
        for route in ("enqueue", "fetch", "health", "nothing"):
            for headers in ({}, {"authorization": "Bearer wr0ng"}, {"authorization": "s3cret"}):
                assert HTTP.post(f"{service.url}/{route}", headers=headers).status_code == 401
                assert HTTP.get(f"{service.url}/{route}", headers=headers).status_code == 401
        with pytest.raises(ServiceError, match="answered 401"):
            client(service.url, token="wr0ng")(Response(text="a", messages=PROMPT))
        assert HTTP.get(f"{service.url}/nothing", headers=TOKEN).status_code == 404
        assert HTTP.get(f"{service.url}/fetch", headers=TOKEN).status_code == 404
        with httpx.Client() as session:
            large = session.post(f"{service.url}/enqueue", content=b"x" * (17 << 20), headers=TOKEN)
        assert large.status_code == 413


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"completions": ["\\ud800"], "prompts": ["a"]}', "expected JSON"),
        (b'{"completions": ["\xed\xa0\x80"], "prompts": ["a"]}', "expected JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"completions": ["a"], "messages": [[]]}\nPNG', "expected texts"),
        (b'{"media_type": "image"}', "found 'image'"),
        (b'{"reward_fn": {"ocr": 1.0}}', "the reward 'reward_model' alone, found {'ocr': 1.0}"),
        (b'{"completions": []}', "completions: expected a list of texts"),
        (b'{"completions": [3]}', "completions: expected a list of texts"),
        (b'{"completions": ["a"]}', "expected messages"),
        (b'{"completions": ["a"], "prompts": ["b", "c"]}', "expected 1 prompts"),
        (b'{"completions": ["a"], "messages": [[{"role": "user"}]]}', "expected objects with a role and a content"),
        (b'{"completions": ["a"], "messages": [[{"role": "user", "content": "<|end"}, 3]]}', "expected objects"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_a_reason(refusing: Running, body: bytes, words: str) -> None:
    answer = HTTP.post(f"{refusing.url}/enqueue", content=body, headers=TOKEN)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_scores_come_later_are_kept_for_a_while_and_asked_for_by_name(slow: tuple[Running, Slow]) -> None:
    service, model = slow
    uuid = enqueue(service.url, "a", "bcd").json()["uuid"]
    assert fetch(service.url, uuid).status_code == 425
    assert fetch(service.url, uuid, type="ocr").status_code == 400
    assert HTTP.post(f"{service.url}/fetch", data={"type": "reward_model"}, headers=TOKEN).status_code == 400
    model.may.release()
    deadline = time.monotonic() + 10
    while (answer := fetch(service.url, uuid)).status_code == 425 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert answer.json() == {"scores": {"overall_reward": [2.0, 4.0]}}
    assert fetch(service.url, uuid).status_code == 200, "an answer may get lost"
    time.sleep(1.6)
    assert fetch(service.url, uuid).status_code == 410
    assert fetch(service.url, "unknown").status_code == 410


def test_prompts_are_enough_for_a_client_that_has_no_messages(slow: tuple[Running, Slow]) -> None:
    service, model = slow
    model.may.release()
    body = json.dumps({"prompts": ["sort"], "completions": ["ab"]}).encode()
    uuid = HTTP.post(f"{service.url}/enqueue", content=body, headers=TOKEN).json()["uuid"]
    time.sleep(0.2)
    assert fetch(service.url, uuid).json() == {"scores": {"overall_reward": [3.0]}}


def test_too_many_are_sent_away_and_those_that_wait_are_scored_together(slow: tuple[Running, Slow]) -> None:
    service, model = slow
    first = enqueue(service.url, "a")
    time.sleep(0.2)  # it is computed
    waiting = [enqueue(service.url, "ab", "abc") for _ in range(5)]
    full = enqueue(service.url, "a")
    assert (full.status_code, full.json()["error"]) == (503, "11 responses wait to be scored; ask again later")
    assert {answer.status_code for answer in (first, *waiting)} == {200}
    model.may.release(2)
    deadline = time.monotonic() + 10
    while len(model.passes) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert model.passes == [[2], [3, 4] * 5]
    assert enqueue(service.url, "a").status_code == 200


def test_a_stop_request_lets_what_waits_be_scored_and_takes_nothing_new(slow: tuple[Running, Slow]) -> None:
    service, model = slow
    uuid = enqueue(service.url, "ab").json()["uuid"]
    service.asked.set()
    time.sleep(0.3)
    assert enqueue(service.url, "a").status_code == 503
    assert HTTP.get(f"{service.url}/health", headers=TOKEN).json()["status"] == "stopping"
    model.may.release()
    time.sleep(0.5)
    assert fetch(service.url, uuid).json() == {"scores": {"overall_reward": [3.0]}}
    service.stop()
    assert not service.errors


def test_a_pass_that_fails_ends_the_service_with_its_error(slow: tuple[Running, Slow]) -> None:
    service, model = slow
    model.may.release()
    enqueue(service.url, "x" * 60)
    assert service.thread
    service.thread.join(20)
    assert [str(error) for error in service.errors] == ["a row is too long for this device"]


def test_the_command_serves_until_it_is_asked_to_stop(path: Path) -> None:
    command = [sys.executable, "-m", "hpcrl.cli.main", "reward", "serve", str(path), "--model-dtype", "float32"]
    nobody = {name: value for name, value in os.environ.items() if name != "REMOTE_REWARD_TOKEN"}
    refused = subprocess.run(command, env=nobody, capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, "needs the variable REMOTE_REWARD_TOKEN" in refused.stderr) == (2, True)
    environment = {**nobody, "REMOTE_REWARD_TOKEN": "s3cret"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            said = process.stdout.readline() + process.stdout.readline()
            found = re.search(r"ENQUEUE_URL=(\S+)/enqueue", said)
            assert found, said
            assert "s3cret" not in said
            model = load(path)
            (expected,) = model.scores([model.tokens(PROMPT, "abcd")])
            assert client(found[1])(Response(text="abcd", messages=PROMPT)).reward == pytest.approx(expected, abs=1e-5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
