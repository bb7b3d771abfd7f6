"""Starts the engine of diffusion policies: loads the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch

from hpcrl.config import Config
from hpcrl.config.derive import gpu_count, policy_model
from hpcrl.data.pipelines.source import PipelineSource
from hpcrl.errors import EngineError, HpcrlError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rollout.engines.diffusion.engine import DiffusionEngine
from hpcrl.rollout.engines.diffusion.sampler import Sampler

_POLL_S = 0.1


class Diffusion(Launched):
    """The engine of this process.

    Args:
        dtype: of the transformer, such as "bfloat16".
        at_once: samples that are made together at most.
    """

    def __init__(self, source: PipelineSource, dtype: str, at_once: int, *, on_cpu: bool) -> None:
        self._source, self._at_once = source, at_once
        self._dtype, self._device = getattr(torch, dtype), torch.device("cpu" if on_cpu else "cuda")
        self._loaded: Future[Sampler] = Future()
        Thread(target=self._load, name="load", daemon=True).start()

    @classmethod
    def of(cls, config: Config) -> Diffusion:
        engine = config.generator.inference_engine
        source = PipelineSource(policy_model(config.trainer), config.trainer.policy.diffusers)
        return cls(source, engine.model_dtype, engine.max_num_seqs, on_cpu=gpu_count(config.slurm) == 0)

    def wait_ready(self, timeout_s: float, still_waiting: Callable[[], object] = lambda: None) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._loaded.done():
            still_waiting()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the pipeline {self._source.model} was not loaded within {timeout_s:.0f} s "
                    "(generator.inference_engine.start_timeout_seconds)"
                )
            time.sleep(_POLL_S)
        self._loaded.result()

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        return DiffusionEngine(self._loaded.result(), self._source, self._at_once, version=version, replica=replica)

    def alive(self) -> bool:
        return self._loaded.done() and self._loaded.exception() is None

    def failure(self, what: str) -> EngineError:
        return EngineError(f"the inference engine {what}: {self._loaded.exception()}")

    def stop(self) -> None:
        pass

    def _load(self) -> None:
        try:
            self._loaded.set_result(Sampler(self._source, self._dtype, self._device))
        except BaseException as error:  # noqa: BLE001  it is raised again by whoever waits
            self._loaded.set_exception(
                error if isinstance(error, HpcrlError) else EngineError(f"the inference engine did not start: {error}")
            )
