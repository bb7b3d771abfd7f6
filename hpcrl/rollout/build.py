"""Options and weight receiver of a rollout worker, built from a run's configuration."""

from __future__ import annotations

import os

from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.config.family import family_of
from hpcrl.rollout.teacher_inputs import TeacherInputs
from hpcrl.rollout.weights.receive import Receiver
from hpcrl.rollout.worker import WorkerOptions
from hpcrl.rundir.layout import Run


def worker_options(run: Run, config: Config, attempt: int, replica: int) -> WorkerOptions:
    """Return the options of a replica's worker, without copies of weights, reward services and timeline."""
    engine = config.generator.inference_engine
    return WorkerOptions(
        run=run,
        attempt=attempt,
        replica=replica,
        capacity=_capacity(config),
        n_samples=config.generator.n_samples_per_prompt,
        dump_evals=config.trainer.dump_eval_results,
        baselines=config.trainer.algorithm.needs_baselines,
        stall_s=engine.stall_timeout_seconds,
        load_s=engine.start_timeout_seconds,
        engine_dtype=engine.quantization or engine.model_dtype,
        probe_tolerance=engine.probe_tolerance,
        reads_ahead=not config.shares_gpus(replica),  # asleep, it generates nothing meanwhile
        from_model=config.engines_begin_with_model,
        teacher_inputs=TeacherInputs.of(config.trainer.distillation),
        waves=family_of(config).generates_in_waves(config),
        shares_gpus=config.shares_gpus(replica),
    )


def build_receiver(run: Run, attempt: int, engine: InferenceEngineConfig) -> Receiver | None:
    """Return the receiver of weights that trainer ranks send to this node; None where they are read as files."""
    backend, stage_s = engine.weight_sync_backend, engine.weight_sync_timeout_seconds
    if backend == "filesystem":
        return None
    return Receiver(run, attempt, backend == "nccl", os.environ["HPCRL_ADDRESS"], stage_s)


def _capacity(config: Config) -> int:
    """Return the groups in flight at most: those that the engine decodes together, and not more than a step begins."""
    engine, greedy = config.generator.inference_engine, config.trainer.algorithm.needs_baselines
    samples = config.generator.n_samples_per_prompt + greedy
    most = config.trainer.train_batch_size + config.trainer.surplus_groups
    at_once = min(engine.max_num_seqs, family_of(config).samples_at_once(config)[1])
    return max(1, min(at_once // samples, most))
