"""SkyRL's losses, divergences, reductions and corrections: rows padded to one length become samples of that length, laid end to end.

A case of its own is a mini-batch with one micro-batch. What SkyRL's version of 2026-03-13 calls token_mean is a mean per micro-batch:
here token_mean_legacy, where there are several. Its cross_entropy and importance_sampling are sums: here token_sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hpcrl.algorithms.kl import KL_ESTIMATORS
from hpcrl.algorithms.losses import LossTokens, bounded_exp, sample_means
from hpcrl.algorithms.off_policy import correct, is_enabled
from hpcrl.algorithms.reductions import Reduction, weighted_sum
from hpcrl.config import AlgorithmConfig
from hpcrl.trainer.critic.loss import build_critic_objective
from hpcrl.trainer.loss import LOSS_METRICS
from hpcrl.trainer.metrics import loss_metrics
from hpcrl.types import MicroBatch
from tests.golden.adapters.converted import dotted, expect_constant, skyrl
from tests.golden.adapters.packed import WHOLE, sample_weights, train
from tests.golden.case import Case

_NAMES = {
    "logprobs": "log_probs", "old": "old_log_probs", "rollout": "rollout_logprobs", "reference": "log_probs_base",
    "advantages": "advantages", "mask": "loss_mask",
}  # fmt: skip
_SUMS = {"cross_entropy", "importance_sampling"}
Rows = Sequence[Sequence[float]]


def token_estimate(case: Case) -> dict[str, Any]:
    """What SkyRL sets to 0 outside the mask is left out of every sum here."""
    logprobs, reference = (_flat(case.inputs[name]) for name in ("log_probs", "log_probs_base"))
    values_P = KL_ESTIMATORS[case.params["kl_estimator_type"]](logprobs, reference, 1.0)
    if case.inputs["loss_mask"] is not None:
        values_P = values_P.masked_fill(_flat(case.inputs["loss_mask"]) == 0, 0.0)
    return {"kl": _rows(values_P, case.inputs["log_probs"])}


def kl_loss_term(case: Case) -> dict[str, Any]:
    """The term alone: advantages are 0 and its weight is 1."""
    algorithm = {"kl_estimator_type": case.params["kl_estimator_type"], "kl_loss_coef": 1.0}
    inputs = {
        **case.inputs,
        "old_log_probs": case.inputs["log_probs"],
        "reduction": Reduction("sequence_mean"),
    }
    loss, _, gradient = _objective(algorithm, inputs)
    return {
        "policy_kl": loss,
        "grad_log_probs_without_no_grad": gradient,
        "grad_log_probs_at_this_commit": gradient,
    }


def reduce(case: Case) -> dict[str, Any]:
    loss = torch.tensor(case.inputs["loss"])
    mask = _mask(case.inputs["loss_mask"], loss)
    return {"loss": weighted_sum(loss.flatten(), (mask * _weights(_reduction(case.params), mask)).flatten())}


def scale_advantages(case: Case) -> dict[str, Any]:
    """SkyRL multiplies advantages by the weights of a token; here losses are."""
    mask = _mask(case.inputs["loss_mask"], torch.tensor(case.inputs["advantages"]))
    weights = _weights(_reduction(case.params), mask, case.params["micro_batch_size"])
    return {"scaled_advantages": torch.tensor(case.inputs["advantages"]) * weights}


def policy_loss(case: Case) -> dict[str, Any]:
    kind = case.params["policy_loss_type"]
    reduction = Reduction("token_sum") if kind in _SUMS else _reduction(case.params)
    algorithm = {name: value for name, value in case.params.items() if name not in ("loss_reduction", "max_seq_len")}
    loss, metrics, gradient = _objective({**algorithm, "use_kl_loss": False}, {**case.inputs, "reduction": reduction})
    known = case.outputs["metrics"]
    return {
        "loss": loss,
        "metrics": {name: value for name, value in metrics.items() if name in known},
        "grad_log_probs": gradient,
    }


def minibatch_gradient(case: Case) -> dict[str, Any]:
    name, size = case.params["loss_reduction"], case.params["micro_train_batch_size_per_gpu"]
    reduction = replace(_reduction(case.params), name="token_mean_legacy" if name == "token_mean" else name)
    settings = ("policy_loss_type", "eps_clip_low", "eps_clip_high")
    algorithm = {"use_kl_loss": False} | {name: case.params[name] for name in settings}
    loss, _, gradient = _objective(algorithm, {**case.inputs, "reduction": reduction}, size)
    return {"mean_policy_loss": loss, "grad_log_probs_after_scaling": gradient}


def off_policy(case: Case) -> dict[str, Any]:
    settings = _algorithm({"off_policy_correction": dict(case.params)}).off_policy_correction
    old, rollout = (_flat(case.inputs[name]) for name in ("old_log_probs", "rollout_logprobs"))
    rows = case.inputs["old_log_probs"]
    mask_BT = _mask(case.inputs["loss_mask"], torch.tensor(rows))
    found = correct(
        LossTokens(old, old, rollout, torch.zeros_like(old), mask_BT.flatten(), torch.tensor(_lengths(rows))), settings
    )
    sums = {f"{LOSS_METRICS}{name}": float(value) for name, value in found.sums.items()}
    trained = mask_BT.sum(1)
    metrics = loss_metrics({**sums, "tokens": float(trained.sum()), "samples": int((trained > 0).sum())})
    known = case.outputs.get("metrics", {})
    # SkyRL has one weight per row where they are of whole sequences
    cells = slice(1) if settings.tis_ratio_type == "sequence" else slice(None)
    return {
        "tis_ratio": None if found.weights is None else _rows(found.weights, rows)[:, cells],
        "loss_mask": _rows(found.mask, rows),
        "mask": _rows(found.mask, rows),
        "metrics": {name: value for name, value in metrics.items() if name in known} if is_enabled(settings) else {},
    }


def safe_exp_delta(case: Case) -> dict[str, Any]:
    expect_constant(case.params, "clip", 20.0)
    return {"out": bounded_exp(torch.tensor(case.inputs["delta"]))}


def masked_mean(case: Case) -> dict[str, Any]:
    """A mean over everything is that of one sample which is as long as all rows."""
    values, mask = (_flat(case.inputs[name]) for name in ("tensor", "mask"))
    whole = case.params["dim"] is None
    lengths = [len(values)] if whole else _lengths(case.inputs["tensor"])
    means = sample_means(values, mask, torch.tensor(lengths))
    return {"out": means[0] if whole else means}


def critic_loss(case: Case) -> dict[str, Any]:
    """A mini-batch of one micro-batch; null is SkyRL's word for no clipping, 0 is ours."""
    values_BT, old_BT, returns_BT = (torch.tensor(case.inputs[name]) for name in ("values", "old_values", "returns"))
    mask_BT = _mask(case.inputs["loss_mask"], values_BT)
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
    clip = case.params.get("value_clip")
    loss, sums = build_critic_objective(clip or 0.0)(batch, values_BT.flatten())
    loss.backward()
    return {
        "loss": loss,
        "clipfrac": None if clip is None else sums["clipfrac"] / sums["tokens"],
        "grad_values": values_BT.grad,
    }


