"""Learning rate over optimizer steps: a pure function, so that resuming needs no state but the count."""

from __future__ import annotations

import math


def lr_factor(kind: str, update: int, warmup: int, total: int) -> float:
    """Return what multiplies the learning rate at optimizer step `update` (the first is 0).

    Args:
        kind: constant_with_warmup, linear or cosine; the last two fall to 0 at step `total`.
        warmup: steps before the full rate. Step 0 already moves: its factor is 1 / (warmup + 1).
    """
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    assert kind == "constant_with_warmup", kind
    return 1.0
