"""What the rewards and the environments of a configuration need of the rows of its datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.config.derive import reward_weights, service_pays
from hpcrl.envs.make import common_extras, make_environment
from hpcrl.envs.rewards.numbers import expected_form, expected_number
from hpcrl.envs.rewards.response import ground_truth, truth_of
from hpcrl.types import Kind

TRUTHS: dict[str, Callable[[Any], object]] = {
    "single_choice": ground_truth,
    "boxed_math": ground_truth,
    "gsm8k": expected_number,
    "direct_math": expected_form,
}
"""How each reward that compares reads a ground truth; it raises DataError where it cannot.

Whether boxed_math can read a formula is not looked at here: that takes a process with math-verify.
"""


def needs(environment: EnvironmentConfig, kinds: Sequence[Kind], max_turns: int) -> dict[str, Any]:
    """Return what rows must have that serve training, evaluation or both, as arguments of `load_prompts`.

    Rows that an environment of hpcrl's own plays are tried on it. A user's own is not, for where the rows are first looked at it may
    not be installed.

    Args:
        max_turns: generator.max_turns, which environments get to know.
    """
    weights = [reward_weights(environment, kind) for kind in kinds]
    reads = dict.fromkeys(TRUTHS[name] for rewards in weights for name in rewards if name in TRUTHS)
    scored = all(reward_weights(environment, kind) or service_pays(environment, kind) for kind in kinds)
    played, extras_of_all = not scored, common_extras(environment, max_turns)

    def check(env_class: str, extras: Mapping[str, Any]) -> None:
        for read in reads:
            read(truth_of(extras))
        if played and ":" not in env_class:
            make_environment(env_class, {**extras_of_all, **extras})

    return {"env_class_required": played, "check": check}
