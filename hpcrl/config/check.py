"""Values and combinations that have the right type and still cannot work. Each check is one small function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

from hpcrl.config.derive import replicas_per_node, trainer_ranks
from hpcrl.config.generator import InferenceEngineConfig, SamplingParams
from hpcrl.config.problem import Problem

if TYPE_CHECKING:
    from hpcrl.config.root import Config

_AT_LEAST = {
    "trainer.seed": 0,
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 1,
    "trainer.policy.optimizer_config.lr": 0,
    "trainer.policy.optimizer_config.weight_decay": 0,
    "trainer.policy.optimizer_config.num_warmup_steps": 0,
    "trainer.algorithm.eps_clip_low": 0,
    "trainer.algorithm.eps_clip_high": 0,
    "trainer.algorithm.kl_loss_coef": 0,
    "trainer.fully_async.max_staleness_steps": 0,
    "trainer.epochs": 1,
    "trainer.max_steps": 1,
    "trainer.update_epochs_per_batch": 1,
    "trainer.train_batch_size": 1,
    "trainer.policy_mini_batch_size": 1,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.micro_forward_batch_size_per_gpu": 1,
    "trainer.logprobs_chunk_size": 1,
    "trainer.max_prompt_length": 1,
    "generator.n_samples_per_prompt": 1,
    "generator.eval_n_samples_per_prompt": 1,
    "generator.inference_engine.num_engines": 1,
    "generator.inference_engine.tensor_parallel_size": 1,
    "generator.inference_engine.max_num_batched_tokens": 1,
    "generator.inference_engine.max_num_seqs": 1,
    "slurm.time_minutes": 5,
    "slurm.gpus_per_node": 0,
    "slurm.cpus_per_task": 1,
    "slurm.mem_gb": 1,
    "slurm.replicas_per_node": 1,
    "slurm.array_parallelism": 1,
}
_DIRECTORY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENGINE_NAMES = {field.name: field.name for field in fields(InferenceEngineConfig)} | {"dtype": "model_dtype"}
_ENGINE_OWN = {"uds", "host", "port", "middleware", "model", "seed", "max_model_len", "logprobs_mode", "api_key"}
_ENGINE_OWN |= {"weight_transfer_config", "enable_scale_out", "served_model_name"}
_SBATCH_OWN = {
    "nodes",
    "array",
    "signal",
    "ntasks",
    "ntasks_per_node",
    "job_name",
    "output",
    "error",
    "open_mode",
}
_SBATCH_NAMES = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "time": "time_minutes",
    "gpus_per_node": "gpus_per_node",
    "cpus_per_task": "cpus_per_task",
    "mem": "mem_gb",
    "exclusive": "exclusive",
}


def check(config: Config) -> list[Problem]:
    """Return everything that is impossible in a configuration of the right types."""
    return [problem for one in _CHECKS for problem in one(config)]


def _sizes(config: Config) -> Iterator[Problem]:
    for path, least in _AT_LEAST.items():
        value = attrgetter(path)(config)
        if value is not None and not least <= value < math.inf:
            yield Problem(path, f"expected at least {least}, found {value}")


def _names(config: Config) -> Iterator[Problem]:
    for name in ("project_name", "run_name"):
        value = getattr(config.trainer, name)
        if value is not None and not _DIRECTORY_NAME.fullmatch(value):
            yield Problem(
                f"trainer.{name}",
                f"expected a directory name of letters, digits, '.', '_' and '-' that starts with a letter or digit, found {value!r}",
            )


def _datasets(config: Config) -> Iterator[Problem]:
    if not config.data.train_data:
        yield Problem("data.train_data", "expected at least one dataset, found an empty list")
    if config.trainer.eval_interval > 0 and not config.data.val_data:
        yield Problem(
            "trainer.eval_interval",
            f"{config.trainer.eval_interval} asks for evaluation, but data.val_data is empty; name a dataset there or set trainer.eval_interval=0",
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    betas = config.trainer.policy.optimizer_config.adam_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "trainer.policy.optimizer_config.adam_betas", f"expected two numbers from 0 to below 1, found {betas}"
        )


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    if algorithm.eps_clip_low >= 1:
        yield Problem("trainer.algorithm.eps_clip_low", f"expected less than 1, found {algorithm.eps_clip_low}")
    if algorithm.temperature is not None and not 0 < algorithm.temperature < math.inf:
        yield Problem("trainer.algorithm.temperature", f"expected more than 0, found {algorithm.temperature}")
    if not math.isfinite(algorithm.entropy_loss_coef):
        yield Problem("trainer.algorithm.entropy_loss_coef", f"expected a number, found {algorithm.entropy_loss_coef}")


def _batches(config: Config) -> Iterator[Problem]:
    trainer, samples = config.trainer, config.generator.n_samples_per_prompt
    mini, ranks = trainer.policy_mini_batch_size, trainer_ranks(trainer)
    if mini >= 1 and trainer.train_batch_size % mini:
        yield Problem(
            "trainer.train_batch_size",
            f"expected a multiple of trainer.policy_mini_batch_size ({mini}), found {trainer.train_batch_size}",
        )
    if ranks >= 1 and mini * samples % ranks:
        yield Problem(
            "trainer.policy_mini_batch_size",
            f"{mini} prompts x {samples} samples (generator.n_samples_per_prompt) cannot be shared equally by {ranks} trainer ranks "
            "(trainer.placement); make the product a multiple of the ranks",
        )


def _checkpoints(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.max_ckpts_to_keep == 0:
        yield Problem(
            "trainer.max_ckpts_to_keep",
            "0 would delete every checkpoint; expected -1 (keep all) or at least 1; trainer.ckpt_interval=0 writes none",
        )
    if trainer.resume_mode == "from_path" and trainer.resume_path is None:
        yield Problem("trainer.resume_path", 'required with trainer.resume_mode="from_path": a checkpoint directory')
    if trainer.resume_mode != "from_path" and trainer.resume_path is not None:
        yield Problem(
            "trainer.resume_path",
            f'has no effect with trainer.resume_mode="{trainer.resume_mode}"; set trainer.resume_mode="from_path" or leave it out',
        )


def _sampling(config: Config) -> Iterator[Problem]:
    yield from _sampling_params("generator.sampling_params", config.generator.sampling_params)
    if config.generator.sampling_params.temperature == 0:
        yield Problem(
            "generator.sampling_params.temperature",
            "0 makes all samples of a group equal, so that there is nothing to learn from; expected more than 0",
        )
    if config.generator.eval_sampling_params is not None:
        yield from _sampling_params("generator.eval_sampling_params", config.generator.eval_sampling_params)


def _sampling_params(path: str, params: SamplingParams) -> Iterator[Problem]:
    ranges = {
        "max_generate_length": (params.max_generate_length >= 1, "at least 1"),
        "temperature": (0 <= params.temperature < math.inf, "at least 0"),
        "top_p": (0 < params.top_p <= 1, "more than 0 and at most 1"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "-1 (all tokens) or at least 1"),
        "min_p": (0 <= params.min_p <= 1, "from 0 to 1"),
        "repetition_penalty": (0 < params.repetition_penalty < math.inf, "more than 0"),
    }
    for name, (right, expected) in ranges.items():
        if not right:
            yield Problem(f"{path}.{name}", f"expected {expected}, found {getattr(params, name)}")
    if params.stop is not None and not all(params.stop):
        yield Problem(f"{path}.stop", "expected texts that are not empty")


def _engine(config: Config) -> Iterator[Problem]:
    path, engine = "generator.inference_engine", config.generator.inference_engine
    if not 0 < engine.gpu_memory_utilization <= 1:
        yield Problem(
            f"{path}.gpu_memory_utilization",
            f"expected more than 0 and at most 1, found {engine.gpu_memory_utilization}",
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield Problem(
            f"{path}.max_num_batched_tokens",
            f"expected at least {path}.max_num_seqs ({engine.max_num_seqs}), found {engine.max_num_batched_tokens}",
        )
    for name in engine.engine_init_kwargs:
        if own := _ENGINE_NAMES.get(name.replace("-", "_")):
            yield Problem(f"{path}.engine_init_kwargs.{name}", f"set {path}.{own} instead")
        elif name.replace("-", "_") in _ENGINE_OWN:
            yield Problem(f"{path}.engine_init_kwargs.{name}", "hpcrl sets this option of the server itself")


def _nodes(config: Config) -> Iterator[Problem]:
    gpus, ranks = config.slurm.gpus_per_node, config.trainer.placement.policy_num_gpus_per_node
    if gpus <= 0:
        return
    parallel, replicas = config.generator.inference_engine.tensor_parallel_size, config.slurm.replicas_per_node
    has = f"but a node has {gpus} GPUs (slurm.gpus_per_node)"
    if ranks > gpus:
        yield Problem("trainer.placement.policy_num_gpus_per_node", f"{ranks} ranks need a GPU each, {has}")
    if parallel > gpus:
        yield Problem("generator.inference_engine.tensor_parallel_size", f"a replica needs {parallel} GPUs, {has}")
    elif replicas is not None and parallel >= 1 and replicas_per_node(config) * parallel > gpus:
        yield Problem("slurm.replicas_per_node", f"{replicas} replicas need {replicas * parallel} GPUs, {has}")


def _sbatch(config: Config) -> Iterator[Problem]:
    for name in config.slurm.extra:
        if own := _SBATCH_NAMES.get(name.replace("-", "_")):
            yield Problem(f"slurm.extra.{name}", f"set slurm.{own} instead")
        elif name.replace("-", "_") in _SBATCH_OWN:
            yield Problem(f"slurm.extra.{name}", "hpcrl sets this option of sbatch itself")


_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _sizes,
    _names,
    _datasets,
    _optimizer,
    _algorithm,
    _batches,
    _checkpoints,
    _sampling,
    _engine,
    _nodes,
    _sbatch,
)
