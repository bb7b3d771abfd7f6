"""Schedules by step: pure functions, so that resuming needs the step count alone.

Optimizer steps are counted as SkyRL counts them: mini-batches that were not skipped. The shapes of the decay are those of Cosmos-RL
and of transformers' schedulers of the same names.
"""

from __future__ import annotations

import math

from hpcrl.config.sections.model import OptimizerConfig


def is_due(interval: int, step: int, total: int) -> bool:
    """Return whether an action of every `interval` steps is due after `step`: after the last step too, never with interval 0."""
    return interval > 0 and (step % interval == 0 or step == total)


def lr_factor(config: OptimizerConfig, update: int, total: int) -> float:
    """Return the factor of config.lr at optimizer step `update` (the first is 0) of `total`.

    With w warm-up steps, s = warmup_start_factor, m = min_lr_factor, and the last d steps decaying:

        update < w:         s + (1 - s) a
        a:                  (update + 1) / (w + 1) (between), (update + 1) / w (to_lr), update / (w - 1) (from_start; 1 where w is 1)
        w .. total - d:     1
        after that:         m + (1 - m) f(g), g = (update - (total - d)) / d
        f(g):               1 - g (linear), 1 - sqrt(g) (sqrt), (1 + cos(pi g)) / 2 (cosine), 1 (constant_with_warmup)

    w is num_warmup_steps or the share warmup_ratio of `total`, and with to_lr and from_start at most `total`; d is the share decay_ratio of `total`, but never more than what
    follows the warm-up, which it also is where decay_ratio is not set.
    """
    warmup = config.num_warmup_steps if config.warmup_ratio is None else round(config.warmup_ratio * total)
    if config.warmup_shape != "between":
        warmup = min(warmup, total)
    if update < warmup:
        start = config.warmup_start_factor
        return start + (1.0 - start) * _risen(config.warmup_shape, update, warmup)
    decaying = max(0, total - warmup)
    if config.decay_ratio is not None:
        decaying = min(decaying, round(config.decay_ratio * total))
    progress = min(1.0, max(0.0, (update - (total - decaying)) / max(1, decaying)))
    least = config.min_lr_factor
    return least + (1.0 - least) * _decay(config.scheduler, progress)


def _risen(shape: str, update: int, warmup: int) -> float:
    if shape == "to_lr":
        return (update + 1) / warmup
    if shape == "from_start":
        return update / (warmup - 1) if warmup > 1 else 1.0
    assert shape == "between", shape
    return (update + 1) / (warmup + 1)


def _decay(scheduler: str, progress: float) -> float:
    if scheduler == "linear":
        return 1.0 - progress
    if scheduler == "sqrt":
        return 1.0 - math.sqrt(progress)
    if scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    assert scheduler == "constant_with_warmup", scheduler
    return 1.0
