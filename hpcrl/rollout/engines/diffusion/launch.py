"""Starts the engine of diffusion policies: loads the pipeline."""

from __future__ import annotations

import torch

from hpcrl.config import Config
from hpcrl.config.derive import gpu_count, policy_model
from hpcrl.data.pipelines.source import PipelineSource
from hpcrl.rollout.engines.base import Engine
from hpcrl.rollout.engines.diffusion.engine import DiffusionEngine
from hpcrl.rollout.engines.diffusion.sampler import Sampler
from hpcrl.rollout.engines.own_thread import OwnThreadLaunched


class Diffusion(OwnThreadLaunched[Sampler]):
    """The engine of this process.

    Args:
        dtype: of the transformer, such as "bfloat16".
        at_once: samples that are made together at most.
    """

    def __init__(self, source: PipelineSource, dtype: str, at_once: int, *, on_cpu: bool) -> None:
        self._source, self._at_once = source, at_once
        device = torch.device("cpu" if on_cpu else "cuda")
        super().__init__(lambda: Sampler(source, getattr(torch, dtype), device), f"the pipeline {source.model}")

    @classmethod
    def of(cls, config: Config) -> Diffusion:
        engine = config.generator.inference_engine
        source = PipelineSource(policy_model(config.trainer), config.trainer.policy.diffusers)
        return cls(source, engine.model_dtype, engine.max_num_seqs, on_cpu=gpu_count(config.slurm) == 0)

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        return DiffusionEngine(self._loaded.result(), self._source, self._at_once, version=version, replica=replica)
