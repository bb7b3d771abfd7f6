"""What the scores of a reward service are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hpcrl.config.environment import RemoteRewardConfig
from hpcrl.errors import DataError


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
