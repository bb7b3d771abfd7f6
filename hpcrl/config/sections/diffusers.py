"""Section `trainer.policy.diffusers`: policies that are diffusion pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.effects import OTHER_MODEL, OTHER_PROMPTS, SAME_NUMBERS
from hpcrl.config.setting import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, SHARE_ABOVE_0, Check, section, setting


@dataclass(frozen=True, kw_only=True)
class DiffusionSamplingConfig:
    num_steps: int = setting(40, range=COUNT)
    """Denoising steps in training rollouts."""

    eval_num_steps: int = setting(40, range=COUNT)
    """Denoising steps in evaluation."""

    guidance_scale: float = setting(4.5, range=NOT_NEGATIVE)
    """Weight of classifier-free guidance; 1 or less: none."""

    noise_level: float = setting(1.0, range=NOT_NEGATIVE)
    """Noise of the stochastic samplers relative to the schedule's (eta); 0: none."""

    deterministic_sampling: bool = False
    """Integrate the ODE instead; required by dpm1 and dpm2."""

    solver: Literal["flow", "dance", "ddim", "dpm1", "dpm2"] = "dpm2"
    """Sampler; dpm1 and dpm2 need deterministic_sampling=true."""

    @property
    def stochastic(self) -> bool:
        """Whether a sampler draws its steps, so that they have probabilities."""
        return not self.deterministic_sampling and self.noise_level > 0


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    enable: bool = False
    """Keep an exponential moving average of the weights for evaluation."""

    decay: float = setting(0.9999, range=SHARE)
    """Upper bound of the decay min((1 + t) / (10 + t), decay)."""

    update_step_interval: int = setting(1, range=COUNT)
    """Steps between updates of the average."""


@dataclass(frozen=True, kw_only=True)
class DiffusersConfig:
    enable: bool = setting(False, on_change=OTHER_MODEL)
    """The policy is a diffusion pipeline (Hugging Face diffusers): trainer.policy.model.path has its model_index.json."""

    algorithm: Literal["nft", "grpo"] = "nft"
    """How rewards train the pipeline. nft: final samples are noised again, and the velocity is fitted to good ones and away from bad ones (DiffusionNFT, arXiv:2509.16117). grpo: the denoising steps are actions with probabilities, trained by trainer.algorithm.policy_loss_type (Flow-GRPO, arXiv:2505.05470)."""

    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Number type of the transformer and the text encoder."""

    is_video: bool = setting(False, on_change=OTHER_MODEL)
    """The pipeline makes videos."""

    max_prompt_length: int = setting(300, range=COUNT, on_change=OTHER_PROMPTS)
    """Tokens of a prompt at most."""

    weighting_scheme: Literal["logit_normal", "mode", "cosmap", "sigma_sqrt", "none"] = "logit_normal"
    """How supervised fine-tuning draws noise levels and weighs their errors, by diffusers' names (Stable Diffusion 3, arXiv:2403.03206). logit_normal and mode are densities, cosmap and sigma_sqrt weights of uniform levels, none is neither."""

    logit_mean: float = 0.0
    """Mean of the logit-normal density."""

    logit_std: float = setting(1.0, range=POSITIVE)
    """Standard deviation of the logit-normal density."""

    offload: bool = setting(True, on_change=SAME_NUMBERS)
    """Keep encoders in host memory outside their use."""

    inference_size: list[int] = setting(
        [1024, 1024],
        check=Check(
            "expected height and width in pixels, found {value}", lambda size: len(size) == 2 and min(size) >= 1
        ),
    )
    """Height and width of what is made, in pixels."""

    inference_frames: int = setting(41, range=COUNT)
    """Frames of evaluation videos."""

    train_frames: int = setting(41, range=COUNT)
    """Frames of training videos."""

    timesteps_fraction: float = setting(1.0, range=SHARE_ABOVE_0)
    """Share of the denoising steps that each sample trains, rounded down."""

    nft_beta: float = setting(1.0, range=POSITIVE)
    """Strength beta of DiffusionNFT's implicit policies (arXiv:2509.16117)."""

    weight_copy_decay_type: Literal[0, 1, 2] = 0
    """Share of itself that the sampling adapter keeps after step s, where the trained one fills the rest. 0: nothing, 1: min(0.001 s, 0.5), 2: nothing until step 75, then min(0.0075 (s - 75), 0.999)."""

    sample: DiffusionSamplingConfig = section(DiffusionSamplingConfig)

    ema: EmaConfig = section(EmaConfig)

    @property
    def trained_steps(self) -> int:
        """Denoising steps of each sample that are trained."""
        return max(1, int(self.sample.num_steps * self.timesteps_fraction))
