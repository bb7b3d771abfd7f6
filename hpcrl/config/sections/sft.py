"""Section `trainer.sft`: the loss of supervised fine-tuning. Names: TRL's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    loss_type: Literal["nll", "dft"] = setting("nll")
    """Loss of a trained token. nll: the cross entropy. dft: the cross entropy times the token's probability (dynamic fine-tuning, arXiv:2508.05629), so that improbable tokens count little. Validation sets are measured by the cross entropy with both."""
