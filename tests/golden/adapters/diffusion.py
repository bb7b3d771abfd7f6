"""Diffusion models of Cosmos-RL: steps of its samplers, DiffusionNFT's loss, and weights that follow others."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpcrl.algorithms.diffusion.averages import average_decay, copy_decay, is_averaged
from hpcrl.algorithms.diffusion.nft import implicit_losses, nft_loss, noised, velocity_divergence
from hpcrl.algorithms.diffusion.samplers import STEPS, Step, ddim_scale, ddim_to, sample
from hpcrl.algorithms.losses import LossTokens, clipped_surrogate, ratio
from tests.golden.case import Case


def sampler_step(case: Case) -> dict[str, Any]:
    given, chosen = case.inputs, _tensor(case.inputs["prev_sample"])
    take = STEPS[case.fn.removesuffix("_grpo_step")]
    velocity, x = _tensor(given["model_output"]), _tensor(given["latents"])
    step = take(velocity, x, given["sigmas"], case.params["index"], case.params["eta"])
    return {"prev_sample": chosen, "pred_x0": step.clean, "log_prob": step.logprob(chosen)}


def ddim_update(case: Case) -> dict[str, Any]:
    """Cosmos-RL tells the step's deviation in two factors."""
    given, index = case.inputs, case.params["index"]
    step = ddim_to(
        _tensor(given["model_output_x0"]), _tensor(given["sample"]), given["sigmas"], index, case.params["eta"]
    )
    scale = ddim_scale(given["sigmas"], index)
    return {
        "x_t": step.draw(_tensor(given["noise"])),
        "prev_mean": step.mean,
        "std_dev_t": step.std / scale,
        "dt_sqrt": scale,
    }


def run_sampling(case: Case) -> dict[str, Any]:
    sigmas, z = case.inputs["sigma_schedule"], _tensor(case.inputs["z"])
    assert case.params["v_pred"] == "0.3*z+0.1*sigma"
    path = sample(lambda x, sigma: 0.3 * x + 0.1 * sigma, z, sigmas, case.params["solver"], eta=0.0)
    return {"latents": path.latents[-1], "all_latents": path.latents}


def diffusion_nft(case: Case) -> dict[str, Any]:
    """The cases give advantages as a column [N, 1], which is broadcast against the losses [N]: each sample is trained by each of them."""
    given, settings = case.inputs, case.params
    velocity = _tensor(given["forward_prediction"]).requires_grad_()
    old, reference, clean, noise = (
        _tensor(given[f"{name}"]) for name in ("old_prediction", "ref_prediction", "x0", "noise")
    )
    beta = settings["kl_beta"] if case.fn.endswith("@seed") else settings["nft_beta"]
    t = torch.full((len(clean),), settings["t"])
    positive, negative = implicit_losses(velocity, old, clean, noised(clean, noise, t), t, beta)
    advantages = _tensor(given["advantages"])[:, 0].repeat_interleave(len(clean))
    columns = positive.repeat(len(clean)), negative.repeat(len(clean))
    policy = nft_loss(*columns, advantages, settings["advantage_low"], settings["advantage_high"], beta).mean()
    divergence = velocity_divergence(velocity, reference).mean()
    loss = policy + settings["kl_beta"] * divergence
    loss.backward()
    return {
        "loss": loss,
        "policy_loss": policy,
        "kl_loss": divergence,
        "positive_loss": positive,
        "negative_loss": negative,
        "grad_forward": velocity.grad,
    }


def wfm_grpo(case: Case) -> dict[str, Any]:
    """A step whose deviation is sqrt(1/2) whatever its noise level: its log-density is the negative square, but for a constant."""
    given, settings = case.inputs, case.params
    current, old, reference, chosen = (_tensor(given[name]) for name in ("mu_current", "mu_old", "mu_ref", "sample"))
    logprobs, old_logprobs = (Step(mean, math.sqrt(0.5), mean).logprob(chosen) for mean in (current, old))
    one, lengths = torch.ones_like(logprobs), torch.ones(len(logprobs), dtype=torch.int64)
    advantages = _tensor(given["advantages"]).clamp(*settings["adv_clip"])
    tokens = LossTokens(logprobs, old_logprobs, old_logprobs, advantages, one, lengths)
    eps = {f"eps_clip_{side}": settings["clip_ratio"] for side in ("low", "high")}
    policy, divergence = clipped_surrogate(tokens, **eps)[0].mean(), velocity_divergence(current, reference).mean()
    kl = divergence if settings["kl_beta"] else torch.zeros_like(divergence)
    return {
        "ratio": ratio(logprobs, old_logprobs),
        "policy_loss": policy,
        "kl_loss": kl,
        "loss": policy + settings["kl_beta"] * kl,
    }


def weight_copy_decay(case: Case) -> dict[str, Any]:
    given = case.inputs
    return {"decay": {str(kind): [copy_decay(kind, step) for step in given["steps"]] for kind in given["decay_type"]}}


def copied_weights(case: Case) -> dict[str, Any]:
    target, source = _tensor(case.inputs["tgt"]), _tensor(case.inputs["src"])
    return {"tgt": torch.lerp(target, source, 1 - case.params["decay"])}


def averaged_weights(case: Case) -> dict[str, Any]:
    average = weights = _tensor(case.inputs["init"])
    trace = list[list[Any]]()
    for step in range(case.inputs["steps"]):
        weights = weights + case.inputs["delta_per_step"]
        decay = average_decay(step, case.params["decay"])
        if is_averaged(step, case.params["update_step_interval"]):
            average = torch.lerp(weights, average, decay)
        trace.append([decay, average.tolist()])
    return {"trace": trace}


def _tensor(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


ADAPTERS = {
    "*_grpo_step": sampler_step,
    "wfm_grpo_loss": wfm_grpo,
    "ddim_update": ddim_update,
    "run_sampling": run_sampling,
    "nft_loss*": diffusion_nft,
    "get_weight_copy_decay": weight_copy_decay,
    "copy_weights_with_decay": copied_weights,
    "EMAModuleWrapper.step": averaged_weights,
}
