"""Rewards that a service works out, by the protocol of Cosmos-RL's reward service, for texts, pictures and videos.

Two requests, both POST with `Authorization: Bearer <token>`:

    enqueue   a line of JSON {media_type, prompts, messages, completions, ground_truths, reward_fn: {name: weight}}, and behind it a file
              of numpy. With media_type "image" it has the pictures as bytes [n, height, width, 3]. With "video" it has the latents of
              Wan's autoencoder in float16 [n, channels, frames, height, width], and the line video_infos: [{video_fps}], too
              -> {uuid}
    fetch     form {uuid, type: name}, again and again until the status is 200; 410: enqueue it again
              -> {scores: {key: [one number per completion]}}

`prompts` holds the last message of each prompt as a text, `messages` all messages. With media_type "text" nothing follows the line. The service
does not apply the weights.
"""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import RemoteRewardConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.rewards.response import VIDEO_FPS, Response
from hpcrl.envs.tools.http import Gone, Peer, ToolService
from hpcrl.errors import ConfigError, DataError, ServiceError
from hpcrl.text import said_in
from hpcrl.types import LARGEST

_TIMEOUT_S, _GATHER_S = 60.0, 0.1
_ENQUEUE_SHARE, _FETCH_SHARE = 0.2, 0.6  # of the time that a reward may take
_LONG_S = 600.0  # where it may take any time
_TRIES = 5  # of a request whose scores a service has lost
_REFUSED = (400, 401, 403, 405, 413, 422)  # anything else at fetch may mean that scores are not there yet


@dataclass(frozen=True)
class Endpoints:
    """Where one request and its scores are asked for."""

    enqueue: ToolService
    fetch: ToolService

    @classmethod
    def of(
        cls, names: tuple[str, str], peers: tuple[str | Peer, str | Peer], seconds: float, token: str | None = None
    ) -> Endpoints:
        """Return those of one service.

        Args:
            names: what errors call enqueue and fetch.
            peers: their addresses, or who is asked.
            seconds: limit of a reward; 0: any time. A fifth is the patience with a failing request, and three fifths that with scores that
                are not ready.
        """
        seconds = seconds or _LONG_S
        asked = zip(names, peers, (_ENQUEUE_SHARE, _FETCH_SHARE), strict=True)
        return cls(*(ToolService(name, peer, _TIMEOUT_S, share * seconds, token) for name, peer, share in asked))


def exported(environment: EnvironmentConfig, variables: Mapping[str, str] = os.environ) -> Endpoints:
    """Return the service that the process's variables name: REMOTE_REWARD_ENQUEUE_URL, _FETCH_URL and _TOKEN.

    Raises:
        ConfigError: one of the variables is missing, or an address is none.
    """
    model = environment.remote_reward.service.model
    token = _variable(variables, "REMOTE_REWARD_TOKEN", model)
    names = "REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL"
    enqueue, fetch = (_variable(variables, name, model) for name in names)
    called = f"reward service ({names[0]})", f"reward service ({names[1]})"
    return Endpoints.of(called, (enqueue, fetch), environment.timeout_seconds, token)


class RemoteRewards:
    """Pays a response what a reward service gives it, and reports the score of each of its functions.

    Responses that are scored at the same time go into one request, up to `batch_size`; a request that is not full waits 0.1 s
    for others.

    Args:
        choose: returns the service that gets the next request; called in several threads at a time.
    """

    def __init__(self, config: RemoteRewardConfig, choose: Callable[[], Endpoints]) -> None:
        self._config, self._choose = config, choose
        self._lock = threading.Lock()
        self._open: _Batch | None = None

    def __call__(self, response: Response) -> Turn:
        """Return the reward, with each function's own score, unweighted, among the metrics; called in several threads at a time.

        Raises:
            ServiceError: the service does not answer, answers in another form, or has no finite number for this response.
            DataError: the reply lacks a score.
        """
        with self._lock:
            batch = self._open = self._open or _Batch()
            result = batch.add(response)
            first, full = len(batch.responses) == 1, len(batch.responses) >= self._config.batch_size
            if full:
                self._open = None
        if full:
            batch.full.set()
        if first:
            self._score(batch)
        scores = result.result()
        if bad := [name for name, score in scores.items() if not math.isfinite(score)]:
            raise ServiceError(f"the reward service sent no finite number as the score of {bad[0]}")
        (reward,) = service_rewards({name: [score] for name, score in scores.items()}, self._config)
        return Turn([], reward, done=True, metrics=scores)

    def _score(self, batch: _Batch) -> None:
        """Send the batch when it is full, or has waited long enough; each of its results gets the scores, or the error."""
        batch.full.wait(_GATHER_S)
        with self._lock:
            if self._open is batch:
                self._open = None
        try:
            scores = self._scores(batch.responses)
        except BaseException as error:  # noqa: BLE001  all of its threads raise it
            for result in batch.results:
                result.set_exception(error)
        else:
            for number, result in enumerate(batch.results):
                result.set_result({name: values[number] for name, values in scores.items()})

    def _scores(self, responses: Sequence[Response]) -> dict[str, list[float]]:
        functions, tries = self._config.reward_weights, 0
        asked = {
            "prompts": [said_in(one.messages[-1]["content"]) if one.messages else "" for one in responses],
            "messages": [
                [{**message, "content": said_in(message["content"])} for message in one.messages] for one in responses
            ],
            "completions": [response.text for response in responses],
            "ground_truths": [response.ground_truth for response in responses],
            "reward_fn": functions,
        }
        facts, media = _media(responses)
        content = f"{json.dumps(facts | asked, default=str)}\n".encode() + media
        while True:
            tries += 1
            try:
                return _asked(self._choose(), content, tuple(functions), len(responses), self._config.score_key)
            except Gone:  # it was restarted
                if tries == _TRIES:
                    raise


