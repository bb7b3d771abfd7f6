"""Rewards of a service, against a server that honours Cosmos-RL's protocol."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import RemoteRewardConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.rewards.remote import RemoteRewards, exported, service_rewards, service_scores
from hpcrl.envs.rewards.response import Response
from hpcrl.errors import ConfigError, DataError, HpcrlError, ServiceError
from tests.envs.server import Answer, Asked, Server, serving

CONFIG = RemoteRewardConfig(enable=True, reward_function={"length": 0.5, "vowels": 2.0}, score_key="score")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that fails is asked again after 50 ms, not half a second."""
    monkeypatch.setattr("hpcrl.envs.tools.http._FIRST_WAIT_S", 0.05)


class Rewarding:
    """Scores completions by their length and their vowels; scores are there at the second question.

    Args:
        change: makes of the reply to a fetch what is sent.
    """

    def __init__(self, change: Callable[[dict[str, Any]], Any] = lambda reply: reply, not_yet: int = 404) -> None:
        self._change, self._not_yet = change, not_yet
        self.batches: dict[str, dict[str, Any]] = {}
        self._questions: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> tuple[int, Any]:
        if asked.headers["authorization"] != "Bearer s3cret":
            return 401, f"token {asked.headers['authorization']} is wrong"
        with self._lock:
            return self._enqueue(asked) if asked.path == "/api/reward/enqueue" else self._pull(asked)

    def _enqueue(self, asked: Asked) -> tuple[int, Any]:
        line, newline, rest = asked.body.partition(b"\n")
        assert (newline, rest) == (b"\n", b"")
        uuid = f"u{len(self.batches)}"
        self.batches[uuid] = json.loads(line)
        return 200, {"uuid": uuid, "replica_id": "r0"}

    def _pull(self, asked: Asked) -> tuple[int, Any]:
        (uuid,), (kind,) = (parse_qs(asked.body.decode())[name] for name in ("uuid", "type"))
        key = f"{uuid} {kind}"
        self._questions[key] = self._questions.get(key, 0) + 1
        if self._questions[key] == 1:
            return self._not_yet, "no result yet"
        texts = self.batches[uuid]["completions"]
        scores = [len(text) if kind == "length" else sum(letter in "aeiou" for letter in text) for text in texts]
        return 200, self._change({"scores": {"score": scores, "other": [-1.0] * len(texts)}})


def rewards(
    server: Server, config: RemoteRewardConfig = CONFIG, token: str = "s3cret", timeout_seconds: float = 100.0
) -> RemoteRewards:
    variables = {
        "REMOTE_REWARD_ENQUEUE_URL": f"{server.url}/api/reward/enqueue",
        "REMOTE_REWARD_FETCH_URL": f"{server.url}/api/reward/pull",
        "REMOTE_REWARD_TOKEN": token,
    }
    service = exported(EnvironmentConfig(remote_reward=config, timeout_seconds=timeout_seconds), variables)
    return RemoteRewards(config, lambda: service)


def response(text: str) -> Response:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "say it"}]
    return Response(text=text, ground_truth="banana", messages=messages)


