"""SkyRL's critic loss: rows padded to one length become samples of that length, one micro-batch laid end to end."""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.trainer.critic import build_critic_objective
from hpcrl.types import MicroBatch
from tests.golden.adapters.packed import sample_weights
from tests.golden.cases import Case


def critic_loss(case: Case) -> dict[str, Any]:
    values_BT, old_BT, returns_BT, mask_BT = (
        torch.tensor(case.inputs[name]) for name in ("values", "old_values", "returns", "loss_mask")
    )
    weights = sample_weights(Reduction("sequence_mean"), mask_BT.sum(1).int().tolist())
    mask_P, ids_P = mask_BT.flatten(), torch.zeros(mask_BT.numel(), dtype=torch.int64)
    batch = MicroBatch(
        token_ids=ids_P,
        positions=ids_P,
        lengths=[mask_BT.shape[1]] * len(mask_BT),
        labels=ids_P,
        loss_mask=mask_P,
        weights=mask_P * torch.tensor(weights).repeat_interleave(mask_BT.shape[1]),
        nll_weights=torch.zeros_like(mask_P),
        rollout_logprobs=torch.zeros_like(mask_P),
        values=old_BT.flatten(),
        returns=returns_BT.flatten(),
    )
    values_BT.requires_grad_()
    loss, sums = build_critic_objective(case.params["value_clip"] or 0.0)(batch, values_BT.flatten())
    loss.backward()
    return {"loss": loss, "clipfrac": sums["clipfrac"] / sums["tokens"], "grad_values": values_BT.grad}


ADAPTERS = {"loss.critic": critic_loss}
