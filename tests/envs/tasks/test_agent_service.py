"""A service that plays samples: what it is asked, what it may answer, and when it is asked again or told that a sample is over."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import AgentConfig, AgentServiceConfig, SkyRLGymConfig
from hpcrl.envs.base import Endpoint, Turn
from hpcrl.envs.registry import common_extras, make_environment
from hpcrl.envs.tasks.agent import Agent
from hpcrl.errors import ConfigError, ServiceError, UserCodeError
from tests.envs.server import Answer, Asked, Raw, Server, serving
from tests.paths import ROOT

SCHEMA = json.loads((ROOT / "docs" / "agent_service.schema.json").read_text())
MESSAGES = [{"role": "user", "content": "sort: cba — é"}]
SCORE = {"reward": 0.5, "metrics": {"turns": 3}}
KEY = "the-key-of-this-sample"


def conforms(value: Any, name: str) -> None:
    jsonschema.validate(value, {"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


def played(
    url: str,
    seconds: float = 20.0,
    ended: threading.Event | None = None,
    scored: Future[Turn] | None = None,
    **settings: Any,
) -> Turn:
    gym = SkyRLGymConfig(agent=AgentConfig(service=AgentServiceConfig(url=url, **settings)))
    environment = EnvironmentConfig(skyrl_gym=gym, timeout_seconds=seconds, custom={"a": 1})
    made = make_environment("agent", {**common_extras(environment, 4), "level": 3})
    assert isinstance(made, Agent)
    scored = scored or Future()
    endpoint = Endpoint("http://127.0.0.1:9/v1", KEY, "policy", ended or threading.Event(), lambda: "", lambda: scored)
    return made.play(MESSAGES, endpoint)


def answers(*given: tuple[int, Any] | Raw) -> Answer:
    """Return what gives these answers to POST, one after the other."""
    left: Iterator[tuple[int, Any] | Raw] = iter(given)
    return lambda asked: (204, b"") if asked.method == "DELETE" else next(left)


def posts(server: Server) -> list[Asked]:
    return [asked for asked in server.asked if asked.method == "POST"]


def test_what_a_service_is_asked(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret of the service\n")
    (tmp_path / "token").chmod(0o600)
    conforms(SCORE, "score")
    with serving(answers((200, SCORE))) as server:
        turn = played(f"{server.url}/play?pool=1", token_file=str(tmp_path / "token"))
    assert turn == Turn([], 0.5, True, {"turns": 3})
    (asked,) = server.asked
    conforms(asked.json, "request")
    assert asked.path == "/play?pool=1"
    assert asked.headers["authorization"] == "Bearer secret of the service"
    told = {name: value for name, value in asked.json.items() if name != "session"}
    assert told == {
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": KEY,
        "model": "policy",
        "timeout_seconds": 20.0,
        "row": {"level": 3, "max_turns": 4, "custom": {"a": 1}, "prompt": MESSAGES},
    }


def test_a_score_may_be_posted_later() -> None:
    scored = Future[Turn]()
    timer = threading.Timer(0.3, scored.set_result, [Turn([], 2.0, True)])
    with serving(answers((202, {}))) as server:
        timer.start()
        assert played(server.url, scored=scored).reward == 2.0
    assert len(server.asked) == 1


def test_a_service_that_cannot_begin_is_asked_again() -> None:
    with serving(answers((503, "loading"), (429, ""), (200, SCORE))) as server:
        assert played(server.url).reward == 0.5
    assert [asked.json["session"] for asked in server.asked] == [server.asked[0].json["session"]] * 3


def test_a_service_that_does_not_come_is_given_up() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:\d+/play .*cannot be reached .*, after \d tries in \d s"):
        played(f"http://127.0.0.1:{port}/play?token=x", seconds=5.0)
    with serving(lambda _: (503, "full")) as server, pytest.raises(ServiceError, match=r"answered 503 .*full.*, after"):
        played(server.url, seconds=5.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, b"broken"), "it answered 500 'broken'"),
        ((401, f"who is {KEY}".encode()), "it answered 401 'who is …'"),
        ((200, b"no json"), 'expected 200 and JSON such as {"reward": 1.0'),
        ((200, {"reward": True}), "found|expected 200"),
        ((200, {"reward": 1, "metrics": {"a": "b"}}), "expected 200"),
        ((200, {"reward": 1, "metrics": {f"m{number}": 1 for number in range(65)}}), "at most 64 metrics"),
        ((200, b'{"reward": NaN}'), "expected 200"),
        ((200, b" " * 70000), "expected 200"),
        (Raw(lambda _: None), "ended the connection without an answer"),
        (
            Raw(lambda connection: connection.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b")),
            r"its answer is compressed \('gzip'\)",
        ),
        (
            Raw(lambda connection: connection.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")),
            "without an answer",
        ),
    ],
)
def test_what_may_have_begun_is_not_asked_again(answer: tuple[int, Any] | Raw, words: str) -> None:
    with serving(answers(answer)) as server, pytest.raises(ServiceError, match=words):
        played(server.url)
    assert len(posts(server)) == 1


@pytest.mark.parametrize("accepts", [False, True])
def test_a_service_is_told_of_a_sample_that_is_over(accepts: bool) -> None:
    ended, told = threading.Event(), threading.Event()

    def answer(asked: Asked) -> tuple[int, Any]:
        if asked.method == "DELETE":
            told.set()
            return 204, b""
        ended.set()
        if not accepts:
            told.wait(20)
        return 202, {}

    with serving(answer) as server:
        began = time.monotonic()
        with pytest.raises(UserCodeError, match="had not scored the sample when it was over"):
            played(f"{server.url}/play/", ended=ended)
        assert time.monotonic() - began < 5
        assert told.wait(20)
    asked, over = server.asked
    assert over.path == f"/play/{asked.json['session']}"
    assert KEY not in over.path


def test_its_token_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"service\.token_file: .*cannot be read"):
        played("http://127.0.0.1:9", token_file=str(path))
    path.write_text("secret")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read .*chmod 600"):
        played("http://127.0.0.1:9", token_file=str(path))
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"holds no token"):
        played("http://127.0.0.1:9", token_file=str(path))
