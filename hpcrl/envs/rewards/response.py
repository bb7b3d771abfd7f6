"""What a reward function sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.base import Turn
from hpcrl.errors import DataError
from hpcrl.types import plain_text

if TYPE_CHECKING:
    import numpy as np

    from hpcrl.types import Prompt


_LONGEST_TRUTH = 2000
VIDEO_FPS = 16.0
"""Frames of a video that are shown in a second."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response to a prompt.

    Attributes:
        text: the policy's response, special tokens such as the end marker removed.
        ground_truth: `reward_spec.ground_truth` of the prompt's row, or its data.response_column; None where it has neither.
        data_source: that of the row.
        n_tokens: tokens that the policy chose, its end marker included.
        max_tokens: tokens that it may have chosen, max_generate_length of training or evaluation.
        messages: the prompt; images as of hpcrl/envs/base.py.
        extras: the columns of the prompt's row that are not hpcrl's own.
        image: the picture of a diffusion policy, uint8 [height, width, 3], or [frames, height, width, 3] of a video; None: the response is
        `text`.
        latents: of that video, float16 [channels, frames of latents, height, width], standardized as the transformer makes them; None: there is no video.
    """

    text: str
    ground_truth: Any = None
    data_source: str = ""
    n_tokens: int = 0
    max_tokens: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    extras: Mapping[str, Any] = field(default_factory=dict)
    image: np.ndarray | None = None
    latents: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class GroupSample(Response):
    """One finished sample of a group: its last response, and what it got by itself.

    Attributes:
        n_tokens: tokens that the policy chose in all turns.
        reward: of its environment or named rewards.
        metrics: numbers that these reported.
        conversation: the messages after the prompt.
        stop_reason: "stop", or "length" where a limit ended it.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    conversation: list[dict[str, Any]] = field(default_factory=list)
    stop_reason: str = "stop"


Reward = Callable[[Response, EnvironmentConfig], float]
"""What a response is worth, a finite number. It depends on its arguments alone, and may be called in any thread.

The second argument is the section `environment`. Settings of one's own are in its table `custom`, or fields of the class that
`make_config(environment_cls=…)` was given.
"""


Scorer = Callable[[Response], Turn]
"""What rewards a response in the place of an environment; called in several threads at a time."""


def response_to(
    prompt: Prompt,
    text: str,
    n_tokens: int,
    max_tokens: int,
    image: np.ndarray | None = None,
    latents: np.ndarray | None = None,
) -> Response:
    """Return a response to a prompt as rewards see it; arguments as of `Response`."""
    return Response(
        text=text,
        ground_truth=truth_of(prompt.extras),
        data_source=prompt.data_source,
        n_tokens=n_tokens,
        max_tokens=max_tokens,
        messages=prompt.messages,
        extras=prompt.extras,
        image=image,
        latents=latents,
    )


def truth_of(extras: Mapping[str, Any]) -> Any:
    """Return the ground truth of a prompt's row; None where it has none."""
    spec = extras.get("reward_spec")
    return spec.get("ground_truth") if isinstance(spec, Mapping) else None


def truth_text(extras: Mapping[str, Any]) -> str:
    """Return the ground truth of a prompt's row for people: a text as it is, other values as JSON, long ones cut; empty without one."""
    truth = truth_of(extras)
    if truth is None:
        return ""
    text = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)
    return plain_text(text, _LONGEST_TRUTH)


def ground_truth(truth: Any) -> str:
    """Return the text that a response is compared with. Raises DataError where it is neither a text that is not blank nor a number.

    Args:
        truth: `Response.ground_truth`.
    """
    text = str(truth) if isinstance(truth, int | float) and not isinstance(truth, bool) else truth
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            "the row needs a ground truth, a text or a number: `ground_truth` in its column `reward_spec`, or the column "
            f"that data.response_column names; found {truth!r:.80}"
        )
    return text
