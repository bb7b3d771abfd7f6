"""vLLM's plugin entry point: makes the weight engine of `weight_engine.py` known to vLLM's weight-update API."""

from __future__ import annotations

import functools

BACKEND = "shared_fs"
WORKER_EXTENSION = "hpcrl.rollout.engines.vllm.weight_engine.WeightProof"


@functools.cache  # vLLM may load plugins twice in one process
def register() -> None:
    """Register the engine by name only. This runs in every vLLM process of this environment, also in those of other programs."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "hpcrl.rollout.engines.vllm.weight_engine", "SharedFilesystemEngine"
    )
