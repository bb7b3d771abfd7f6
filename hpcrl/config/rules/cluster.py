"""Rules about nodes, their GPUs, and options of the engine and of sbatch that hpcrl sets itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hpcrl.config.errors import Problem
from hpcrl.config.sections.distillation import TeacherEngineConfig
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.config.sections.model import LORA_RANKS
from hpcrl.config.sections.slurm import ElasticConfig, SlurmConfig
from hpcrl.config.sections.tree import ConfigTree

_ENGINE_NAMES = {field.name: field.name for field in fields(InferenceEngineConfig)} | {
    "dtype": "model_dtype",
    "enable_expert_parallel": "expert_parallel_size",
    "data_parallel_size_local": "data_parallel_size",
}
_TEACHER_NAMES = {field.name: field.name for field in fields(TeacherEngineConfig)} | {"dtype": "model_dtype"}
_SIZES = {"pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "enable_expert_parallel"}
_ENGINE_OWN = {"uds", "host", "port", "middleware", "model", "max_model_len", "logprobs_mode", "api_key", "config"}
_ENGINE_OWN |= {
    "weight_transfer_config",
    "enable_scale_out",
    "served_model_name",
    "max_logprobs",
    "worker_extension_cls",
}
_ENGINE_OWN |= {"enable_lora", "max_lora_rank", "max_loras", "revision", "tokenizer_revision", "tokenizer"}
_ENGINE_OWN |= {"enable_sleep_mode", "profiler_config", "uvicorn_log_level", "disable_uvicorn_access_log", "root_path"}
_ENGINE_OWN |= {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "api_server_count", "headless"}
_ENGINE_OWN |= {"nnodes", "node_rank", "master_addr", "master_port", "skip_tokenizer_init", "tokens_only"}
_OF_VLLM = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size", "quantization"),
    *("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "use_flashinfer", "fully_sharded_loras"),
    "remote_urls",
    "engine_init_kwargs",
)
_ADDRESS = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?/?")
_QUANTIZED_ON_CPUS = ("fp8_per_channel",)
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
    yield from _further_options(path, engine.engine_init_kwargs, _ENGINE_NAMES)
    distillation = config.trainer.distillation
    if distillation.enable and distillation.backend == "vllm":
        yield from _further_options(
            "trainer.distillation.engine", distillation.engine.engine_init_kwargs, _TEACHER_NAMES
        )


def _further_options(path: str, given: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Problem]:
    """Look at options of vLLM's by their names there.

    Args:
        path: of the section that has them.
        settings: option -> setting of this section.
    """
    if not isinstance(given.get("hf_overrides", {}), dict):
        yield Problem(
            f"{path}.engine_init_kwargs.hf_overrides", "expected a table of entries of the model's config.json"
        )
    known = settings.keys() | _ENGINE_OWN | _SIZES
    for name in given:
        option = name.replace("-", "_").partition(".")[0]
        option = option if option in known else option.removeprefix("no_")
        if own := settings.get(option):
            yield Problem(f"{path}.engine_init_kwargs.{name}", f"set {path}.{own} instead")
        elif option in known or option.startswith("data_parallel_"):
            yield Problem(
                f"{path}.engine_init_kwargs.{name}", "hpcrl sets this option of the server itself; leave it out"
            )


def quantized_engines(config: ConfigTree) -> Iterator[Problem]:
    path, engine = "generator.inference_engine.quantization", config.generator.inference_engine
    needs_gpus = engine.quantization not in (None, *_QUANTIZED_ON_CPUS)
    if needs_gpus and config.slurm.gpus == 0 and not engine.remote_urls:
        found = f"but slurm.gpus_per_node=0; leave it out, or choose {', '.join(_QUANTIZED_ON_CPUS)}"
        yield Problem(path, f'"{engine.quantization}" needs GPUs, {found}')
    elif engine.quantization and engine.model_dtype == "float32":
        yield Problem(
            path, "needs activations in bfloat16 or float16 (generator.inference_engine.model_dtype), found float32"
        )


def engines_on_processors(config: ConfigTree) -> Iterator[Problem]:
    """What vLLM's build for CPUs ends with at the first request."""
    path, engine = "generator.inference_engine", config.generator.inference_engine
    if engine.remote_urls or config.slurm.gpus > 0 or engine.backend != "vllm":
        return
    if engine.expert_parallel_size > 1 and not engine.gpus % engine.expert_parallel_size:
        yield Problem(
            f"{path}.expert_parallel_size",
            f"without GPUs vLLM 0.31 needs a part of every expert on each worker: expected 1, found {engine.expert_parallel_size}",
        )
    if engine.pipeline_parallel_size > 1 and engine.runs_eagerly(on_cpu=True):
        yield Problem(
            f"{path}.enforce_eager",
            "without GPUs vLLM 0.31 hands nothing from one pipeline stage to the next where it runs eagerly; set it to false, or leave out "
            "pipeline_parallel_size",
        )


