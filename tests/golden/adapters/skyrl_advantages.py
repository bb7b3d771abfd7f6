"""SkyRL's advantages and filters: rows padded to one length become samples laid end to end, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcrl.algorithms.advantages import ESTIMATORS, Outcomes, lambda_returns, normalize, whiten
from hpcrl.algorithms.filters import varied
from hpcrl.config import AlgorithmConfig
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.controller.describe import describe
from hpcrl.trainer.advantages import estimate_advantages, trained_groups
from hpcrl.trainer.describe import describe_batch
from hpcrl.trainer.packing import Row
from hpcrl.trainer.plan import Pick
from hpcrl.types import Batch, GroupMeta, Sample
from tests.golden.cases import Case


class Rows:
    """The rows of a case; what follows the last cell of the mask is padding, and no part of a sample."""

    def __init__(self, mask: Sequence[Sequence[float]]) -> None:
        self._mask = torch.tensor(mask, dtype=torch.float64)
        self.lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in self._mask]
        self.mask_P = self.pack(mask)

    def pack(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        rows = torch.tensor(values, dtype=torch.float64)
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])

    def pad(self, values_P: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(self._mask)
        for row, values in zip(rows, values_P.split(self.lengths), strict=True):
            row[: len(values)] = values
        return rows


def numbers(names: Sequence[str]) -> list[int]:
    """Return the names of groups as numbers, in order of appearance."""
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


def estimate(case: Case) -> dict[str, Any]:
    name = case.fn.removeprefix("advantage.")
    rows = Rows(case.inputs["response_mask"])
    groups = numbers(case.inputs.get("index", range(len(rows.lengths))))
    values = case.inputs.get("values")
    outcomes = Outcomes(
        rewards_P=rows.pack(case.inputs["token_level_rewards"]),
        mask_P=rows.mask_P,
        lengths=rows.lengths,
        groups_B=torch.tensor(groups),
        values_P=None if values is None else rows.pack(values),
    )
    settings = {key: case.params[key] for key in ("grpo_norm_by_std", "gamma", "lambd") if key in case.params}
    algorithm = AlgorithmConfig(**settings)
    advantages = rows.pad(ESTIMATORS[name](outcomes, algorithm))
    if name != "reinforce++":
        return {"advantages": advantages, "returns": advantages}
    returns_P = lambda_returns(outcomes, torch.zeros_like(outcomes.rewards_P), algorithm.gamma, 1.0)
    return {"advantages": advantages, "returns": rows.pad(returns_P)}


def batch_normalize(case: Case) -> dict[str, Any]:
    rows = Rows(case.inputs["response_mask"])
    return {"advantages": rows.pad(normalize(rows.pack(case.inputs["advantages"]), rows.mask_P))}


def masked_whiten(case: Case) -> dict[str, Any]:
    values, mask = (torch.tensor(case.inputs[name], dtype=torch.float64) for name in ("values", "mask"))
    return {"out": whiten(values.flatten(), mask.flatten()).view_as(values)}


def zero_variance_filter(case: Case) -> dict[str, Any]:
    rewards, uids = case.inputs["rewards"], case.inputs["uids"]
    kept = [
        at
        for at, uid in enumerate(uids)
        if varied([reward for reward, other in zip(rewards, uids, strict=True) if other == uid])
    ]
    return {"kept_indices": kept}


def trainer_advantages(case: Case) -> dict[str, Any]:
    """The rows that SkyRL added to fill a batch are left out."""
    size = len(case.inputs["rewards"]) - case.inputs["metadata"]["pad_size"]
    rewards, masks = case.inputs["rewards"][:size], case.inputs["loss_mask"][:size]
    samples = [_sample(row, mask) for row, mask in zip(rewards, masks, strict=True)]
    batch, places = _batch(samples, case.inputs["metadata"]["uids"][:size])
    algorithm = build(AlgorithmConfig, nested(case.params)["trainer"]["algorithm"])
    rows = [Row(samples[at], pick) for pick, at in places.items()]
    advantages = estimate_advantages(batch, rows, algorithm, list)
    found = describe_batch(batch, advantages)
    return {"metrics": {name: found[name] for name in case.outputs["metrics"]}}


def postprocess(case: Case) -> dict[str, Any]:
    masks = case.inputs["loss_masks"]
    samples = [_sample([reward], [1.0]) for reward in case.inputs["rewards"]]
    batch, places = _batch(samples, case.inputs["uids"])
    name = "trainer.algorithm.zero_variance_filter"
    trained = trained_groups(batch, AlgorithmConfig(zero_variance_filter=case.params.get(name, False)))
    kept = {at for pick, at in places.items() if pick.group in trained}
    found = describe(batch)
    return {
        "loss_masks": [mask if at in kept else [0] * len(mask) for at, mask in enumerate(masks)],
        "metrics": {name: found[name] for name in case.outputs["metrics"]},
    }


def _sample(rewards: Sequence[float], mask: Sequence[float]) -> Sample:
    """Return a response to a prompt of one token."""
    rewards_T, mask_T = torch.tensor([0.0, *rewards]), torch.tensor([0.0, *mask])
    return Sample(torch.zeros(len(mask_T)).long(), mask_T, mask_T, mask_T.int(), rewards_T, "stop")


def _batch(samples: Sequence[Sample], uids: Sequence[str]) -> tuple[Batch, dict[Pick, int]]:
    """Return the samples' groups as a batch, and the place of each sample there with its number here."""
    members = {uid: [at for at, other in enumerate(uids) if other == uid] for uid in uids}
    groups = [
        GroupMeta(
            group_id=uid,
            kind="train",
            replica=0,
            path="",
            rewards=[float(samples[at].rewards.sum()) for at in found],
            lengths=[len(samples[at].token_ids) for at in found],
            response_lengths=[int(samples[at].loss_mask.sum()) for at in found],
            stop_reasons=["stop"] * len(found),
            oldest_version=0,
            newest_version=0,
            data_source="",
            seconds=0.0,
        )
        for uid, found in members.items()
    ]
    places = {Pick(g, i, 0): at for g, found in enumerate(members.values()) for i, at in enumerate(found)}
    return Batch(1, groups, 0), places


ADAPTERS = {
    "advantage.batch_normalize": batch_normalize,
    "advantage.grpo": estimate,
    "advantage.rloo": estimate,
    "advantage.maxrl": estimate,
    "advantage.reinforce++": estimate,
    "util.masked_whiten": masked_whiten,
    "sampling.zero_variance_filter": zero_variance_filter,
    "trainer.advantages": trainer_advantages,
    "reward.postprocess": postprocess,
}
