"""Notes where a converted run computes other numbers than Cosmos-RL, for report and header."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcrl.convert.conversion import Entry
from hpcrl.convert.cosmos.conditions import POLICY, is_diffusion, is_grpo, is_language, is_robot, moves_by_flow
from hpcrl.convert.cosmos.resolve import Resolved


def numbers(source: Resolved) -> Iterator[Entry]:
    """Yield an entry for each number that comes out otherwise, with the reason."""
    if not is_grpo(source) or is_diffusion(source):
        return
    size = source["rollout.n_generation"]
    if not source[f"{POLICY}.unbiased_advantage"] and size > 1:
        smaller = math.sqrt((size - 1) / size)
        message = (
            f"advantages are divided by the deviation of a sample (n - 1), in the source by that of a population (n). With {size} responses to a prompt "
            f"they are {smaller:.3g} times as large"
        )
        yield Entry("differs", f"{POLICY}.unbiased_advantage", "", message)
    if source[f"{POLICY}.entropy_coeff"] and is_language(source):
        message = "the entropy has a gradient here; in the source it only changes the number that is reported"
        yield Entry("differs", f"{POLICY}.entropy_coeff", "", message)
    if is_robot(source):
        message = (
            "each turn of an episode is a row here, and the loss a mean over rows. The source takes the mean over the actions of an episode and "
            "then over episodes, so that a long one counts no more than a short one"
        )
        yield Entry("differs", f"{POLICY}.trainer_type", "trainer.algorithm.loss_reduction", message)
    if moves_by_flow(source):
        message = (
            "each step of the flow is a draw and counts here, close to the source's joint_logprob, whose mean counts the first noise too. Without "
            "that the source draws one step of each chunk, chosen at random"
        )
        yield Entry("differs", "custom", "vla.pi05.noise_method", message)
