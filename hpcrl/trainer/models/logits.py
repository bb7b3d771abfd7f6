"""Changes of logits in a model: a factor, and a bound by tanh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from hpcrl.errors import DataError

# entry of a configuration -> whether logits are multiplied by it, not divided
_FACTORS = {"logit_scale": True, "lm_head_multiplier": True, "logits_scaling": False}
_MULTIPLIED = {"hyperclovax"}  # by logits_scaling, by which the Granites divide
_SOFTCAP = "final_logit_softcapping"
_UNKNOWN = ("output_multiplier", "unpadded_vocab_size")


@dataclass(frozen=True)
class LogitChange:
    """Logits are softcap tanh(factor h W^T / softcap), h the last hidden state and W the head's weight.

    Attributes:
        softcap: (Gemma 2, arXiv:2408.00118, section 2); None: they are factor h W^T.
    """

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitChange:
        """Return that of a model. Raises DataError where its configuration has an entry that changes logits in another way."""
        text: Any = config.get_text_config()
        unknown = [name for name in _UNKNOWN if getattr(text, name, None) not in (None, 1.0)]
        factor = 1.0
        for name, multiplied in _FACTORS.items():
            value = getattr(text, name, None) or 1.0
            factor *= value if multiplied or text.model_type in _MULTIPLIED else 1 / value
        softcap = getattr(text, _SOFTCAP, None)
        if unknown or (softcap is not None and factor != 1.0):
            raise DataError(
                f"{type(config).__name__} changes logits by {', '.join(unknown or logit_changes(config))}, which hpcrl cannot train"
            )
        return cls(factor, softcap)


def logit_changes(config: PreTrainedConfig) -> list[str]:
    """Return the entries of a configuration that change logits."""
    text = config.get_text_config()
    return [name for name in (*_FACTORS, _SOFTCAP, *_UNKNOWN) if getattr(text, name, None) not in (None, 1.0)]


def capped(logits_RV: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return softcap tanh(x / softcap) of logits x; None: x."""
    return logits_RV if softcap is None else softcap * (logits_RV / softcap).tanh()