def in_threads(scorer: Callable[[Response], Turn], texts: list[str]) -> dict[str, Turn | HpcrlError]:
    """Return what each text is paid, all scored at the same time, or the error."""
    found: dict[str, Turn | HpcrlError] = {}

    def score(text: str) -> None:
        try:
            found[text] = scorer(response(text))
        except HpcrlError as error:
            found[text] = error

    threads = [threading.Thread(target=score, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_the_weighted_sum_pays_and_each_score_is_reported() -> None:
    service = Rewarding()
    with serving(service) as server:
        turn = rewards(server)(response("banana"))
    assert (turn.done, turn.observations) == (True, [])
    assert turn.metrics == {"length": 6.0, "vowels": 3.0}
    assert turn.reward == 5.0  # 0.5 * 6 + 2 * 3 = 9, clipped
    assert service.batches["u0"] == {
        "media_type": "text",
        "prompts": ["say it"],
        "messages": [response("").messages],
        "completions": ["banana"],
        "ground_truths": ["banana"],
        "reward_fn": {"length": 0.5, "vowels": 2.0},
    }


class Looking(Rewarding):
    """Scores pictures by their mean, and latents of videos by their number of frames."""

    def _enqueue(self, asked: Asked) -> tuple[int, Any]:
        line, _, file = asked.body.partition(b"\n")
        told, shown = json.loads(line), np.load(io.BytesIO(file), allow_pickle=False)
        kinds = {"image": (np.uint8, 4), "video": (np.float16, 5)}
        assert (shown.dtype, shown.ndim) == kinds[told["media_type"]]
        assert told.get("video_infos", []) == ([{"video_fps": 16.0}] * len(shown) if shown.ndim == 5 else [])
        scores = shown.mean((1, 2, 3)).tolist() if shown.ndim == 4 else [float(shown.shape[2])] * len(shown)
        self.batches["u0"] = {"completions": told["prompts"], "scores": scores}
        return 200, {"uuid": "u0"}

    def _pull(self, asked: Asked) -> tuple[int, Any]:  # noqa: ARG002
        return 200, {"scores": {"score": self.batches["u0"]["scores"]}}


@pytest.mark.parametrize(("latents", "score"), [(None, 7.0), (np.zeros((16, 3, 4, 4), np.float16), 3.0)])
def test_pictures_and_videos_follow_the_line(latents: np.ndarray | None, score: float) -> None:
    config = RemoteRewardConfig(**{**vars(CONFIG), "reward_function": {"taste": 0.5}})
    shown = replace(response(""), image=np.full((9, 8, 8, 3)[latents is None :], 7, np.uint8), latents=latents)
    with serving(Looking()) as server:
        turn = rewards(server, config)(shown)
    assert (turn.reward, turn.metrics) == (0.5 * score, {"taste": score})


@pytest.mark.parametrize(
    ("settings", "reward"),
    [
        ({"score_key": "score+other"}, 0.5 * 2 + 2 * 0),
        ({"score_key": "other"}, -2.5),
        ({"score_key": "other", "clip_min": -1.0}, -1.0),
        ({"score_key": "other", "clip_min": -1.0, "scale": 3.0}, -3.0),
        ({"clip_max": 100.0, "scale": 0.1}, 0.1 * (0.5 * 3 + 2 * 1)),
        ({"reward_function": {"length": 1.0, "vowels": 0.0}}, 3.0),
    ],
)
def test_keys_weights_bounds_and_scale(settings: dict[str, Any], reward: float) -> None:
    config = RemoteRewardConfig(**{**vars(CONFIG), **settings})
    with serving(Rewarding()) as server:
        assert rewards(server, config)(response("abc")).reward == pytest.approx(reward)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_responses_of_the_same_time_share_requests(batch_size: int) -> None:
    service, texts = Rewarding(), [f"{'a' * number}b" for number in range(10)]
    config = RemoteRewardConfig(**{**vars(CONFIG), "batch_size": batch_size, "clip_max": 1000.0})
    with serving(service) as server:
        found = in_threads(rewards(server, config), texts)
    for text in texts:
        turn = found[text]
        assert isinstance(turn, Turn), turn
        assert turn.metrics == {"length": float(len(text)), "vowels": float(len(text) - 1)}
        assert turn.reward == 0.5 * len(text) + 2.0 * (len(text) - 1)
    sizes = [len(batch["completions"]) for batch in service.batches.values()]
    assert sum(sizes) == 10
    assert max(sizes) <= batch_size
    assert len(sizes) == 10 if batch_size == 1 else len(sizes) < 10


def test_a_request_that_is_not_full_does_not_wait_long() -> None:
    config = RemoteRewardConfig(**{**vars(CONFIG), "batch_size": 8})
    with serving(Rewarding()) as server:
        scorer = rewards(server, config)
        started = time.monotonic()
        assert scorer(response("a")).metrics == {"length": 1.0, "vowels": 1.0}
        assert scorer(response("bb")).metrics == {"length": 2.0, "vowels": 0.0}
        assert time.monotonic() - started < 10


def test_a_service_that_fails_for_a_while() -> None:
    service, failures = Rewarding(not_yet=500), iter([(500, "loading"), (503, "loading")])

    def answer(asked: Asked) -> tuple[int, Any]:
        return next(failures, None) or service(asked)

    with serving(answer) as server:
        assert rewards(server)(response("abc")).metrics == {"length": 3.0, "vowels": 1.0}


def test_a_request_that_a_service_has_lost_is_sent_again() -> None:
    service, asked = Rewarding(), list[str]()

    def answer(request: Asked) -> tuple[int, Any]:
        asked.append(request.path)
        lost = request.path.endswith("pull") and asked.count(request.path) == 1
        return (410, "no such request") if lost else service(request)

    with serving(answer) as server:
        assert rewards(server)(response("abc")).metrics == {"length": 3.0, "vowels": 1.0}
    assert list(service.batches) == ["u0", "u1"], "the second enqueue"
    with (
        serving(lambda one: (410, "lost") if "pull" in one.path else (200, {"uuid": "u"})) as server,
        pytest.raises(ServiceError, match=r"FETCH_URL\) at .*answered 410 .*lost"),
    ):
        rewards(server)(response("abc"))
    assert sum("enqueue" in one.path for one in server.asked) == 5


def test_scores_that_never_come() -> None:
    never: Answer = lambda asked: (200, {"uuid": "u"}) if "enqueue" in asked.path else (404, "no result yet")  # noqa: E731
    with (
        serving(never) as server,
        pytest.raises(ServiceError, match=r"REMOTE_REWARD_FETCH_URL\) at .*no result yet.*tries in"),
    ):
        rewards(server, timeout_seconds=0.5)(response("abc"))


def test_a_wrong_token_is_told_at_once_to_all_and_not_repeated() -> None:
    config = RemoteRewardConfig(**{**vars(CONFIG), "batch_size": 3})
    with serving(Rewarding()) as server:
        found = in_threads(rewards(server, config, token="wr0ng"), ["a", "b", "c"])
    for error in found.values():
        assert isinstance(error, ServiceError)
        assert "reward service (REMOTE_REWARD_ENQUEUE_URL)" in str(error)
        assert "answered 401" in str(error)
        assert "wr0ng" not in str(error)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda _: {}, ServiceError, "expected {.scores.: "),
        (lambda _: [1.0], ServiceError, "expected {.scores.: "),
        (lambda _: {"scores": {"score": 1.0}}, ServiceError, "expected {.scores.: "),
        (lambda _: {"scores": {"score": ["1.0"]}}, ServiceError, "no finite number as the score of length"),
        (lambda _: {"scores": {"score": [True]}}, ServiceError, "no finite number as the score of length"),
        (lambda _: {"scores": {"score": [None]}}, ServiceError, "no finite number as the score of length"),
        (lambda _: {"scores": {"score": [10**400]}}, ServiceError, "no finite number as the score of length"),
        (lambda _: {"scores": {"score": [1.0, 2.0]}}, ServiceError, "for 1 completions"),
        (lambda _: {"scores": {"score": []}}, ServiceError, "for 1 completions"),
        (lambda _: {"scores": {"other": [1.0]}}, DataError, "no score 'score'"),
        (lambda _: b'{"scores": {"score": [NaN]}}', ServiceError, "no finite number as the score of length"),
        (lambda _: b"{", ServiceError, "expected JSON"),
    ],
)
def test_scores_in_another_form(change: Callable[[Any], Any], kind: type[HpcrlError], words: str) -> None:
    with serving(Rewarding(change)) as server, pytest.raises(kind, match=words):
        rewards(server)(response("abc"))


