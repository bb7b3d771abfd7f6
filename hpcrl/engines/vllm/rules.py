"""Rules about runs whose engines, or teachers, are vLLM's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hpcrl.config.errors import Problem
from hpcrl.config.sections.distillation import TeacherEngineConfig
from hpcrl.config.sections.generator import MOST_KEPT, WITH_MODEL, InferenceEngineConfig
from hpcrl.config.sections.model import LORA_RANKS
from hpcrl.config.sections.tree import ConfigTree

_TEACHER = "trainer.distillation"
_ENGINE_NAMES = {field.name: field.name for field in fields(InferenceEngineConfig)} | {
    "dtype": "model_dtype",
    "enable_expert_parallel": "expert_parallel_size",
    "data_parallel_size_local": "data_parallel_size",
    "speculative_config": "speculative",
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
_ENGINE_OWN |= {
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "max_cpu_loras",
    "revision",
    "tokenizer_revision",
    "tokenizer",
}
_ENGINE_OWN |= {"enable_sleep_mode", "profiler_config", "uvicorn_log_level", "disable_uvicorn_access_log", "root_path"}
_ENGINE_OWN |= {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "api_server_count", "headless"}
_ENGINE_OWN |= {"nnodes", "node_rank", "master_addr", "master_port", "skip_tokenizer_init", "tokens_only"}
_ADDRESS = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?/?")
_HOTTEST, _PENALTIES, _LARGEST_PENALTY = 2.0, ("presence_penalty", "frequency_penalty"), 2.0  # of vLLM's SamplingParams
_QUANTIZED_ON_CPUS = ("fp8_per_channel",)


def options(config: ConfigTree) -> Iterator[Problem]:
    path, engine = "generator.inference_engine", config.generator.inference_engine
    yield from _further_options(path, engine.engine_init_kwargs, _ENGINE_NAMES)


def teacher_options(config: ConfigTree) -> Iterator[Problem]:
    engine = config.trainer.distillation.engine
    yield from _further_options(f"{_TEACHER}.engine", engine.engine_init_kwargs, _TEACHER_NAMES)


def _further_options(path: str, given: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Problem]:
    """Refuse options of vLLM's server that hpcrl sets, or has a setting for.

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


def sampling(config: ConfigTree) -> Iterator[Problem]:
    """vLLM refuses each request whose sampling parameters are out of its ranges."""
    for section in ("sampling_params", "eval_sampling_params"):
        given, path = getattr(config.generator, section), f"generator.{section}"
        if (given.temperature or 0) > _HOTTEST:
            yield Problem(
                f"{path}.temperature",
                f"expected at most {_HOTTEST:g}, the highest that vLLM takes, found {given.temperature:g}",
            )
        for name in _PENALTIES:
            value = (given.additional_kwargs or {}).get(name, 0)
            if not isinstance(value, int | float) or abs(value) > _LARGEST_PENALTY:
                yield Problem(
                    f"{path}.additional_kwargs.{name}",
                    f"expected a number from {-_LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}, found {value!r}",
                )


def quantization(config: ConfigTree) -> Iterator[Problem]:
    path, engine = "generator.inference_engine.quantization", config.generator.inference_engine
    needs_gpus = engine.quantization not in (None, *_QUANTIZED_ON_CPUS)
    if needs_gpus and config.slurm.gpus == 0 and not engine.remote_urls:
        found = f"but slurm.gpus_per_node=0; leave it out, or choose {', '.join(_QUANTIZED_ON_CPUS)}"
        yield Problem(path, f'"{engine.quantization}" needs GPUs, {found}')
    elif engine.quantization and engine.model_dtype == "float32":
        yield Problem(
            path, "needs activations in bfloat16 or float16 (generator.inference_engine.model_dtype), found float32"
        )


def processors(config: ConfigTree) -> Iterator[Problem]:
    """Refuse what ends vLLM's build for CPUs at the first request."""
    path, engine = "generator.inference_engine", config.generator.inference_engine
    if engine.remote_urls or config.slurm.gpus > 0:
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
    """Refuse what engines that somebody else started cannot do, and settings without effect on them."""
    path, engine = "generator.inference_engine", config.generator.inference_engine
    secure = any(url.startswith("https://") for url in engine.remote_urls)
    for name, needed in (("remote_key_file", engine.remote_urls), ("remote_ca_file", secure)):
        if getattr(engine, name) is not None and not needed:
            what = "an https address in " if engine.remote_urls else ""
            yield Problem(f"{path}.{name}", f"has no effect without {what}{path}.remote_urls; leave it out")
    if not engine.remote_urls:
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
    if engine.engines != len(engine.remote_urls):
        yield Problem(
            f"{path}.num_engines",
            f"expected {len(engine.remote_urls)}, one for each of {path}.remote_urls, found {engine.engines}",
        )
    if config.loads_adapters:
        yield Problem(
            f"{path}.merge_lora", f"engines of {path}.remote_urls get whole policies, not adapters; set it to true"
        )
    for name, found in (
        ("trainer.placement.colocate_all", config.trainer.placement.colocate_all),
        ("trainer.placement.lend", config.trainer.placement.lend),
        ("trainer.profiler.nsys_engine_iterations", config.trainer.profiler.nsys_engine_iterations),
        ("slurm.elastic.replicas", config.slurm.elastic.replicas),
        ("slurm.replicas_per_node", config.slurm.replicas_per_node),
        (f"{path}.speculative.method", engine.speculative.method),
        (f"{path}.weight_copy_dir", engine.weight_copy_dir),
    ):
        if found:
            yield Problem(
                name, f"does not work with {path}.remote_urls, whose engines are on no node of the run; leave it out"
            )


