"""Cosmos-RL's loss of PI0.5: the turns of an episode are rows, and an episode counts as a micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from tests.golden.adapters.packed import train
from tests.golden.case import Case


def pi05_chunk_loss(case: Case) -> dict[str, Any]:
    """The loss of one of several episodes: the others have advantage 0 and probabilities that did not change."""
    given, settings = case.inputs, case.params
    assert settings["clip_ratio_c"] is None
    advantage, others = given["advantage"], settings["n_episodes"] - 1
    turns = [dict(zip(("logprobs", "old", "mask"), each, strict=True)) for each in zip(*_rows(given), strict=True)]
    turns = [{**turn, "zeros": torch.zeros_like(turn["mask"])} for turn in turns]
    own = [{**turn, "advantages": torch.full_like(turn["mask"], advantage)} for turn in turns]
    still = [{**turn, "logprobs": turn["old"]} for turn in turns]
    algorithm = AlgorithmConfig(
        policy_loss_type="regular", eps_clip_low=settings["epsilon_low"], eps_clip_high=settings["epsilon_high"]
    )
    sums, _ = train(algorithm, Reduction("token_mean_legacy"), [*own, *still * others], size=len(turns))
    done = float(torch.stack([turn["mask"] for turn in turns]).sum())
    drift = sum(((turn["old"] - turn["logprobs"]) * turn["mask"]).sum() for turn in turns)
    return {"loss": sums["policy_loss"], "clipfrac": sums["loss_metrics/clip_ratio"] / done, "ppo_kl": drift / done}


def _rows(given: Any) -> list[list[torch.Tensor]]:
    return [list(torch.tensor(given[name])) for name in ("log_probs", "old_log_probs", "mask")]


ADAPTERS = {"pi05_chunk_loss": pi05_chunk_loss}