@pytest.mark.parametrize("bad", [math.nan, None, "1.0"])
def test_a_score_that_is_no_number_costs_its_response_and_no_other_of_the_request(bad: Any) -> None:
    def change(reply: Any) -> bytes:
        scores = reply["scores"]["score"]
        return json.dumps({"scores": {"score": [bad if score == 2 else score for score in scores]}}).encode()

    config = RemoteRewardConfig(**{**vars(CONFIG), "batch_size": 3, "reward_function": {"length": 1.0}})
    with serving(Rewarding(change)) as server:
        found = in_threads(rewards(server, config), ["a", "bb", "ccc"])
    assert isinstance(found["bb"], ServiceError)
    one, three = found["a"], found["ccc"]
    assert isinstance(one, Turn)
    assert isinstance(three, Turn)
    assert (one.reward, three.reward) == (1.0, 3.0)


@pytest.mark.parametrize("answer", [{}, [], {"uuid": None}, {"uuid": ""}, {"uuid": 3}])
def test_a_request_that_is_not_taken(answer: Any) -> None:
    with serving(lambda _: (200, answer)) as server, pytest.raises(ServiceError, match=r"expected {.uuid.: "):
        rewards(server)(response("abc"))


@pytest.mark.parametrize("missing", ["REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL", "REMOTE_REWARD_TOKEN"])
def test_the_variables_are_needed(missing: str) -> None:
    environment = EnvironmentConfig(remote_reward=CONFIG)
    variables = {f"REMOTE_REWARD_{name}": "http://x" for name in ("ENQUEUE_URL", "FETCH_URL", "TOKEN")}
    with pytest.raises(ConfigError, match=f"needs the variable {missing}"):
        exported(environment, variables | {missing: ""})
    with pytest.raises(ConfigError, match=r"REMOTE_REWARD_FETCH_URL.: expected an address"):
        exported(environment, variables | {"REMOTE_REWARD_FETCH_URL": "host:80"})


