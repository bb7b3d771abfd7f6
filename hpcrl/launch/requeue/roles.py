"""Decides how many nodes of an attempt train and how many generate, by what the run measured before. Pure: no files, no clock.

A step on T trainer nodes and E replicas has training, whose time goes with 1 / T, and generation, whose time goes with 1 / E. Other waits of
both roles stay as long as they are. Training and generation overlap by the measured share of the shorter one: 0 where they take turns, 1 where
the longer one hides the shorter. A layout whose steps were measured has its own time instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrl.config.sizes import NUM_ENGINES, POLICY_NODES
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.rundir.ledger import describe_sizes

LEAST_GAIN = 0.1
"""Share of a step's time by which another layout has to be faster: below that, roles would move by what is noise."""


ALIKE = 0.02
"""Share of a step's time below which more nodes gain nothing, and go back to Slurm."""


@dataclass(frozen=True)
class RoleTimes:
    """Times of the roles in the steps of one layout.

    Attributes:
        sizes: of the layout, by the path of the setting.
        step_s: seconds per step.
        trains, generates: shares of a step in which the trainer trains, and in which replicas generate on average.
        for_samples: share in which the trainer waits for replicas that generate.
        for_training: share in which replicas wait for the trainer that trains.
        evaluators: replicas that only evaluate.
    """

    sizes: Mapping[str, int]
    step_s: float
    trains: float
    generates: float
    for_samples: float
    for_training: float
    evaluators: int = 0

    def expected_step_s(self, sizes: Mapping[str, int]) -> float:
        """Return the seconds of a step in a layout with other sizes, by the formula of this module."""
        nodes = self.sizes[POLICY_NODES] / sizes[POLICY_NODES]
        engines = (self.sizes[NUM_ENGINES] - self.evaluators) / (sizes[NUM_ENGINES] - self.evaluators)
        trainer, replicas = 1 - self.for_samples, 1 - self.for_training
        shorter = min(trainer, replicas)
        overlap = max(0.0, trainer + replicas - 1) / shorter if shorter > 0 else 0.0
        trainer += self.trains * (nodes - 1)
        replicas += self.generates * (engines - 1)
        return self.step_s * (trainer + replicas - overlap * min(trainer, replicas))


@dataclass(frozen=True)
class LayoutChoice:
    """Layout for the next attempt.

    Attributes:
        why: of several with as many nodes it is this one; empty where there is only one, or nothing was measured.
        step_s: expected seconds per step; None: not known.
    """

    layout: AttemptLayout
    why: str = ""
    step_s: float | None = None


def choose_layout(
    layouts: Sequence[AttemptLayout],
    times: RoleTimes,
    measured: Sequence[tuple[Mapping[str, int], float]] = (),
    least_gain: float = LEAST_GAIN,
) -> LayoutChoice:
    """Return the layout whose steps are expected to be shortest; the present one where the gain is too small, or the last one without measures.

    Args:
        layouts: all with as many nodes.
        times: of the newest attempt that trained enough steps, on any number of nodes.
        measured: sizes and seconds per step of layouts in which the run has trained.
        least_gain: share of a step's time that has to be gained.
    """
    expected = [_estimates(layout, times, measured)[-1] for layout in layouts]
    if len(layouts) == 1:
        return LayoutChoice(layouts[0], step_s=expected[0])
    at = next((index for index, layout in enumerate(layouts) if layout.sizes == times.sizes), len(layouts) - 1)
    best = min(range(len(layouts)), key=expected.__getitem__)
    waits = f"the trainer waited {times.for_samples:.0%} for samples, engines {times.for_training:.0%} for training"
    if expected[best] < (1 - least_gain) * expected[at]:
        gain = (
            f"{expected[best]:.3g} s per step expected, {expected[at]:.3g} s with {describe_sizes(layouts[at].sizes)}"
        )
        return LayoutChoice(layouts[best], f"{waits}; {gain}", expected[best])
    return LayoutChoice(
        layouts[at], f"{waits}; no other sizes are expected to be {least_gain:.0%} faster", expected[at]
    )


def fewest_nodes(
    choice: LayoutChoice,
    smaller: Sequence[AttemptLayout],
    times: RoleTimes,
    measured: Sequence[tuple[Mapping[str, int], float]] = (),
) -> LayoutChoice:
    """Return the layout of fewest nodes whose steps are expected to be as short as those of a choice; the choice where it has them itself.

    Where one role waits for the other, more nodes for the one that waits gain nothing. A measure may be old, from when answers had another
    length. Of a smaller layout the longer of the expected and the measured step counts. Of the choice the shorter one does.

    Args:
        smaller: layouts of fewer nodes.
        times, measured: as of `choose_layout`, of which the choice is.
    """
    most_s = (1 + ALIKE) * min(_estimates(choice.layout, times, measured))
    estimated = [(max(_estimates(layout, times, measured)), layout) for layout in smaller]
    alike = [found for found in estimated if found[0] <= most_s]
    if not alike:
        return choice
    step_s, layout = min(alike, key=lambda found: (found[1].nodes, found[0]))
    more = choice.layout.nodes - layout.nodes
    return LayoutChoice(layout, f"{more} more node(s) would make its steps of {step_s:.3g} s no shorter", step_s)


def _estimates(
    layout: AttemptLayout, times: RoleTimes, measured: Sequence[tuple[Mapping[str, int], float]]
) -> list[float]:
    """Return the seconds of a step in a layout: as the formula expects them, and after that as they were measured, where they were."""
    return [times.expected_step_s(layout.sizes), *(seconds for sizes, seconds in measured if sizes == layout.sizes)]
