"""Rules about nodes, their GPUs, and options of the engine and of sbatch that hpcrl sets itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from hpcrl.config.adapters import largest_rank, loads_adapters
from hpcrl.config.derive import (
    LORA_RANKS,
    critic_nodes,
    engine_gpus,
    gpu_count,
    has_engines,
    has_own_critic,
    max_replicas,
    replicas_per_node,
)
from hpcrl.config.errors import Problem
from hpcrl.config.node_share import takes_whole_nodes
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.config.sections.tree import ConfigTree

_ENGINE_NAMES = {field.name: field.name for field in fields(InferenceEngineConfig)} | {"dtype": "model_dtype"}
_ENGINE_OWN = {"uds", "host", "port", "middleware", "model", "max_model_len", "logprobs_mode", "api_key"}
_ENGINE_OWN |= {
    "weight_transfer_config",
    "enable_scale_out",
    "served_model_name",
    "max_logprobs",
    "worker_extension_cls",
    "enable_lora",
    "max_lora_rank",
}
_OF_VLLM = (
    *("tensor_parallel_size", "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "use_flashinfer"),
    "fully_sharded_loras",
    "engine_init_kwargs",
)
EMBEDDED_SAMPLING = ("ignore_eos", "min_tokens")
"""Sampling parameters beside those of the configuration that the embedded engine has."""
_SBATCH_OWN = {"nodes", "array", "signal", "ntasks", "ntasks_per_node", "job_name", "output", "error", "open_mode"}
_SBATCH_OWN |= {"requeue", "no_requeue", "no_kill"}
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


def engine_options(config: ConfigTree) -> Iterator[Problem]:
    path, engine = "generator.inference_engine", config.generator.inference_engine
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield Problem(
            f"{path}.max_num_batched_tokens",
            f"expected at least {path}.max_num_seqs ({engine.max_num_seqs}), found {engine.max_num_batched_tokens}",
        )
    if not isinstance(engine.engine_init_kwargs.get("hf_overrides", {}), dict):
        yield Problem(
            f"{path}.engine_init_kwargs.hf_overrides", "expected a table of entries of the model's config.json"
        )
    for name in engine.engine_init_kwargs:
        if own := _ENGINE_NAMES.get(name.replace("-", "_")):
            yield Problem(f"{path}.engine_init_kwargs.{name}", f"set {path}.{own} instead")
        elif name.replace("-", "_") in _ENGINE_OWN:
            yield Problem(
                f"{path}.engine_init_kwargs.{name}", "hpcrl sets this option of the server itself; leave it out"
            )


def embedded_engine(config: ConfigTree) -> Iterator[Problem]:
    """What vLLM alone has is refused with the embedded engine, because a file should not promise what does not happen."""
    path, generator = "generator.inference_engine", config.generator
    engine = generator.inference_engine
    if engine.backend != "transformers":
        return
    for name in _OF_VLLM:
        if getattr(engine, name) != getattr(InferenceEngineConfig(), name):
            yield Problem(
                f"{path}.{name}", f'has no effect with {path}.backend="transformers"; leave it out, or set vllm'
            )
    for section in ("sampling_params", "eval_sampling_params"):
        for name in getattr(generator, section).additional_kwargs or {}:
            if name not in EMBEDDED_SAMPLING:
                yield Problem(
                    f"generator.{section}.additional_kwargs.{name}",
                    f'{path}.backend="transformers" has only {" and ".join(EMBEDDED_SAMPLING)}; leave it out, or use vllm',
                )


def adapters_of_engines(config: ConfigTree) -> Iterator[Problem]:
    engine, lora = config.generator.inference_engine, config.trainer.policy.model.lora
    if engine.backend == "vllm" and loads_adapters(config) and largest_rank(lora) > LORA_RANKS[-1]:
        yield Problem(
            "trainer.policy.model.lora.rank",
            f"vLLM loads adapters up to rank {LORA_RANKS[-1]}, found {largest_rank(lora)}; set generator.inference_engine.merge_lora=true",
        )


def copies_of_weights(config: ConfigTree) -> Iterator[Problem]:
    found = config.generator.inference_engine.weight_copy_dir
    if found is not None and not found.startswith(("/", "~/", "$")):
        expected = "expected an absolute path or one that begins with a variable of the nodes, such as $TMPDIR"
        yield Problem("generator.inference_engine.weight_copy_dir", f"{expected}, found {found!r}")


def ways_of_weights(config: ConfigTree) -> Iterator[Problem]:
    engine, path = config.generator.inference_engine, "generator.inference_engine."
    backend, network = engine.weight_sync_backend, engine.weight_sync_backend != "filesystem"
    wanted = {"weight_sync_backend": network, "full_weights_interval": engine.full_weights_interval > 1}
    for name in [name for name, is_set in wanted.items() if is_set]:
        if loads_adapters(config):
            yield Problem(
                path + name,
                f"adapters are small, and reach engines as files; leave it out, or set {path}merge_lora=true",
            )
        elif engine.weight_copy_dir is None:
            yield Problem(
                path + name,
                f"needs a place for a copy of the weights on each node; set {path}weight_copy_dir, such as to /dev/shm or $TMPDIR",
            )
    if not network and not _is_default(engine, "weight_sync_timeout_seconds"):
        yield Problem(
            path + "weight_sync_timeout_seconds",
            f"has no effect with {path}weight_sync_backend=filesystem; leave it out",
        )
    if backend == "nccl" and gpu_count(config.slurm) == 0:
        yield Problem(
            path + "weight_sync_backend", "nccl needs GPUs, but slurm.gpus_per_node=0; use gloo or filesystem"
        )
    elif backend == "nccl" and config.trainer.placement.colocate_all:
        yield Problem(
            path + "weight_sync_backend",
            "nccl connects no two processes of one GPU, and trainer.placement.colocate_all=true has them; use gloo or filesystem",
        )


def _is_default(engine: InferenceEngineConfig, name: str) -> bool:
    return getattr(engine, name) == next(field.default for field in fields(engine) if field.name == name)


def flash_infer(config: ConfigTree) -> Iterator[Problem]:
    if config.generator.inference_engine.use_flashinfer and gpu_count(config.slurm) == 0:
        yield Problem(
            "generator.inference_engine.use_flashinfer", "needs GPUs, but slurm.gpus_per_node=0; set it to false"
        )


def gpus_of_nodes(config: ConfigTree) -> Iterator[Problem]:
    gpus, ranks = gpu_count(config.slurm), config.trainer.placement.policy_num_gpus_per_node
    if gpus <= 0:
        return
    parallel, replicas = engine_gpus(config.generator.inference_engine), config.slurm.replicas_per_node
    has = f"but a node has {gpus} GPUs (slurm.gpus_per_node)"
    if ranks > gpus:
        yield Problem("trainer.placement.policy_num_gpus_per_node", f"{ranks} ranks need a GPU each, {has}")
    elif has_own_critic(config.trainer) and (of_critic := critic_nodes(config.trainer)[1]) > gpus:
        yield Problem("trainer.placement.critic_num_gpus_per_node", f"{of_critic} ranks need a GPU each, {has}")
    if parallel > gpus:
        yield Problem(
            "generator.inference_engine.tensor_parallel_size",
            f"a replica needs {parallel} GPUs (times pipeline_parallel_size), {has}",
        )
    elif replicas is not None and parallel >= 1 and replicas_per_node(config) * parallel > gpus:
        yield Problem("slurm.replicas_per_node", f"{replicas} replicas need {replicas * parallel} GPUs, {has}")


def enough_replicas(config: ConfigTree) -> Iterator[Problem]:
    if not has_engines(config):
        return
    least, most = config.slurm.min_replicas, max_replicas(config)
    engines = "generator.inference_engine.num_engines"
    if most < 1:
        yield Problem(engines, "expected at least 1, or replicas of an elastic pool (slurm.elastic.replicas), found 0")
    elif least > most:
        yield Problem(
            "slurm.min_replicas",
            f"expected at most {most}, {engines} and slurm.elastic.replicas together, found {least}",
        )


def sbatch_options(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    for section, asked, owned in (
        ("slurm", slurm, _SBATCH_OWN),
        ("slurm.elastic", slurm.elastic, {*_SBATCH_OWN, "dependency", "gpus_per_node"}),
        ("slurm.upload", slurm.upload, {*_SBATCH_OWN, "dependency"}),
    ):
        for name in asked.extra:
            own = _SBATCH_NAMES.get(name.replace("-", "_"), "")
            if hasattr(asked, own):
                yield Problem(f"{section}.extra.{name}", f"set {section}.{own} instead")
            elif name.replace("-", "_") in owned:
                yield Problem(f"{section}.extra.{name}", "hpcrl sets this option of sbatch itself; leave it out")


def container(config: ConfigTree) -> Iterator[Problem]:
    container = config.slurm.container
    if container.kind == "none" and container.image:
        yield Problem("slurm.container.kind", 'set it to "apptainer" or "pyxis", or leave out slurm.container.image')
    elif container.kind != "none" and not container.image:
        yield Problem("slurm.container.image", f"set it: slurm.container.kind is {container.kind}")
    for mount in container.mounts:
        if not mount.startswith("/") or "," in mount or mount.count(":") > 2:
            expected = "expected SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths without commas"
            yield Problem("slurm.container.mounts", f"{expected}, found {mount!r}")


def counted_gpus(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    if slurm.gpu_option == "none" and gpu_count(slurm) > 0 and not takes_whole_nodes(slurm):
        yield Problem("slurm.gpu_option", 'with "none" a run needs whole nodes: set slurm.exclusive=true')


def time_to_save(config: ConfigTree) -> Iterator[Problem]:
    signal, limit = config.slurm.signal_seconds, 60 * config.slurm.time_minutes
    if 300 <= limit < 2 * signal:
        yield Problem(
            "slurm.signal_seconds",
            f"expected at most half of slurm.time_minutes ({limit // 2} s), found {signal}: a run would be stopped before it has "
            "done anything",
        )
