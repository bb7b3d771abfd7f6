"""A logits processor for the tests' vLLM, which files beside the model switch on.

`slowly`: each step waits, so that an update finds requests running on a busy machine too. `biased`: decoding differs from prefill, as with CUDA graphs
that hold other weights.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_STEP_S = 0.1


class Slowly(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, *_: Any) -> None:
        self._folder = Path(vllm_config.model_config.model).parent

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if (self._folder / "slowly").exists():
            time.sleep(_STEP_S)
        if (self._folder / "biased").exists():
            logits[:, ::2] += 5
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass
