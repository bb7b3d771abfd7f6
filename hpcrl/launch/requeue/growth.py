"""Decides whether an attempt stops for a faster one, on more nodes or with other roles of its own. Pure: no files, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

UNMEASURED_SPEEDUP = 0.7
"""Exponent of the nodes in the steps per second, until a run has trained on two sizes: twice the nodes are 1.6 times as fast. An assumption."""
_WORTH = 2.0  # gained seconds for each second of the restart: the seconds of a step on other nodes are an estimate


@dataclass(frozen=True)
class Growth:
    """Growth that is worth its restart.

    Attributes:
        nodes: of the next attempt; as many as before where their roles move.
        gained_s: seconds by which the steps in question end earlier, the restart counted.
    """

    nodes: int
    gained_s: float


def grew_lately(now: float, last_growth: float | None, every_s: float) -> bool:
    """Return whether the last restart for growth is too recent for another one.

    Args:
        now: Unix time.
        last_growth: Unix time of that restart; None: there was none.
        every_s: least seconds between two of them.
    """
    return last_growth is not None and now - last_growth < every_s


def worth_a_restart(
    step_s: float, other_step_s: float, *, restart_s: float, steps_left: float, left_s: float
) -> float | None:
    """Return the seconds that a restart gains; None where it is not worth it.

    Compared are the steps that the attempt trains until the run or its allocation ends. They take t seconds, and r + t s' / s after a
    restart of r seconds, with s and s' seconds per step before and after. The gain is the difference.

    Args:
        step_s, other_step_s: seconds per step before and after the restart.
        restart_s, steps_left, left_s: as of `choose_growth`.
    """
    training_s = min(left_s, steps_left * step_s)
    gained_s = training_s - restart_s - training_s * other_step_s / step_s
    return gained_s if gained_s > (_WORTH - 1) * restart_s else None


def choose_growth(
    *,
    held: int,
    candidates: Sequence[int],
    restart_s: float,
    step_s: Mapping[int, float],
    steps_left: float,
    left_s: float,
) -> Growth | None:
    """Return the growth that gains most of those worth their restart, or None.

    Args:
        held: nodes of the attempt.
        candidates: nodes on which Slurm would start the run at once.
        restart_s: seconds from the last step of an attempt to the first one of the next attempt, the save and the queue among them.
        step_s: measured seconds per step by nodes, those of `held` among them.
        steps_left: steps that are not trained.
        left_s: seconds until the allocation ends.
    """
    best = None
    for nodes in sorted({nodes for nodes in candidates if nodes > held}):
        other = expected_step_s(step_s, held, nodes)
        gained_s = worth_a_restart(step_s[held], other, restart_s=restart_s, steps_left=steps_left, left_s=left_s)
        if gained_s is not None and (best is None or gained_s > best.gained_s):
            best = Growth(nodes, gained_s)
    return best


def expected_step_s(step_s: Mapping[int, float], held: int, nodes: int) -> float:
    """Return the seconds of a step on so many nodes: measured, or in proportion to a power of the nodes.

    The exponent is measured where the run has trained on a second size, of several the one nearest to `nodes`, and at most 1.

    Args:
        step_s: as of `choose_growth`.
        held: nodes of the attempt.
    """
    if nodes in step_s:
        return step_s[nodes]
    exponent = UNMEASURED_SPEEDUP
    if others := [size for size in step_s if size != held]:
        other = min(others, key=lambda size: abs(size - nodes))
        exponent = min(1.0, max(0.0, log(step_s[held] / step_s[other]) / log(other / held)))
    return step_s[held] * (held / nodes) ** exponent
