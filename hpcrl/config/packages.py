"""Packages that settings of the trainer need and that not every installation has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from hpcrl.config.errors import Problem
from hpcrl.config.sections.trainer import TrainerConfig


def missing_packages(trainer: TrainerConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of a trainer whose package this Python does not have."""
    needed = {
        "trainer.policy.low_precision.fp8": ("torchao", "'hpcrl[torchao]'", trainer.policy.low_precision.fp8),
        "trainer.policy.optimizer_config.moments": (
            "torchao",
            "'hpcrl[torchao]'",
            trainer.policy.optimizer_config.moments is not None,
        ),
        "trainer.critic.optimizer_config.moments": (
            "torchao",
            "'hpcrl[torchao]'",
            trainer.critic.optimizer_config.moments is not None,
        ),
        "trainer.policy.enable_liger_kernel": ("liger_kernel", "'hpcrl[liger]'", trainer.policy.enable_liger_kernel),
        "trainer.flash_attn_version": ("flash_attn_interface", "flash-attn-3", trainer.flash_attn_version == 3),
    }
    for setting, (module, install, wanted) in needed.items():
        if wanted and find_spec(module) is None:
            yield Problem(setting, f"needs {module}, which {sys.executable} does not have: pip install {install}")
