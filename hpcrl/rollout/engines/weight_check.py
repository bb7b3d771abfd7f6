"""Checks that an engine holds a published version: digests of each rank's tensors, and log-probabilities of the trainer's probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.data.weight_files import Probe, PublishedWeights, whole_digest
from hpcrl.errors import EngineError

TOLERANCES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}
TOLERANCES |= {"fp8": 0.6, "fp8_per_channel": 0.6, "fp8_per_block": 0.6, "mxfp8": 0.6, "mxfp4": 1.5}
"""Mean differences of log-probabilities that come from rounding alone, with room, by the coarser number type of the two; of engines that
quantize weights by generator.inference_engine.quantization."""


def check_ranks(proofs: Sequence[dict[str, Any]], weights: PublishedWeights, who: str) -> None:
    """Check the digests of the tensors that each rank of an engine has loaded; the ranks of a node read the same files, and share their digests.

    Args:
        proofs: of each rank its number, the number of ranks, version and digest, and the share of the tensors that it digested.
        who: the engine, in errors.

    Raises:
        EngineError: a rank is missing, has loaded nothing or something else.
    """
    given = f"{who} was given the weights of version {weights.version}"
    ranks = sorted(proof["rank"] for proof in proofs)
    if not proofs or ranks != list(range(proofs[0]["of"])):
        raise EngineError(f"{given}, but of its ranks only {ranks} report their weights")
    for proof in proofs:
        rank = f"rank {proof['rank']} of {proof['of']}"
        if proof.get("version") is None:
            raise EngineError(f"{given}, but its {rank} has loaded nothing")
        index, of = proof["share"]
        if index != proof["rank"] % of or proof["of"] % of:
            raise EngineError(f"{given}, but its {rank} has looked at share {index} of {of} of the tensors")
        if (proof["version"], proof["digest"]) != (weights.version, whole_digest(weights.share(index, of))):
            others = f", other tensors than were published: {', '.join(proof['wrong'])}" if proof["wrong"] else ""
            raise EngineError(f"{given}, but its {rank} holds version {proof['version']}{others}")


def tolerance(probe: Probe, engine_dtype: str, own: float | None) -> float:
    """Return how much an engine of a number type may differ from the trainer: `own`, or by the coarser type of the two."""
    return max(TOLERANCES[probe.dtype], TOLERANCES[engine_dtype]) if own is None else own


def difference(logprobs: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean of the absolute differences of log-probabilities of the same tokens."""
    return sum(abs(one - other) for one, other in zip(logprobs, others, strict=True)) / len(logprobs)


def check_probe(found: float, limit: float, version: int, who: str) -> None:
    """Raise EngineError if the trainer's and the engine's log-probabilities of the probe differ by more than `limit`, or are NaN."""
    if not found <= limit:
        raise EngineError(
            f"{who} does not compute what the trainer does with the weights of version {version}: log-probabilities of the probe differ by "
            f"{found:.4g} in the mean, and {limit:g} is allowed (generator.inference_engine.probe_tolerance). Has it the model's "
            "configuration of the trainer, such as rotary positions and replaced entries?"
        )


def check_decoding(found: float, limit: float, version: int, who: str) -> None:
    """Raise EngineError if log-probabilities of decoded tokens differ from those of a prefill by more than `limit`, or are NaN."""
    if not found <= limit:
        raise EngineError(
            f"{who} decodes with other weights than version {version}: log-probabilities of decoded tokens differ by "
            f"{found:.4g} in the mean from a prefill of the same tokens, and {limit:g} is allowed "
            "(generator.inference_engine.probe_tolerance). CUDA graphs may hold older weights: set "
            "generator.inference_engine.enforce_eager=true, and report it"
        )
