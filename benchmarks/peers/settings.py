"""TRL's settings of the same training, made from hpcrl's; works without TRL.

TRL counts a batch in samples where hpcrl counts prompts, and its step is an optimizer step, of which hpcrl's step may have several:

    hpcrl                                            TRL
    train_batch_size x n_samples_per_prompt          per_device_train_batch_size x steps_per_generation
    policy_mini_batch_size x n_samples_per_prompt    per_device_train_batch_size x gradient_accumulation_steps
    micro_train_batch_size_per_gpu                   per_device_train_batch_size
    update_epochs_per_batch                          num_iterations

What differs nevertheless: the first of TRL's warm-up has learning rate 0; it adds 1e-4 to the deviation of a group's rewards, hpcrl 1e-6; biases and norms
have no weight decay; mini-batches are drawn from the batch's samples, where hpcrl's are whole groups, and each divides by the mean number
of tokens of the batch's mini-batches. TRL evaluates with the sampling of training, so that train_with_trl.py evaluates greedily in its place.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

from hpcrl.config import Config

ENGINES = ("vllm", "transformers")
_SAME = {
    "algorithm.advantage_estimator": "grpo",
    "algorithm.policy_loss_type": "regular",
    "algorithm.loss_reduction": "token_mean",
    "algorithm.kl_estimator_type": "k3",
    "algorithm.use_kl_in_reward": False,
    "algorithm.use_entropy_loss": False,
    "algorithm.zero_variance_filter": False,
    "algorithm.off_policy_correction.tis_ratio_type": None,
    "policy.optimizer_config.scheduler": "constant_with_warmup",
    "policy.optimizer_config.warmup_ratio": None,
}
"""Settings of `trainer` with the only value that the settings below correspond to."""


def grpo_settings(config: Config, engine: str, steps: int, output: Path) -> dict[str, Any]:
    """Return the arguments of TRL's GRPOConfig.

    Args:
        engine: of `ENGINES`; TRL's vLLM is in the trainer's process.
        steps: of hpcrl, of the whole run.

    Raises:
        ValueError: the configuration has something that these settings have no counterpart for.
    """
    trainer, generator, algorithm = config.trainer, config.generator, config.trainer.algorithm
    for name, wanted in _SAME.items():
        if (found := attrgetter(name)(trainer)) != wanted:
            raise ValueError(f"trainer.{name}: TRL's settings are those of {wanted!r}, found {found!r}")
    optimizer, sampling = trainer.policy.optimizer_config, generator.sampling_params
    samples = generator.n_samples_per_prompt
    micro, updates = trainer.micro_train_batch_size_per_gpu, trainer.updates_per_batch(trainer.policy_mini_batch_size)
    if not micro or trainer.policy_mini_batch_size * samples % micro:
        raise ValueError(
            f"trainer.micro_train_batch_size_per_gpu: expected a divisor of a mini-batch's "
            f"{trainer.policy_mini_batch_size * samples} samples, found {micro}"
        )
    return {
        "output_dir": str(output),
        "use_cpu": config.slurm.gpus_per_node == 0,
        "bf16": trainer.policy.fsdp_config.mixed_precision.param_dtype == "bf16",
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": trainer.policy_mini_batch_size * samples // micro,
        "steps_per_generation": trainer.train_batch_size * samples // micro,
        "num_iterations": trainer.update_epochs_per_batch,
        "num_generations": samples,
        "max_steps": steps * updates,
        "shuffle_dataset": False,
        "seed": trainer.seed,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": optimizer.scheduler,
        "warmup_steps": optimizer.num_warmup_steps,
        "adam_beta1": optimizer.adam_betas[0],
        "adam_beta2": optimizer.adam_betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "loss_type": "dapo",
        "epsilon": algorithm.eps_clip_low,
        "epsilon_high": algorithm.eps_clip_high,
        "scale_rewards": "group" if algorithm.grpo_norm_by_std else "none",
        "beta": algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        "use_bias_correction_kl": algorithm.kl_importance_weighted,
        "temperature": config.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
        "max_completion_length": sampling.max_generate_length,
        "use_vllm": engine == "vllm",
        "vllm_mode": "colocate",
        "vllm_max_model_length": config.max_model_len,
        "vllm_importance_sampling_correction": False,
        "eval_strategy": "no",
        "save_strategy": "steps" if trainer.ckpt_interval > 0 else "no",
        "save_steps": max(1, trainer.ckpt_interval) * updates,
        "save_total_limit": trainer.max_ckpts_to_keep,
        "logging_steps": updates,
        "report_to": "none",
        "disable_tqdm": True,
    }