def adapters(config: ConfigTree) -> Iterator[Problem]:
    lora = config.trainer.policy.model.lora
    if config.loads_adapters and lora.largest_rank > LORA_RANKS[-1]:
        yield Problem(
            "trainer.policy.model.lora.rank",
            f"vLLM loads adapters up to rank {LORA_RANKS[-1]}, found {lora.largest_rank}; set generator.inference_engine.merge_lora=true",
        )


def flash_infer(config: ConfigTree) -> Iterator[Problem]:
    if config.generator.inference_engine.use_flashinfer and config.slurm.gpus == 0:
        yield Problem(
            "generator.inference_engine.use_flashinfer", "needs GPUs, but slurm.gpus_per_node=0; set it to false"
        )


def routed_experts(config: ConfigTree) -> Iterator[Problem]:
    path, engine = "trainer.policy.experts.router_replay", config.generator.inference_engine
    if config.trainer.policy.experts.router_replay == "none" or config.trainer.offline:
        return
    if config.slurm.gpus == 0:
        yield Problem(
            path, 'vLLM tells of experts on GPUs only; set generator.inference_engine.backend to "transformers"'
        )
        return
    for name, value in {"pipeline_parallel_size": 1, "enable_prefix_caching": True}.items():
        if getattr(engine, name) != value:
            where = f"generator.inference_engine.{name}"
            yield Problem(path, f"vLLM tells of experts with {where}={str(value).lower()} only; set it to that")


def drafts(config: ConfigTree) -> Iterator[Problem]:
    """Refuse what vLLM 0.31 cannot do with draft tokens."""
    path, own = "generator.inference_engine.speculative", config.generator.inference_engine.speculative
    if own.method is None:
        return
    if own.method in WITH_MODEL and own.model is None:
        yield Problem(f"{path}.model", f'required with {path}.method="{own.method}": a directory or a name on the hub')
    if own.method == "ngram" and own.prompt_lookup_min > own.prompt_lookup_max:
        yield Problem(
            f"{path}.prompt_lookup_min",
            f"expected at most prompt_lookup_max ({own.prompt_lookup_max}), found {own.prompt_lookup_min}",
        )
    for section in ("sampling_params", "eval_sampling_params"):
        params = getattr(config.generator, section)
        if params.min_p:
            yield Problem(
                f"generator.{section}.min_p", f"vLLM 0.31 has no min_p with {path}.method; leave one of them out"
            )
        if "logit_bias" in (params.additional_kwargs or {}):
            name = f"generator.{section}.additional_kwargs.logit_bias"
            yield Problem(name, f"vLLM 0.31 has no logit_bias with {path}.method; leave one of them out")
    if config.trainer.policy.experts.router_replay != "none":
        yield Problem(
            f"{path}.method",
            "the experts of tokens (trainer.policy.experts.router_replay) have not been tried with drafts; leave one of them out",
        )


def teacher(config: ConfigTree) -> Iterator[Problem]:
    """vLLM gives log-probabilities of prompts for whole distributions at temperature 1 only."""
    sampling, own, path = config.generator.sampling_params, config.trainer.distillation, f"{_TEACHER}.backend"
    if config.temperature != 1:
        yield Problem(
            path,
            f"a vLLM engine gives log-probabilities of samples at temperature 1, and the policy has {config.temperature:g} "
            '(generator.sampling_params.temperature, trainer.algorithm.temperature); choose "fsdp2"',
        )
    if sampling.mask_size:
        yield Problem(
            path,
            "a vLLM engine gives log-probabilities of samples over the whole vocabulary, and sampling leaves tokens out "
            f'(generator.sampling_params.top_k = {sampling.top_k}); choose "fsdp2"',
        )
    if own.top_k > MOST_KEPT:
        yield Problem(f"{_TEACHER}.top_k", f'expected at most {MOST_KEPT} with backend="vllm", found {own.top_k}')
    if own.top_k and not own.top_k_from_teacher:
        yield Problem(
            f"{_TEACHER}.top_k_from_teacher",
            'expected true with backend="vllm": an engine tells of the tokens that it finds most probable itself; choose "fsdp2"',
        )
    if own.placement.nodes_per_replica > 1:
        yield Problem(
            f"{_TEACHER}.placement.nodes_per_replica", 'expected 1 with backend="vllm"; choose "fsdp2" or "megatron"'
        )
    if own.include_prompt:
        yield Problem(f"{_TEACHER}.include_prompt", 'expected false with backend="vllm"; choose "fsdp2" or "megatron"')


def deterministic(config: ConfigTree) -> Iterator[Problem]:
    """Refuse engines whose log-probabilities would depend on what else is in a batch."""
    path, engine = "generator.inference_engine", config.generator.inference_engine
    if not config.trainer.deterministic or config.trainer.offline:
        return
    if engine.remote_urls:
        yield Problem(
            f"{path}.remote_urls",
            "with trainer.deterministic hpcrl has to start the engines, in their batch-invariant mode; leave it out",
        )
    elif engine.speculative.method:
        yield Problem(
            f"{path}.speculative.method",
            "with trainer.deterministic, how many drafts are verified together would change the last bits; leave it out",
        )


RULES = (
    *(adapters, deterministic, drafts, flash_infer, options, processors),
    *(quantization, remote_engines, routed_experts, sampling),
)
TEACHER_RULES = (teacher, teacher_options)
