"""Rewards of SkyRL and Cosmos-RL become advantages: rows padded to one length become samples laid end to end, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hpcrl.algorithms.advantages import ESTIMATORS, AdvantageInputs, is_per_token, lambda_returns
from hpcrl.algorithms.filters import varied
from hpcrl.algorithms.whitening import normalize, whiten
from hpcrl.config import AlgorithmConfig
from hpcrl.controller.metrics import batch_metrics
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.transcript import Transcript
from hpcrl.trainer.advantages import KlRewardPenalty, build_estimator, estimate_advantages
from hpcrl.trainer.batching import RowRef, trained_groups
from hpcrl.trainer.metrics import describe_batch
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.types import Batch, GroupMeta, Row
from tests.golden.adapters.converted import cosmos, expect_constant, skyrl
from tests.golden.case import Case
from tests.rows import group_meta

Rewards = float | Sequence[float]
"""Of a whole response, or of each of its tokens."""

ABOVE_0 = 2e-6
"""generator.success_reward with which a sample passes as SkyRL's do: with any reward above 0."""


def total(rewards: Rewards) -> float:
    """Return the reward of a response."""
    return float(sum(rewards)) if isinstance(rewards, Sequence) else float(rewards)


def members(uids: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the places of each name."""
    return {uid: [at for at, other in enumerate(uids) if other == uid] for uid in uids}


class Rows:
    """The rows of a case.

    Args:
        cut: whether what follows the last cell of the mask is padding and no part of a sample; else rewards there count.
    """

    def __init__(self, mask: Sequence[Sequence[float]], *, cut: bool) -> None:
        self._mask = torch.tensor(mask, dtype=torch.float64)
        ends = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in self._mask]
        self.lengths = ends if cut else [len(row) for row in self._mask]
        self.mask_P = self.pack(mask)

    def pack(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        rows = torch.tensor(values, dtype=torch.float64)
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])

    def pad(self, values_P: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(self._mask)
        for row, values in zip(rows, values_P.split(self.lengths), strict=True):
            row[: len(values)] = values
        return rows


def estimate(case: Case) -> dict[str, Any]:
    """Where there is no critic, SkyRL's returns are its advantages, but for reinforce++."""
    name = case.fn.removeprefix("advantage.")
    expect_constant(case.params, "epsilon", 1e-6)
    settings = {key: case.params[key] for key in ("grpo_norm_by_std", "gamma", "lambd") if key in case.params}
    rows = Rows(case.inputs["response_mask"], cut=is_per_token(ESTIMATORS[name]))
    inputs = AdvantageInputs(
        rewards_P=rows.pack(case.inputs["token_level_rewards"]),
        mask_P=rows.mask_P,
        lengths=rows.lengths,
        groups_B=torch.tensor(_numbers(case.inputs.get("index") or range(len(rows.lengths))), dtype=torch.int64),
        values_P=None if case.inputs.get("values") is None else rows.pack(case.inputs["values"]),
    )
    algorithm = AlgorithmConfig(advantage_estimator=name, **settings)
    advantages = rows.pad(build_estimator(algorithm)(inputs))
    return {"advantages": advantages, "returns": _returns(name, inputs, algorithm, rows, advantages)}


def _returns(
    name: str, inputs: AdvantageInputs, algorithm: AlgorithmConfig, rows: Rows, advantages: torch.Tensor
) -> torch.Tensor:
    if not is_per_token(ESTIMATORS[name]):
        return advantages
    expected_P, lambd = inputs.values_P, algorithm.lambd
    if name == "reinforce++" or expected_P is None:
        expected_P, lambd = torch.zeros_like(inputs.rewards_P), 1.0
    return rows.pad(lambda_returns(inputs, expected_P, algorithm.gamma, lambd))


def _numbers(names: Iterable[Any]) -> list[int]:
    """Return the names of groups as numbers, in order of appearance."""
    listed = list(names)
    order = list(dict.fromkeys(listed))
    return [order.index(name) for name in listed]


def batch_normalize(case: Case) -> dict[str, Any]:
    rows = Rows(case.inputs["response_mask"], cut=True)
    return {"advantages": rows.pad(normalize(rows.pack(case.inputs["advantages"]), rows.mask_P))}


def masked_whiten(case: Case) -> dict[str, Any]:
    values, mask = (torch.tensor(case.inputs[name], dtype=torch.float64) for name in ("values", "mask"))
    return {"out": whiten(values.flatten(), mask.flatten()).view_as(values)}


def zero_variance_filter(case: Case) -> dict[str, Any]:
    rewards, uids = [total(reward) for reward in case.inputs["rewards"]], case.inputs["uids"]
    good = {uid for uid, places in members(uids).items() if varied([rewards[at] for at in places])}
    return {"kept_indices": [at for at, uid in enumerate(uids) if uid in good]}


def trainer_advantages(case: Case) -> dict[str, Any]:
    """The rows that SkyRL added to fill a batch are left out; with is_last_step, rows up to a last one are the turns of one sample."""
    metadata, given = case.inputs.get("metadata") or {}, case.inputs
    size = len(given["rewards"]) - (metadata.get("pad_size") or 0)
    masks = [
        row or given["response_mask"][at] for at, row in enumerate(given.get("loss_mask") or given["response_mask"])
    ]
    samples = [_response(rewards, mask) for rewards, mask in zip(given["rewards"][:size], masks[:size], strict=True)]
    last = given.get("is_last_step") or metadata.get("is_last_step") or [True] * size
    uids = metadata.get("uids") or given.get("uids") or list(range(size))
    batch, refs = _batch(samples, uids[:size], last[:size])
    algorithm = _algorithm(case.params)
    packed = pack(samples, refs)
    if given.get("values") is not None:
        packed.scores.values = _scores(given["values"][:size])
    summed = estimate_advantages(batch, [packed], algorithm, list)
    advantages = _rows(packed, packed.scores.advantages)
    found = describe_batch(batch, summed, algorithm)
    return {
        "advantages": advantages,
        "returns": advantages if given.get("values") is None else _rows(packed, packed.scores.returns),
        "metrics": {name: found[name] for name in case.outputs.get("metrics", ()) if name in found},
    }


def _scores(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return what rows say of the tokens of responses as [P]: a last token predicts none."""
    return torch.cat([torch.tensor([*row, 0.0]) for row in rows])


def _rows(packed: PackedRows, values_P: torch.Tensor | None) -> list[list[float]]:
    assert values_P is not None
    return [row[:-1].tolist() for row in values_P.split(packed.lengths)]


def _algorithm(params: Mapping[str, Any]) -> AlgorithmConfig:
    return skyrl(params, checked=False).trainer.algorithm


def postprocess(case: Case) -> dict[str, Any]:
    given = case.inputs
    samples = [_said(*row) for row in zip(given["response_ids"], given["rewards"], given["loss_masks"], strict=True)]
    last = given.get("is_last_step") or [True] * len(samples)
    batch, refs = _batch(samples, given["uids"], last)
    trained = trained_groups(batch, _algorithm(case.params))
    found = batch_metrics(batch, ABOVE_0)
    pairs = list(zip(given["loss_masks"], refs, strict=True))
    return {
        "rewards": [sample.rewards[1:].tolist() for sample in samples],
        "loss_masks": [mask if ref.group in trained else [0] * len(mask) for mask, ref in pairs],
        "metrics": {name: found[name] for name in case.outputs.get("metrics", ()) if name in found},
    }


def _said(token_ids: Sequence[int], rewards: Rewards, mask: Sequence[float]) -> Row:
    """Return a response to a prompt of one token, paid as a whole or token by token."""
    if isinstance(rewards, Sequence):
        return _response(rewards, mask)
    transcript = Transcript([0])
    transcript.add_response(Generation(list(token_ids), [0.0] * len(token_ids), "stop", [0] * len(token_ids)))
    transcript.add_reward(rewards)
    return transcript.sample("stop", {})


def _response(rewards: Sequence[float], mask: Sequence[float]) -> Row:
    """Return a response to a prompt of one token."""
    rewards_T, mask_T = torch.tensor([0.0, *rewards]), torch.tensor([0.0, *(float(cell) for cell in mask)])
    return Row(torch.zeros(len(mask_T)).long(), mask_T, mask_T, mask_T.int(), rewards_T, "stop")


def _batch(samples: Sequence[Row], uids: Sequence[Any], last: Sequence[Any]) -> tuple[Batch, list[RowRef]]:
    """Return the samples' groups as a batch, and which row of which group each of them is."""
    turns: list[list[int]] = [[]]
    for at, ends in enumerate(last):
        turns[-1].append(at)
        if ends:
            turns.append([])
    groups: dict[Any, list[list[int]]] = {}
    for rows in turns:
        if rows:
            groups.setdefault(uids[rows[-1]], []).append(rows)
    refs = [RowRef(0, 0, 0)] * len(samples)
    for number, found in enumerate(groups.values()):
        for index, at in enumerate(at for rows in found for at in rows):
            refs[at] = RowRef(number, index, len(samples[at].token_ids))
    return Batch(1, [_group(str(uid), found, samples) for uid, found in groups.items()], 0), refs


def _group(uid: str, found: Sequence[Sequence[int]], samples: Sequence[Row]) -> GroupMeta:
    """A sample's reward is that of its last turn."""
    listed = [at for rows in found for at in rows]
    return group_meta(
        group_id=uid,
        kind="train",
        replica=0,
        path="",
        rewards=[float(samples[rows[-1]].rewards.sum()) for rows in found],
        lengths=[len(samples[at].token_ids) for at in listed],
        response_lengths=[sum(int(samples[at].loss_mask.sum()) for at in rows) for rows in found],
        stop_reasons=["stop"] * len(found),
        oldest_version=0,
        newest_version=0,
        data_source="",
        seconds=0.0,
        rows=[len(rows) for rows in found],
    )


def kl_controller(case: Case) -> dict[str, Any]:
    penalty, values = KlRewardPenalty(_kl_algorithm(case.params), {}), []
    for divergence, samples in case.inputs["updates"]:
        penalty.adapt(divergence, samples)
        values.append(penalty.coefficient)
    return {"values": values}


def kl_penalty(case: Case) -> dict[str, Any]:
    """Each row becomes a sample of one prompt token and the row's tokens."""
    packed = pack([_response(*row) for row in zip(case.inputs["rewards"], case.inputs["loss_mask"], strict=True)])
    packed.scores.old_logprobs = _scores(case.inputs["action_log_probs"])
    packed.scores.ref_logprobs = _scores(case.inputs["base_action_log_probs"])
    penalty = KlRewardPenalty(_kl_algorithm(case.params), {})
    metrics = penalty.apply_kl_penalty([packed], list)
    assert packed.scores.penalties is not None
    return {
        "rewards": _rows(packed, packed.rewards.double() - packed.scores.penalties),
        "metrics": metrics,
        "controller_value_after": penalty.coefficient,
    }


def _kl_algorithm(params: Mapping[str, Any]) -> AlgorithmConfig:
    names = {
        "type": "kl_ctrl.type", "kl_target": "kl_ctrl.kl_target", "horizon": "kl_ctrl.horizon"
    }  # fmt: skip
    given = {"use_kl_loss": False, "use_kl_in_reward": True}
    given |= {names.get(name, name): value for name, value in params.items() if value is not None}
    return skyrl({f"trainer.algorithm.{name}": value for name, value in given.items()}).trainer.algorithm


def cosmos_group(case: Case) -> dict[str, Any]:
    """Cosmos-RL's advantages of one group."""
    expect_constant(case.params, "eps", 1e-6)
    algorithm = cosmos({"train.train_policy.unbiased_advantage": case.params["unbiased"]}).trainer.algorithm
    return {"advantages": group_advantages(case.inputs["rewards"], algorithm)}


def cosmos_service_group(case: Case) -> dict[str, Any]:
    """Cosmos-RL's advantages of one group that a reward service scored; hpcrl has one grpo for all rewards."""
    return {"advantages": group_advantages(case.inputs["rewards"], cosmos({}).trainer.algorithm)}


def group_advantages(rewards: Sequence[float], algorithm: AlgorithmConfig) -> torch.Tensor:
    rewards_B = torch.tensor(rewards, dtype=torch.float64)
    size = len(rewards_B)
    inputs = AdvantageInputs(rewards_B, torch.ones_like(rewards_B), [1] * size, torch.zeros(size, dtype=torch.int64))
    return build_estimator(algorithm)(inputs)


ADAPTERS = {
    "advantage.batch_normalize": batch_normalize,
    "advantage.*": estimate,
    "util.masked_whiten": masked_whiten,
    "sampling.zero_variance_filter": zero_variance_filter,
    "trainer.advantages": trainer_advantages,
    "reward.postprocess": postprocess,
    "kl.controller": kl_controller,
    "reward.kl_penalty": kl_penalty,
    "GRPO.compute_advantage": cosmos_group,
    "remote_reward_advantage": cosmos_service_group,
}