def _objective(
    algorithm: Mapping[str, Any], inputs: Mapping[str, Any], size: int = WHOLE
) -> tuple[float, dict[str, float], torch.Tensor]:
    """Return loss, metrics and gradient of a mini-batch, whose micro-batches have `size` samples."""
    rows = {ours: torch.tensor(inputs[name]) for ours, name in _NAMES.items() if inputs.get(name) is not None}
    rows["mask"] = _mask(inputs.get("loss_mask"), rows["logprobs"])
    if "advantages" in rows:  # one for each token, or for each row
        advantages = rows["advantages"]
        rows["advantages"] = (advantages[:, None] if advantages.ndim == 1 else advantages).expand_as(rows["mask"])
    rows["zeros"] = torch.zeros_like(rows["mask"])
    samples = [{name: values[at] for name, values in rows.items()} for at in range(len(rows["mask"]))]
    sums, gradient_P = train(_algorithm(algorithm), inputs["reduction"], samples, size)
    return sums["final_loss"], loss_metrics(sums), _rows(gradient_P, inputs["log_probs"])


def _reduction(params: Mapping[str, Any]) -> Reduction:
    """Return the reduction of a whole mini-batch in one micro-batch, by a name that the configuration knows."""
    algorithm = _algorithm({"loss_reduction": params["loss_reduction"]})
    return Reduction(algorithm.loss_reduction, max_seq_len=params["max_seq_len"])


def _algorithm(settings: Mapping[str, Any]) -> AlgorithmConfig:
    return skyrl(dotted("trainer.algorithm", settings), checked=False).trainer.algorithm


def _mask(rows: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a mask of zeros and ones; everything is trained where a case has none."""
    return torch.ones_like(like) if rows is None else torch.tensor(rows, dtype=like.dtype)


def _weights(reduction: Reduction, mask: torch.Tensor, size: int = WHOLE) -> torch.Tensor:
    """Return the weight of each row, [B, 1]."""
    return torch.tensor(sample_weights(reduction, [int(row.sum()) for row in mask], size))[:, None]


def _flat(rows: Rows) -> torch.Tensor:
    return torch.tensor(rows).flatten()


def _lengths(rows: Any) -> list[int]:
    return [len(row) for row in rows]


def _rows(values_P: torch.Tensor, rows: Rows) -> torch.Tensor:
    return values_P.reshape(len(rows), -1)


ADAPTERS = {
    "kl.token_estimate": token_estimate,
    "kl.loss_term": kl_loss_term,
    "loss.reduce": reduce,
    "loss.scale_advantages": scale_advantages,
    "policy_loss.minibatch_gradient": minibatch_gradient,
    "policy_loss.*": policy_loss,
    "off_policy.*": off_policy,
    "util.safe_exp_delta": safe_exp_delta,
    "util.masked_mean": masked_mean,
    "loss.critic": critic_loss,
}
