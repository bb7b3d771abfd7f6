"""Actions by a flow: probabilities are those of the Gaussians that steps are drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from hpcrl.algorithms.diffusion.actions import STEPS, action_logprobs, cps_step, noise_levels, walk


def field(x: torch.Tensor, sigma: float) -> torch.Tensor:
    return 0.3 * x + sigma


@pytest.mark.parametrize(("method", "drawn"), [("flow_sde", 4), ("flow_cps", 3)])
def test_the_probability_of_an_action_is_the_mean_over_steps_of_the_sum_over_its_numbers(
    method: str, drawn: int
) -> None:
    torch.manual_seed(0)
    noise, sizes, level = torch.randn(2, 3, 5), torch.tensor([5, 2]), 0.6
    path, velocities = walk(field, noise, 4, method, level, torch.randn_like)
    assert torch.equal(path[:, 0], noise)
    logprobs, entropies = action_logprobs(velocities, path, sizes, method, level)
    sigmas, expected, spread = noise_levels(4), torch.zeros(2, 3), torch.zeros(2, 3)
    for at in range(drawn):
        step = STEPS[method](velocities[:, at], path[:, at], sigmas, at, level)
        gaussian = Normal(step.mean, step.std)
        told, own = gaussian.log_prob(path[:, at + 1]), gaussian.entropy()
        for row, size in enumerate(sizes.tolist()):
            expected[row] += told[row, :, :size].sum(-1) / drawn
            spread[row] += own[row, :, :size].sum(-1) / drawn
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropies, spread)


def test_the_share_of_noise_stays_as_it_is() -> None:
    """Of a chunk that the model knows, what a step of flow_cps leaves is on the straight path, with as much noise as the level says."""
    torch.manual_seed(0)
    clean, noise = torch.full((1, 200, 200), 2.0), torch.randn(1, 200, 200)
    x = 0.25 * clean + 0.75 * noise
    step = cps_step(noise - clean, x, [0.75, 0.5], 0, 0.4)
    after = step.draw(torch.randn_like(x))
    assert after.mean().item() == pytest.approx(0.5 * 2.0, abs=0.02)
    assert after.std().item() == pytest.approx(0.5, abs=0.01)
    assert step.std == pytest.approx(0.5 * math.sin(0.2 * math.pi))
    torch.testing.assert_close(step.clean, clean)


def test_without_draws_the_ode_is_integrated() -> None:
    """The velocity of the straight path to a constant brings noise there whatever the number of steps."""
    goal, noise = torch.full((1, 2, 3), 0.5), torch.randn(1, 2, 3)
    for steps in (1, 7):
        path, _ = walk(lambda x, sigma: (x - goal) / sigma, noise, steps, "flow_sde", 0.5, None)
        torch.testing.assert_close(path[:, -1], goal, rtol=1e-4, atol=1e-4)
