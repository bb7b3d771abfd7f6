"""Schedules by step: pure functions, so that resuming needs the step count alone.

Optimizer steps are counted as SkyRL counts them: mini-batches that were not skipped. The shapes of the decay are those of Cosmos-RL
and of transformers' schedulers of the same names.
"""

from __future__ import annotations

import math

from hpcrl.config.sections.model import OptimizerConfig

_SCALE = 10_000
"""Steps after which inverse_sqrt has fallen to 1 / sqrt(2) where there is no warm-up, as in transformers."""


def is_due(interval: int, step: int, total: int) -> bool:
    """Return whether an action of every `interval` steps is due after `step`: after the last step too, never with interval 0."""
    return interval > 0 and (step % interval == 0 or step == total)


def lr_factor(config: OptimizerConfig, update: int, total: int) -> float:
    """Return the factor of config.lr at optimizer step `update` (the first is 0) of `total`.

    With w warm-up steps, s = warmup_start_factor, m = min_lr_factor, and the last d steps decaying:

        update < w:         s + (1 - s) a
        a:                  (update + 1) / (w + 1) (between), (update + 1) / w (to_lr), update / (w - 1) (from_start; 1 where w is 1),
                            update / w (below_lr)
        w .. total - d:     1
        after that:         m + (1 - m) f(g)^decay_power, g = decay_cycles (update - (total - d)) / d, without its whole part before the end
        f(g):               1 - g (linear), 1 - sqrt(g) (sqrt), (1 + cos(pi g)) / 2 (cosine), 1 (constant_with_warmup)
        inverse_sqrt:       m + (1 - m) sqrt(v / (v + update - w)), where v is w, or 10000 without a warm-up

    w is num_warmup_steps or the share warmup_ratio of `total`, and with to_lr and from_start at most `total`. The decay d is the share
    decay_ratio of `total`, or, where that is unset or larger, all steps after the warm-up.
    """
    warmup = config.num_warmup_steps if config.warmup_ratio is None else round(config.warmup_ratio * total)
    if config.warmup_shape in ("to_lr", "from_start"):
        warmup = min(warmup, total)
    if update < warmup:
        start = config.warmup_start_factor
        return start + (1.0 - start) * _risen(config.warmup_shape, update, warmup)
    least = config.min_lr_factor
    if config.scheduler == "inverse_sqrt":
        scale = warmup or _SCALE
        return least + (1.0 - least) * math.sqrt(scale / (scale + update - warmup))
    decaying = max(0, total - warmup)
    if config.decay_ratio is not None:
        decaying = min(decaying, round(config.decay_ratio * total))
    progress = min(1.0, max(0.0, (update - (total - decaying)) / max(1, decaying)))
    if progress < 1.0:
        progress = progress * config.decay_cycles % 1.0
    return least + (1.0 - least) * _decay(config.scheduler, progress) ** config.decay_power


def _risen(shape: str, update: int, warmup: int) -> float:
    if shape == "below_lr":
        return update / warmup
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
