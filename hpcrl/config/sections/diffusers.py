"""Section `trainer.policy.diffusers`: policies that are diffusion pipelines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DiffusionSamplingConfig:
    num_steps: int = 40
    """Denoising steps in training rollouts."""

    eval_num_steps: int = 40
    """Denoising steps in evaluation."""

    guidance_scale: float = 4.5
    """Weight of classifier-free guidance; 1 or less: none."""

    noise_level: float = 1.0
    """Noise of the stochastic samplers relative to the schedule's (eta); 0: none."""

    deterministic_sampling: bool = False
    """Integrate the ODE instead; required by dpm1 and dpm2."""

    solver: Literal["flow", "dance", "ddim", "dpm1", "dpm2"] = "dpm2"
    """Sampler; dpm1 and dpm2 need deterministic_sampling=true."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    enable: bool = False
    """Keep an exponential moving average of the weights for evaluation."""

    decay: float = 0.9999
    """Upper bound of the decay min((1 + t) / (10 + t), decay)."""

    update_step_interval: int = 1
    """Steps between updates of the average."""


@dataclass(frozen=True, kw_only=True)
class DiffusersConfig:
    enable: bool = False
    """The policy is a diffusion pipeline (Hugging Face diffusers): trainer.policy.model.path has its model_index.json."""

    algorithm: Literal["nft", "grpo"] = "nft"
    """How rewards train it; nft: final samples are noised anew, and the velocity is fitted to good ones and away from bad ones (DiffusionNFT, arXiv:2509.16117); grpo: the denoising steps are actions with probabilities, trained by trainer.algorithm.policy_loss_type (Flow-GRPO, arXiv:2505.05470)."""

    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Number type of the transformer and the text encoder."""

    is_video: bool = False
    """The pipeline makes videos."""

    max_prompt_length: int = 300
    """Tokens of a prompt at most."""

    weighting_scheme: Literal["logit_normal", "mode", "cosmap", "sigma_sqrt", "none"] = "logit_normal"
    """How supervised fine-tuning draws noise levels and weighs their errors, by diffusers' names (Stable Diffusion 3, arXiv:2403.03206): logit_normal and mode are densities, cosmap and sigma_sqrt weights of uniform levels, none is neither."""

    logit_mean: float = 0.0
    """Mean of the logit-normal density."""

    logit_std: float = 1.0
    """Standard deviation of the logit-normal density."""

    offload: bool = True
    """Keep encoders in host memory outside their use."""

    inference_size: list[int] = field(default_factory=lambda: [1024, 1024])
    """Height and width of what is made, in pixels."""

    inference_frames: int = 41
    """Frames of evaluation videos."""

    train_frames: int = 41
    """Frames of training videos."""

    timesteps_fraction: float = 1.0
    """Share of the denoising steps that each sample trains, rounded down."""

    nft_beta: float = 1.0
    """Strength beta of DiffusionNFT's implicit policies (arXiv:2509.16117)."""

    weight_copy_decay_type: Literal[0, 1, 2] = 0
    """How much of itself the sampling adapter keeps after step s, the rest is the trained one; 0: nothing, 1: min(0.001 s, 0.5), 2: nothing until step 75, then min(0.0075 (s - 75), 0.999)."""

    sample: DiffusionSamplingConfig = field(default_factory=DiffusionSamplingConfig)

    ema: EmaConfig = field(default_factory=EmaConfig)
