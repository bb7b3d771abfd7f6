"""Limits of samples and passes in tokens, which depend on the policy's family."""

from __future__ import annotations

from hpcrl.config.family import family_of
from hpcrl.config.sections.tree import ConfigTree

_LEAST_TOKENS = 16384  # of a micro-batch on a GPU


def longest_sample(config: ConfigTree) -> int:
    """Return the tokens of a sample at most: what may come before its last turn, and that turn; of a dataset's row, or an answer of it, with its prompt."""
    if config.trainer.offline:
        return family_of(config).longest_row(config) or 0
    return config.max_input_length + config.generator.sampling_params.max_generate_length


def max_seq_len(config: ConfigTree) -> int:
    """Return the divisor of seq_mean_token_sum_norm in tokens; where it is not set: the longest sample of one turn."""
    own = config.trainer.algorithm.max_seq_len
    return longest_sample(config) if own is None else own


def largest_micro_batch(config: ConfigTree) -> int:
    """Return the tokens of a forward and backward pass at most, padding not counted."""
    longest, tokens = _longest_together(config), micro_batch_tokens(config)
    if tokens is not None:
        return max(tokens, longest)  # a longer sample has a pass of its own
    return (config.trainer.micro_train_batch_size_per_gpu or 1) * longest


def micro_batch_tokens(config: ConfigTree) -> int | None:
    """Return the tokens that limit a pass; None: the number of its samples does.

    Where neither is set, a GPU gets so many tokens that gathering the parameters for a pass takes less time than the pass. For a family whose
    passes tokens do not measure, a pass has one sample.
    """
    trainer = config.trainer
    if trainer.max_tokens_per_micro_batch is not None:
        return trainer.max_tokens_per_micro_batch
    samples = trainer.micro_train_batch_size_per_gpu, trainer.micro_forward_batch_size_per_gpu
    if any(samples) or config.slurm.gpus == 0 or not family_of(config).limits_passes_by_tokens(config):
        return None
    return max(_LEAST_TOKENS, 2 * _longest_together(config))


def _longest_together(config: ConfigTree) -> int:
    """Return the tokens at most of what no pass divides: a sample, or both of a pair."""
    return longest_sample(config) * (2 if config.trainer.pairwise else 1)
