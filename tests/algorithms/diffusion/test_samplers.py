"""Steps of the samplers against distributions of torch, against diffusers' schedulers, and against each other where they have to meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpcrl.algorithms.diffusion.nft import implicit_losses, nft_loss, noised, optimality
from hpcrl.algorithms.diffusion.samplers import STEPS, STOCHASTIC, sample

SIGMAS = [1.0, 0.9, 0.75, 0.5, 0.2, 0.0]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def field(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """A velocity that bends."""
    return torch.sin(x) + sigma * x.roll(1, -1)


@pytest.mark.parametrize("solver", STOCHASTIC)
def test_log_probabilities_are_those_of_the_gaussian_that_a_step_draws_from(solver: str) -> None:
    x, noise = drawn(3, 2, 4), drawn(3, 2, 4, seed=1)
    step = STEPS[solver](field(x, 0.75), x, SIGMAS, 2, 0.7)
    chosen = step.draw(noise)
    expected = torch.distributions.Normal(step.mean, step.std).log_prob(chosen).flatten(1).mean(1)
    torch.testing.assert_close(step.logprob(chosen), expected)


@pytest.mark.parametrize("solver", STOCHASTIC)
def test_without_noise_all_of_them_are_one_step_of_the_flow(solver: str) -> None:
    x = drawn(2, 4)
    step = STEPS[solver](field(x, 0.5), x, SIGMAS, 3, 0.0)
    torch.testing.assert_close(step.mean, x + (SIGMAS[4] - SIGMAS[3]) * field(x, 0.5))
    assert step.std == 0
    assert not step.logprob(step.mean).any()


@pytest.mark.parametrize("solver", STOCHASTIC)
def test_a_path_has_the_log_probabilities_of_its_steps(solver: str) -> None:
    generator = torch.Generator().manual_seed(3)
    path = sample(field, drawn(2, 4), SIGMAS, solver, 0.5, lambda x: torch.randn(x.shape, generator=generator))
    for at in range(len(SIGMAS) - 1):
        before, after = path.latents[at : at + 2]
        step = STEPS[solver](field(before, SIGMAS[at]), before, SIGMAS, at, 0.5)
        torch.testing.assert_close(path.logprobs[at], step.logprob(after))


@pytest.mark.parametrize(("solver", "order"), [("dpm1", 1), ("dpm2", 2)])
def test_solvers_go_where_diffusers_goes(solver: str, order: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler: Any = diffusers.DPMSolverMultistepScheduler(
        solver_order=order,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=2.0,
        final_sigmas_type="zero",
        lower_order_final=order == 1,
    )
    scheduler.set_timesteps(6)
    sigmas = scheduler.sigmas.tolist()
    x = theirs = drawn(2, 4).double()
    for at, t in enumerate(scheduler.timesteps):
        theirs = scheduler.step(field(theirs, sigmas[at]), t, theirs).prev_sample
    path = sample(field, x, sigmas, solver, 0.0)
    torch.testing.assert_close(path.latents[-1], theirs, rtol=1e-4, atol=1e-4)


def test_a_larger_step_of_the_second_order_is_nearer_to_the_flow() -> None:
    def ends(solver: str, steps: int) -> torch.Tensor:
        sigmas = [1 - at / steps for at in range(steps)] + [0.0]
        return sample(field, drawn(4, 8).double(), sigmas, solver, 0.0).latents[-1]

    true = ends("dpm2", 2000)
    assert (ends("dpm2", 20) - true).abs().max() < 0.5 * (ends("dpm1", 20) - true).abs().max()


def test_good_samples_pull_and_bad_ones_push() -> None:
    clean, noise, t = drawn(2, 8), drawn(2, 8, seed=1), torch.tensor([0.5, 0.5])
    old = drawn(2, 8, seed=2)
    velocity = old.clone().requires_grad_()
    losses = implicit_losses(velocity, old, clean, noised(clean, noise, t), t, beta=1.0)
    nft_loss(*losses, torch.tensor([5.0, -5.0]), -5.0, 5.0, 1.0).sum().backward()
    assert velocity.grad is not None
    towards = (velocity.grad * (old - (noise - clean))).sum(1)
    assert towards[0] > 0  # descent goes to the velocity that made the good sample
    assert towards[1] < 0


def test_optimality_is_a_half_without_an_advantage_and_at_most_one() -> None:
    torch.testing.assert_close(
        optimality(torch.tensor([-9.0, 0.0, 2.5, 9.0]), -5.0, 5.0), torch.tensor([0.0, 0.5, 0.75, 1.0])
    )
    assert math.isclose(optimality(torch.tensor([-9.0]), -2.0, 5.0).item(), 0.3, rel_tol=1e-6)
