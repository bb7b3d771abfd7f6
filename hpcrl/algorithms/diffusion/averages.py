"""Weights that follow those which are trained: what samples are made with, and an exponential moving average."""

from __future__ import annotations

_SLOW, _SLOW_MOST = 0.001, 0.5
_LATE, _LATE_FROM, _LATE_MOST = 0.0075, 75, 0.999


def copy_decay(kind: int, step: int) -> float:
    """Return how much of itself the adapter that samples are made with keeps after a step; the rest is the trained one.

    Args:
        kind: trainer.policy.diffusers.weight_copy_decay_type. 0: nothing, samples are on-policy; 1: min(0.001 s, 0.5); 2: nothing up to
            step 75, then min(0.0075 (s - 75), 0.999) (arXiv:2509.16117, section 4.2).
        step: the optimizer steps that have been made, s.
    """
    if kind == 0:
        return 0.0
    if kind == 1:
        return min(_SLOW * step, _SLOW_MOST)
    return min(max(_LATE * (step - _LATE_FROM), 0.0), _LATE_MOST)


def average_decay(step: int, most: float) -> float:
    """Return the decay of an exponential moving average at step t, from 0: min((1 + t) / (10 + t), most)."""
    return min((1 + step) / (10 + step), most)


def is_averaged(step: int, interval: int) -> bool:
    """Return whether the average takes in the weights of step t, from 0: each `interval` steps."""
    return (step + 1) % interval == 0
