"""A penalty on responses that come near the longest one."""

from __future__ import annotations

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.response import Response


def overlong(response: Response, environment: EnvironmentConfig) -> float:
    """Return 0 for a response that ends before the last `buffer_length` tokens, then less and less, down to -penalty_factor.

    With n tokens, at most L, and a buffer of b tokens: -penalty_factor * min(max(n - (L - b), 0), b) / b (DAPO, arXiv:2503.14476,
    equation 13). The tokens are those that the policy chose; Cosmos-RL encodes the text again, which may give others, and lets the
    penalty grow without bound.
    """
    settings = environment.overlong_reward
    exceeding = response.n_tokens - (response.max_tokens - settings.buffer_length)
    return -settings.penalty_factor * min(max(exceeding, 0), settings.buffer_length) / settings.buffer_length
