"""Losses of supervised fine-tuning per token, by their names in trainer.sft.loss_type, from log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcrl.algorithms.losses import widened

Loss = Callable[[torch.Tensor], torch.Tensor]
"""Log-probabilities [P] -> loss [P]."""


def nll(logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, -log π."""
    return -widened(logprobs_P)


def dft(logprobs_P: torch.Tensor) -> torch.Tensor:
    """Return -stop(π) log π (dynamic fine-tuning, DFT, arXiv:2508.05629, equation 9); stop: without gradient."""
    logprobs_P = widened(logprobs_P)
    return -logprobs_P.detach().exp() * logprobs_P


LIKELIHOOD_LOSSES: dict[str, Loss] = {"nll": nll, "dft": dft}
