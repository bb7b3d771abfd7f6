"""What follows from the configuration: pure functions of its sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config.generator import GeneratorConfig, SamplingParams
from hpcrl.config.trainer import TrainerConfig
from hpcrl.errors import DataError

if TYPE_CHECKING:
    from hpcrl.config.root import Config


def eval_sampling(generator: GeneratorConfig) -> SamplingParams:
    """Return how evaluation samples; where it is not set: greedy, with the training length."""
    if generator.eval_sampling_params is not None:
        return generator.eval_sampling_params
    return SamplingParams(temperature=0.0, max_generate_length=generator.sampling_params.max_generate_length)


def temperature(config: Config) -> float:
    """Return what divides the logits in training; where it is not set: the sampling temperature."""
    own = config.trainer.algorithm.temperature
    return config.generator.sampling_params.temperature if own is None else own


def trainer_ranks(trainer: TrainerConfig) -> int:
    """Return the number of trainer processes."""
    return trainer.placement.policy_num_nodes * trainer.placement.policy_num_gpus_per_node


def replicas_per_node(config: Config) -> int:
    """Return how many replicas one rollout node holds; where it is not set: as many as its GPUs allow, at least 1."""
    if config.slurm.replicas_per_node is not None:
        return config.slurm.replicas_per_node
    return max(1, config.slurm.gpus_per_node // config.generator.inference_engine.tensor_parallel_size)


def steps_per_epoch(n_prompts: int, trainer: TrainerConfig) -> int:
    """Return the full batches in `n_prompts` prompts; a remainder is not trained.

    Raises:
        DataError: there is not one full batch.
    """
    if n_prompts < trainer.train_batch_size:
        raise DataError(
            f"data.train_data has {n_prompts} prompts of at most {trainer.max_prompt_length} tokens, fewer than "
            f"trainer.train_batch_size={trainer.train_batch_size}: name more data or lower the batch size"
        )
    return n_prompts // trainer.train_batch_size


def total_steps(n_prompts: int, trainer: TrainerConfig) -> int:
    """Return the last step of the run.

    Raises:
        DataError: `n_prompts` do not fill one batch.
    """
    steps = trainer.epochs * steps_per_epoch(n_prompts, trainer)
    return steps if trainer.max_steps is None else min(steps, trainer.max_steps)