def remote_engines(config: ConfigTree) -> Iterator[Problem]:
    """Engines that somebody else started: what they cannot be, and what has no effect on them."""
    path, engine = "generator.inference_engine", config.generator.inference_engine
    secure = any(url.startswith("https://") for url in engine.remote_urls)
    for name, needed in (("remote_key_file", engine.remote_urls), ("remote_ca_file", secure)):
        if getattr(engine, name) is not None and not needed:
            what = "an https address in " if engine.remote_urls else ""
            yield Problem(f"{path}.{name}", f"has no effect without {what}{path}.remote_urls; leave it out")
    if not engine.remote_urls or engine.backend != "vllm":
        return
    if not config.has_engines:
        yield Problem(f"{path}.remote_urls", f'has no effect with trainer.mode="{config.trainer.mode}"; leave it out')
        return
    for url in engine.remote_urls:
        if not _ADDRESS.fullmatch(url):
            yield Problem(f"{path}.remote_urls", f"expected addresses such as https://host:8000, found {url!r}")
    if len(set(engine.remote_urls)) != len(engine.remote_urls):
        yield Problem(
            f"{path}.remote_urls", "expected each address once: an engine works for one rollout worker at a time"
        )
    if engine.num_engines != len(engine.remote_urls):
        yield Problem(
            f"{path}.num_engines",
            f"expected {len(engine.remote_urls)}, one for each of {path}.remote_urls, found {engine.num_engines}",
        )
    if config.loads_adapters:
        yield Problem(
            f"{path}.merge_lora", f"engines of {path}.remote_urls get whole policies, not adapters; set it to true"
        )
    for name, found in (
        ("trainer.placement.colocate_all", config.trainer.placement.colocate_all),
        ("trainer.profiler.nsys_engine_iterations", config.trainer.profiler.nsys_engine_iterations),
        ("slurm.elastic.replicas", config.slurm.elastic.replicas),
        ("slurm.replicas_per_node", config.slurm.replicas_per_node),
        (f"{path}.weight_copy_dir", engine.weight_copy_dir),
    ):
        if found:
            yield Problem(
                name, f"does not work with {path}.remote_urls, whose engines are on no node of the run; leave it out"
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
    if engine.backend == "vllm" and config.loads_adapters and lora.largest_rank > LORA_RANKS[-1]:
        yield Problem(
            "trainer.policy.model.lora.rank",
            f"vLLM loads adapters up to rank {LORA_RANKS[-1]}, found {lora.largest_rank}; set generator.inference_engine.merge_lora=true",
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
        if config.loads_adapters:
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
    if backend == "nccl" and config.slurm.gpus == 0:
        yield Problem(
            path + "weight_sync_backend", "nccl needs GPUs, but slurm.gpus_per_node=0; use gloo or filesystem"
        )
    elif backend == "nccl" and config.trainer.placement.colocate_all:
        yield Problem(
            path + "weight_sync_backend",
            "NCCL refuses two processes of one GPU, and trainer.placement.colocate_all=true has them; use gloo or filesystem",
        )


def _is_default(engine: InferenceEngineConfig, name: str) -> bool:
    return getattr(engine, name) == next(field.default for field in fields(engine) if field.name == name)


def flash_infer(config: ConfigTree) -> Iterator[Problem]:
    if config.generator.inference_engine.use_flashinfer and config.slurm.gpus == 0:
        yield Problem(
            "generator.inference_engine.use_flashinfer", "needs GPUs, but slurm.gpus_per_node=0; set it to false"
        )


def gpus_of_nodes(config: ConfigTree) -> Iterator[Problem]:
    gpus, ranks = config.slurm.gpus, config.trainer.placement.policy_num_gpus_per_node
    if gpus <= 0:
        return
    parallel, replicas = config.generator.inference_engine.gpus, config.slurm.replicas_per_node
    has = f"but a node has {gpus} GPUs (slurm.gpus_per_node)"
    if ranks > gpus:
        yield Problem("trainer.placement.policy_num_gpus_per_node", f"{ranks} ranks need a GPU each, {has}")
    elif config.trainer.has_own_critic and (of_critic := config.trainer.placement.critic_nodes[1]) > gpus:
        yield Problem("trainer.placement.critic_num_gpus_per_node", f"{of_critic} ranks need a GPU each, {has}")
    if config.generator.inference_engine.remote_urls:
        return
    if parallel > gpus:
        yield from _engines_on_several_nodes(config, has)
    elif replicas is not None and parallel >= 1 and config.replicas_per_node * parallel > gpus:
        yield Problem("slurm.replicas_per_node", f"{replicas} replicas need {replicas * parallel} GPUs, {has}")


def _engines_on_several_nodes(config: ConfigTree, has: str) -> Iterator[Problem]:
    engine, gpus = config.generator.inference_engine, config.slurm.gpus
    copy = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if engine.gpus % gpus or (copy % gpus and gpus % copy):
        yield Problem(
            "generator.inference_engine.tensor_parallel_size",
            f"a replica needs {engine.gpus} GPUs (times pipeline_parallel_size and data_parallel_size), {has}; on several nodes it has "
            "all GPUs of each, and on each as much of a copy of the weights, or as many of them",
        )
    for name, found in (
        ("slurm.elastic.replicas", config.slurm.elastic.replicas),
        ("slurm.replicas_per_node", config.slurm.replicas_per_node),
        ("generator.inference_engine.weight_copy_dir", config.generator.inference_engine.weight_copy_dir),
    ):
        if found:
            yield Problem(
                name,
                f"does not work where a replica is on several nodes: it needs {engine.gpus} GPUs, {has}; leave it out",
            )


def enough_replicas(config: ConfigTree) -> Iterator[Problem]:
    if not config.has_engines:
        return
    least, most = config.slurm.min_replicas, config.max_replicas
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
        *((path, asked, {*_SBATCH_OWN, "dependency", "gpus_per_node"}) for path, asked in _pools(slurm).items()),
        ("slurm.upload", slurm.upload, {*_SBATCH_OWN, "dependency"}),
    ):
        for name in asked.extra:
            own = _SBATCH_NAMES.get(name.replace("-", "_"), "")
            if hasattr(asked, own):
                yield Problem(f"{section}.extra.{name}", f"set {section}.{own} instead")
            elif name.replace("-", "_") in owned:
                yield Problem(f"{section}.extra.{name}", "hpcrl sets this option of sbatch itself; leave it out")


def _pools(slurm: SlurmConfig) -> Mapping[str, ElasticConfig]:
    """Return the sections of elastic pools, by their paths."""
    scorers = slurm.elastic_scorers
    return {"slurm.elastic": slurm.elastic} | {
        f"slurm.elastic_scorers.{one.name}": getattr(scorers, one.name) for one in fields(scorers)
    }


def container(config: ConfigTree) -> Iterator[Problem]:
    container = config.slurm.container
    if container.kind == "none" and container.image:
        yield Problem("slurm.container.kind", 'set it to "apptainer" or "pyxis", or leave out slurm.container.image')
    elif container.kind != "none" and not container.image:
        yield Problem("slurm.container.image", f"set it: slurm.container.kind is {container.kind}")
    yield from mount_problems("slurm.container.mounts", container.mounts)


def mount_problems(setting: str, mounts: Sequence[str]) -> Iterator[Problem]:
    for mount in mounts:
        if not mount.startswith("/") or "," in mount or mount.count(":") > 2:
            expected = "expected SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths without commas"
            yield Problem(setting, f"{expected}, found {mount!r}")


def counted_gpus(config: ConfigTree) -> Iterator[Problem]:
    slurm = config.slurm
    if slurm.gpu_option == "none" and slurm.gpus > 0 and not slurm.whole_nodes:
        yield Problem("slurm.gpu_option", 'with "none" a run needs whole nodes: set slurm.exclusive=true')


def time_to_save(config: ConfigTree) -> Iterator[Problem]:
    signal, limit = config.slurm.signal_seconds, 60 * config.slurm.time_minutes
    if 300 <= limit < 2 * signal:
        yield Problem(
            "slurm.signal_seconds",
            f"expected at most half of slurm.time_minutes ({limit // 2} s), found {signal}: a run would be stopped before it has "
            "done anything",
        )
