"""Log-probabilities, entropies, packing and the likelihood loss, of SkyRL and Cosmos-RL: their logits are hidden states under a head that
changes nothing, and their padded rows become samples laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcrl.algorithms.losses import sample_means
from hpcrl.algorithms.reductions import Reduction, TokenCounts, row_weight
from hpcrl.config import AlgorithmConfig
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.logprobs import token_logprobs
from hpcrl.trainer.packing import pack
from hpcrl.types import MicroBatch, Row
from tests.golden.case import Case

_WHOLE = 10**6  # rows whose logits exist at the same time: all
_IGNORED = -100
_DTYPES = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}


def skyrl_logprobs(case: Case) -> dict[str, Any]:
    logits, labels = (torch.tensor(case.inputs[name]) for name in ("logits", "labels"))
    return {"out": _logprobs(logits.flatten(0, 1), labels.flatten())[0].view_as(labels)}


def skyrl_entropy(case: Case) -> dict[str, Any]:
    """What SkyRL sets to 0 outside the mask is left out of every sum here."""
    logits, mask = (torch.tensor(case.inputs[name]) for name in ("logits", "attention_mask"))
    _, entropies_P = _logprobs(logits.flatten(0, 1), mask.flatten())
    return {"out": entropies_P.view_as(mask).masked_fill(mask == 0, 0.0)}


def to_tensors(case: Case) -> dict[str, Any]:
    """Packed, and then padded as SkyRL does: prompts on the left, responses on the right."""
    prompts, responses = case.inputs["prompts"], case.inputs["responses"]
    samples = [
        _sample([*prompt, *said], [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs)
        for prompt, said, mask, logprobs in zip(
            prompts, responses, case.inputs["loss_masks"], case.inputs["logprobs"], strict=True
        )
    ]
    batch = _packed(samples)
    left, right = (max(len(row) for row in rows) for rows in (prompts, responses))
    sequences = torch.full((len(prompts), left + right), case.params["pad_token_id"])
    masks, logprobs = torch.zeros(len(prompts), right), torch.zeros(len(prompts), right)
    parts = (values.split(batch.lengths) for values in (batch.token_ids, batch.loss_mask, batch.rollout_logprobs))
    for at, (ids, mask, logprob) in enumerate(zip(*parts, strict=True)):
        start, size = len(prompts[at]), len(responses[at])
        sequences[at, left - start : left + size] = ids
        masks[at, :size], logprobs[at, :size] = mask[start - 1 : -1], logprob[start - 1 : -1]
    return {"sequences": sequences, "loss_mask": masks, "rollout_logprobs": logprobs}


def compute_logprobs(case: Case) -> dict[str, Any]:
    """The log-probabilities of the trained tokens alone; selected logits go back to the places of those tokens."""
    batch = _packed(_masked_samples(case))
    logits = torch.tensor(case.inputs["logits"])
    chosen_P = batch.loss_mask > 0
    if case.params["is_full_logits"]:
        logits_PV = logits.flatten(0, 1)
    else:
        logits_PV = torch.zeros(len(chosen_P), logits.shape[-1])
        logits_PV[chosen_P] = logits
    dtype = _DTYPES[case.params.get("dtype", "torch.float32")]
    logprobs_P, entropies_P = _logprobs(logits_PV, batch.labels, dtype=dtype)
    trained = [int(mask.sum()) for mask in batch.loss_mask.split(batch.lengths)]
    (entropy,) = sample_means(entropies_P, batch.loss_mask, torch.tensor([len(chosen_P)]))
    return {
        "logps": logprobs_P[chosen_P],
        "cu_seqlens": _starts(trained),
        "metrics": {"entropy": entropy, "effective_entropy": entropy},
    }


def selective_log_softmax(case: Case) -> dict[str, Any]:
    return {"out": _logprobs(torch.tensor(case.inputs["logits"]), torch.tensor(case.inputs["index"]))[0]}


def entropy_in_slices(case: Case) -> dict[str, Any]:
    logits_PV = torch.tensor(case.inputs["logits"])
    labels_P = torch.zeros(len(logits_PV), dtype=torch.int64)
    return {"out": _logprobs(logits_PV, labels_P, case.params["chunk_size"])[1]}


def cross_entropy(case: Case) -> dict[str, Any]:
    """Cosmos-RL's factor is one over its micro-batches, whose means count alike."""
    logits = torch.tensor(case.inputs["output"]).requires_grad_()
    targets = torch.tensor(case.inputs["target"])
    labelled = targets != _IGNORED
    samples = [
        _sample(row.clamp(min=0).tolist(), mask.float().tolist()) for row, mask in zip(targets, labelled, strict=True)
    ]
    tokens = int(labelled[:, 1:].sum())
    batches = round(1 / case.params.get("loss_scaling_factor", 1.0))
    counts = TokenCounts(
        length=0, tokens=tokens, rows=0, groups=0, group_tokens=0, micro_tokens=tokens, micro_batches=batches
    )
    batch = _packed(samples, row_weight(Reduction("token_mean_legacy"), counts))
    objective = build_objective(AlgorithmConfig(policy_loss_type="cross_entropy", use_kl_loss=False))
    loss, _ = objective(batch, *_logprobs(logits.flatten(0, 1), batch.labels))
    loss.backward()
    return {"loss": loss.detach(), "grad": logits.grad}


def pack_sequences(case: Case) -> dict[str, Any]:
    batch = _packed(_masked_samples(case))
    return {
        "info": {"valid_input_len": torch.tensor(batch.lengths)},
        "logprobs": {"logprob_masks": batch.loss_mask[None].bool()},
        "inputs": {
            "inputs": batch.token_ids[None],
            "cu_seqlens": _starts(batch.lengths),
            "max_seqlen": max(batch.lengths),
        },
    }


def _logprobs(
    logits_PV: torch.Tensor, labels_P: torch.Tensor, chunk_rows: int = _WHOLE, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return token_logprobs(logits_PV, torch.eye(logits_PV.shape[-1]), labels_P, 1.0, chunk_rows, dtype=dtype)


def _masked_samples(case: Case) -> list[Row]:
    """Cosmos-RL's masks are about the token that a position predicts, those of a sample about its own tokens."""
    rows = zip(case.inputs["input_ids"], case.inputs["logprob_masks"], strict=True)
    return [_sample(ids, [0.0, *mask[:-1]]) for ids, mask in rows]


def _sample(ids: Sequence[int], mask: Sequence[float], logprobs: Sequence[float] | None = None) -> Row:
    mask_T = torch.tensor(mask, dtype=torch.float32)
    logprobs_T = torch.zeros_like(mask_T) if logprobs is None else torch.tensor(logprobs)
    return Row(torch.tensor(ids), mask_T, logprobs_T, mask_T.int(), torch.zeros_like(mask_T), "stop")


def _packed(samples: Sequence[Row], weight: float = 0.0) -> MicroBatch:
    packed = pack(samples)
    packed.weights = [weight] * len(samples)
    packed.scores.advantages = torch.zeros_like(packed.loss_mask)
    return packed.whole()


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


ADAPTERS = {
    "util.logprobs_from_logits": skyrl_logprobs,
    "util.entropy_from_logits": skyrl_entropy,
    "batch.to_tensors": to_tensors,
    "compute_logprobs": compute_logprobs,
    "selective_log_softmax": selective_log_softmax,
    "entropy_from_logits_with_chunking": entropy_in_slices,
    "async_safe_ce": cross_entropy,
    "pack_sequences": pack_sequences,
}