def _media(responses: Sequence[Response]) -> tuple[dict[str, Any], bytes]:
    """Return the images of a request's responses, and the request as bytes."""
    shown = [one.image if one.latents is None else one.latents for one in responses]
    arrays = [each for each in shown if each is not None]
    if not arrays:
        return {"media_type": "text"}, b""
    import numpy as np

    file = io.BytesIO()
    np.save(file, np.stack(arrays), allow_pickle=False)
    if responses[0].latents is None:
        return {"media_type": "image"}, file.getvalue()
    return {"media_type": "video", "video_infos": [{"video_fps": VIDEO_FPS}] * len(arrays)}, file.getvalue()


def _asked(
    service: Endpoints, content: bytes, functions: Sequence[str], count: int, score_key: str
) -> dict[str, list[float]]:
    """Return what a service gives each of `count` responses, by the names of functions."""
    answer = service.enqueue.post(content=content)
    uuid = answer.get("uuid") if isinstance(answer, dict) else None
    if not isinstance(uuid, str) or not uuid:
        raise service.enqueue.unusable('{"uuid": "…"}', answer)
    return {name: _fetched(service.fetch, uuid, name, count, score_key) for name in functions}


def _fetched(service: ToolService, uuid: str, name: str, count: int, score_key: str) -> list[float]:
    answer = service.post(lambda status: status not in _REFUSED, data={"uuid": uuid, "type": name})
    form = '{"scores": {key: [one number per completion]}}'
    if not _are_scores(answer):
        raise service.unusable(form, answer)
    scores = service_scores(answer["scores"], score_key)
    if len(scores) != count:
        raise service.unusable(f"{form} for {count} completions", answer)
    return scores


class _Batch:
    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.results: list[Future[dict[str, float]]] = []
        self.full = threading.Event()

    def add(self, response: Response) -> Future[dict[str, float]]:
        self.responses.append(response)
        self.results.append(Future())
        return self.results[-1]


def service_scores(
    reply: Mapping[str, Sequence[Any]], score_key: str, clip_min: float = -math.inf, clip_max: float = math.inf
) -> list[float]:
    """Return one function's score of each response; NaN where the reply has anything but a finite number.

    Args:
        reply: names of scores to one number per response.
        score_key: the name that counts; a+b: the sum of two, and so on.
        clip_min, clip_max: bounds of the sum.

    Raises:
        DataError: the reply lacks a score.
        ServiceError: it has another number of them than of the others.
    """
    keys = score_key.split("+")
    if missing := [key for key in keys if key not in reply]:
        raise DataError(
            f"the reward service sent no score {missing[0]!r} (score_key={score_key}); it sent {', '.join(reply)}"
        )
    if len({len(reply[key]) for key in keys}) > 1:
        raise ServiceError(
            f"the reward service sent {[len(reply[key]) for key in keys]} scores {keys}; expected equally many"
        )
    sums = [sum(map(_number, values)) for values in zip(*(reply[key] for key in keys), strict=True)]
    return [min(max(value, clip_min), clip_max) for value in sums]


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and -LARGEST <= value <= LARGEST else math.nan


def service_rewards(scores: Mapping[str, Sequence[float]], config: RemoteRewardConfig) -> list[float]:
    """Return the reward of each response: the weighted sum of the functions' scores, clipped, then scaled.

    Args:
        scores: names of the configured functions to one score per response.

    Raises:
        DataError: the scores are not those of the configured functions.
    """
    functions = config.reward_weights
    if scores.keys() != functions.keys():
        raise DataError(
            f"expected scores of {', '.join(functions)} (environment.remote_reward.reward_function), "
            f"found {', '.join(scores) or 'none'}"
        )
    per_response = zip(*(scores[name] for name in functions), strict=True)
    sums = [
        sum(weight * value for weight, value in zip(functions.values(), values, strict=True)) for values in per_response
    ]
    return [config.scale * min(max(total, config.clip_min), config.clip_max) for total in sums]


def _are_scores(answer: Any) -> bool:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    return isinstance(scores, dict) and all(isinstance(values, list) for values in scores.values())


def _variable(variables: Mapping[str, str], name: str, model: str | None) -> str:
    if not variables.get(name):
        start = (
            f"start `hpcrl reward serve {model}`, and export what it prints, because only a run starts it itself"
            if model
            else "export it where you submit"
        )
        raise ConfigError(f"environment.remote_reward.enable needs the variable {name}; {start}")
    return variables[name]
