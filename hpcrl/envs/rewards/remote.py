"""Rewards that a service works out, by the protocol of Cosmos-RL's reward service, for texts.

Two requests, both POST with `Authorization: Bearer <token>`:

    enqueue   a line of JSON {media_type: "text", prompts, messages, completions, ground_truths, reward_fn: {name: weight}}
              -> {uuid}
    fetch     form {uuid, type: name}, again and again until the status is 200
              -> {scores: {key: [one number per completion]}}

`prompts` holds the last message of each prompt as a text, `messages` all of them. In Cosmos-RL bytes of images or videos follow the
line; texts have none. The service does not apply the weights.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import RemoteRewardConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.tools.http import Service
from hpcrl.errors import ConfigError, DataError

_TIMEOUT_S, _GATHER_S = 60.0, 0.1
_ENQUEUE_SHARE, _FETCH_SHARE = 0.2, 0.6  # of the time that a reward may take
_LONG_S = 600.0  # where it may take any time
_REFUSED = (400, 401, 403, 405, 413, 422)  # anything else at fetch may mean that scores are not there yet


class RemoteRewards:
    """Pays a response what a reward service gives it, and reports the score of each of its functions.

    Responses that are scored at the same time go into one request, up to `batch_size`; a request that is not full waits 0.1 s
    for others.

    Args:
        environment: `remote_reward`, and `timeout_seconds`, of which a fifth is the patience with a request that fails, and three
            fifths that with scores that are not there yet.
        variables: of the process; the addresses are in REMOTE_REWARD_ENQUEUE_URL and REMOTE_REWARD_FETCH_URL, the token is in
            REMOTE_REWARD_TOKEN.

    Raises:
        ConfigError: one of the variables is missing, or an address is none.
    """

    def __init__(self, environment: EnvironmentConfig, variables: Mapping[str, str] = os.environ) -> None:
        seconds = environment.timeout_seconds or _LONG_S
        token = _variable(variables, "REMOTE_REWARD_TOKEN")
        self._enqueue, self._fetch = (
            Service(f"reward service ({name})", _variable(variables, name), _TIMEOUT_S, share * seconds, token)
            for name, share in (
                ("REMOTE_REWARD_ENQUEUE_URL", _ENQUEUE_SHARE),
                ("REMOTE_REWARD_FETCH_URL", _FETCH_SHARE),
            )
        )
        self._config = environment.remote_reward
        self._lock = threading.Lock()
        self._open: _Batch | None = None

    def __call__(self, response: Response) -> Turn:
        """Return the reward, with each function's own score, unweighted, among the metrics; called in several threads at a time.

        Raises:
            ServiceError: the service does not answer, or answers in another form.
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
        """Return the score of each response, by the names of functions."""
        functions = self._config.reward_function
        asked = {
            "media_type": "text",
            "prompts": [response.messages[-1]["content"] if response.messages else "" for response in responses],
            "messages": [response.messages for response in responses],
            "completions": [response.text for response in responses],
            "ground_truths": [response.ground_truth for response in responses],
            "reward_fn": dict(functions),
        }
        answer = self._enqueue.post(content=f"{json.dumps(asked, default=str)}\n".encode())
        uuid = answer.get("uuid") if isinstance(answer, dict) else None
        if not isinstance(uuid, str) or not uuid:
            raise self._enqueue.unusable('{"uuid": "…"}', answer)
        return {name: self._fetched(uuid, name, len(responses)) for name in functions}

    def _fetched(self, uuid: str, name: str, count: int) -> list[float]:
        answer = self._fetch.post(lambda status: status not in _REFUSED, data={"uuid": uuid, "type": name})
        form = '{"scores": {key: [one number per completion]}}'
        if not _are_scores(answer):
            raise self._fetch.unusable(form, answer)
        scores = service_scores(answer["scores"], self._config.score_key)
        if len(scores) != count:
            raise self._fetch.unusable(f"{form} for {count} completions", answer)
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
    reply: Mapping[str, Sequence[float]], score_key: str, clip_min: float = -math.inf, clip_max: float = math.inf
) -> list[float]:
    """Return one function's score of each response.

    Args:
        reply: names of scores to one number per response.
        score_key: the name that counts; a+b: the sum of two, and so on.
        clip_min, clip_max: bounds of the sum.

    Raises:
        DataError: the reply lacks a score, has another number of them than of the others, or one that is no finite number.
    """
    keys = score_key.split("+")
    if missing := [key for key in keys if key not in reply]:
        raise DataError(
            f"the reward service sent no score {missing[0]!r} (score_key={score_key}); it sent {', '.join(reply)}"
        )
    if len({len(reply[key]) for key in keys}) > 1:
        raise DataError(
            f"the reward service sent {[len(reply[key]) for key in keys]} scores {keys}; expected equally many"
        )
    sums = [sum(values) for values in zip(*(reply[key] for key in keys), strict=True)]
    if bad := [value for value in sums if not math.isfinite(value)]:
        raise DataError(f"the reward service sent {bad[0]} as {score_key}; expected a finite number")
    return [min(max(value, clip_min), clip_max) for value in sums]


def service_rewards(scores: Mapping[str, Sequence[float]], config: RemoteRewardConfig) -> list[float]:
    """Return the reward of each response: the weighted sum of the functions' scores, clipped, then scaled.

    Args:
        scores: names of `config.reward_function` to one score per response.

    Raises:
        DataError: the scores are not those of the configured functions.
    """
    if scores.keys() != config.reward_function.keys():
        raise DataError(
            f"expected scores of {', '.join(config.reward_function)} (environment.remote_reward.reward_function), "
            f"found {', '.join(scores) or 'none'}"
        )
    weights = config.reward_function.values()
    per_response = zip(*(scores[name] for name in config.reward_function), strict=True)
    sums = [sum(weight * value for weight, value in zip(weights, values, strict=True)) for values in per_response]
    return [config.scale * min(max(total, config.clip_min), config.clip_max) for total in sums]


def _are_scores(answer: Any) -> bool:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, dict) or not all(isinstance(values, list) for values in scores.values()):
        return False
    return all(type(value) in (int, float) for values in scores.values() for value in values)


def _variable(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ConfigError(f"environment.remote_reward.enable needs the variable {name}; export it where you submit")
    return variables[name]
