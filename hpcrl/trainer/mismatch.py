"""Check that engines and trainer hold the same model, by their log-probabilities of the same tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcrl.errors import ConfigError

log = logging.getLogger(__name__)

_ERRORS = 3.0  # standard errors that a mean has to be above its limit: a few odd tokens end no run


@dataclass(frozen=True)
class MismatchLimit:
    """Limit of the mismatch between log-probabilities of engines and trainer (generator.max_logprob_mismatch).

    Only tokens count that the engines sampled with the very version which the trainer holds, before its first optimizer step of a batch. What
    is left are other kernels and number types: a few hundredths of a nat in bfloat16, and nothing to speak of in float32.

    Args:
        limit: of the mean absolute difference in nats.
        action: what happens beyond.
    """

    limit: float
    action: Literal["stop", "warn"] = "stop"

    def check(self, step: int, sums: Mapping[str, float], *, speaks: bool) -> None:
        """Check the sums of the first optimizer step of a batch, which are the same on all ranks.

        Args:
            speaks: whether this rank warns.

        Raises:
            ConfigError: on every rank, where the difference is beyond the limit.
        """
        count = sums["current_tokens"]
        if not count:
            return
        mean = sums["current_abs_diff"] / count
        variance = max(0.0, sums["current_abs_diff_squared"] / count - mean**2)
        if mean - _ERRORS * math.sqrt(variance / count) <= self.limit:
            return
        message = (
            f"step {step}: the log-probabilities of engines and trainer differ by {mean:.3g} on average over {count:.0f} tokens that both "
            f"computed with the weights of version {step - 1}; generator.max_logprob_mismatch is {self.limit:g}. They are not the same "
            "model. Likely causes: generator.rope_scaling or rope_theta beside the trainer's, hf_overrides or quantization in "
            "generator.inference_engine, weights not loaded as published, a model that vLLM and the "
            "trainer's backend compute differently. Compare the sections' settings, try generator.inference_engine.model_dtype "
            '"float32" and quantization unset; where the difference is known and corrected (trainer.algorithm.off_policy_correction), '
            'raise generator.max_logprob_mismatch, or set generator.on_logprob_mismatch="warn"'
        )
        if self.action == "stop":
            raise ConfigError(message)
        if speaks:
            log.warning("%s", message)