REPLY = {"x": [0.25, 5.0, -3.0], "y": [0.5, 1.0, -4.0]}


def test_scores_of_several_keys_are_added_and_bounded() -> None:
    assert service_scores(REPLY, "x") == [0.25, 5.0, -3.0]
    assert service_scores(REPLY, "x+y") == [0.75, 6.0, -7.0]
    assert service_scores(REPLY, "x+y+x", -5.0, 2.0) == [1.0, 2.0, -5.0]


@pytest.mark.parametrize(
    ("reply", "key", "kind", "words"),
    [
        ({"x": [1.0]}, "x+z", DataError, r"sent no score 'z' \(score_key=x\+z\); it sent x"),
        ({"x": [1.0], "y": [1.0, 2.0]}, "x+y", ServiceError, r"sent \[1, 2\] scores"),
    ],
)
def test_a_reply_that_cannot_be_used(reply: dict[str, Any], key: str, kind: type[HpcrlError], words: str) -> None:
    with pytest.raises(kind, match=words):
        service_scores(reply, key)


def test_what_is_no_finite_number_is_no_score() -> None:
    scores = service_scores(
        {"x": [math.nan, math.inf, "1", None, 2.0], "y": [1.0, -math.inf, 1.0, 1.0, 3.0]}, "x+y", 0.0
    )
    assert [math.isnan(score) for score in scores] == [True, True, True, True, False]
    assert scores[-1] == 5.0


def test_the_sum_is_weighted_clipped_and_then_scaled() -> None:
    config = RemoteRewardConfig(reward_function={"a": 0.5, "b": 2.0}, clip_min=-1.0, clip_max=3.0, scale=10.0)
    assert service_rewards({"b": [1.0, 1.0, -9.0], "a": [1.0, 4.0, 0.0]}, config) == [25.0, 30.0, -10.0]
    assert service_rewards({"a": [], "b": []}, config) == []


@pytest.mark.parametrize("scores", [{}, {"a": [1.0]}, {"a": [1.0], "b": [1.0], "c": [1.0]}])
def test_scores_of_other_functions(scores: dict[str, list[float]]) -> None:
    with pytest.raises(DataError, match=r"expected scores of a, b \(environment.remote_reward.reward_function\)"):
        service_rewards(scores, RemoteRewardConfig(reward_function={"a": 0.5, "b": 2.0}))
