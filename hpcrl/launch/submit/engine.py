"""What an engine would refuse when it starts: samples longer than the model takes, options that vLLM does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.rules.model_fit import experts_of, text_entries
from hpcrl.config.token_limits import longest_sample
from hpcrl.errors import did_you_mean
from hpcrl.launch.submit.models import entries_of

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")
_OPTIONS = (("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),)
_MODELS = "vllm.model_executor.models."
_OPTIONS += (("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs")),)


def check_engine(config: Config) -> Iterator[Problem]:
    """Yield what the engines of a run would refuse, as far as the model and vLLM are on this machine."""
    entries = entries_of(config.trainer.policy.model.pretrained)
    if entries is not None:
        yield from _lengths(config, entries)
        yield from _adapters(config, entries)
    if not config.has_engines:
        return
    engine = config.generator.inference_engine
    # where torch is missing too, this is a login node, of which nothing follows for the nodes; nor does it from outside of a container
    if (
        engine.backend == "vllm"
        and not engine.remote_urls
        and config.slurm.container.kind == "none"
        and find_spec("torch")
        and not find_spec("vllm")
    ):
        yield Problem(
            "generator.inference_engine.backend",
            "vllm is not installed here; install it (docs/installation.md), or set transformers, an engine that needs nothing else",
        )
    yield from _unknown("generator.inference_engine", engine.engine_init_kwargs)
    distillation = config.trainer.distillation
    if distillation.enable and distillation.backend == "vllm":
        yield from _unknown("trainer.distillation.engine", distillation.engine.engine_init_kwargs)
    if entries is not None and engine.backend == "vllm":
        yield from _sizes(config, text_entries(entries))


def _unknown(path: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    known = vllm_options() if given else frozenset[str]()
    for name in given if known else ():
        own = name.replace("-", "_").partition(".")[0]
        if own not in known and own.removeprefix("no_") not in known:
            near = did_you_mean(own, known)
            yield Problem(
                f"{path}.engine_init_kwargs.{name}", f"the vLLM that is installed here has no option {name!r}{near}"
            )


def _sizes(config: Config, entries: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield sizes that a model cannot be shared by."""
    path, engine = "generator.inference_engine", config.generator.inference_engine
    of = f"of the model at {config.trainer.policy.model.path} (its config.json)"
    heads, layers = entries.get("num_attention_heads"), entries.get("num_hidden_layers")
    if isinstance(heads, int) and heads % engine.tensor_parallel_size:
        yield Problem(
            f"{path}.tensor_parallel_size",
            f"expected a divisor of {heads}, the attention heads {of}, found {engine.tensor_parallel_size}",
        )
    if isinstance(layers, int) and layers < engine.pipeline_parallel_size:
        yield Problem(
            f"{path}.pipeline_parallel_size",
            f"expected at most {layers}, the layers {of}, found {engine.pipeline_parallel_size}",
        )
    on_cpu = config.slurm.gpus == 0 and not engine.remote_urls
    if engine.data_parallel_size > 1 and experts_of(entries) and on_cpu:
        yield Problem(
            f"{path}.data_parallel_size",
            f"without GPUs vLLM 0.31 does not share the experts {of} among copies: expected 1, found {engine.data_parallel_size}; use "
            "num_engines",
        )
    if engine.expert_parallel_size > 1 and not experts_of(entries):
        yield Problem(f"{path}.expert_parallel_size", f"expected 1, as there are no experts {of}; leave it out")


def _adapters(config: Config, entries: Mapping[str, Any]) -> Iterator[Problem]:
    if config.generator.inference_engine.backend != "vllm" or not config.loads_adapters:
        return
    for architecture in entries.get("architectures") or []:
        if loads_lora(architecture) is False:
            yield Problem(
                "generator.inference_engine.merge_lora",
                f"the vLLM that is installed here loads no adapters for models of {architecture}; set it to true",
            )


def merged_for_engines(config: Config) -> Iterator[str]:
    """Yield a warning where engines get whole policies although the configuration does not say so."""
    lora = config.trainer.policy.model.lora
    if config.has_engines and lora.rank and not (lora.loadable or config.generator.inference_engine.merge_lora):
        yield (
            "engines cannot load what trainer.policy.model.lora trains here (by modules_to_save, target_parameters or init_method): each "
            "version is the whole policy, merged, as with generator.inference_engine.merge_lora=true"
        )


def layers_over_nodes(config: Config) -> Iterator[str]:
    """Yield a warning where the GPUs that share each layer of a replica are on several nodes."""
    engine, gpus = config.generator.inference_engine, config.slurm.gpus
    if config.has_engines and not engine.remote_urls and 0 < gpus < engine.tensor_parallel_size:
        yield (
            f"generator.inference_engine.tensor_parallel_size={engine.tensor_parallel_size} is more than a node's {gpus} GPUs: they wait for each "
            "other over the network twice in each layer; pipeline_parallel_size shares layers among nodes instead"
        )


@cache
def loads_lora(architecture: str) -> bool | None:
    """Return whether vLLM loads adapters for a model, read from its source without importing it; None: it cannot be told."""
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    models = Path(places[0], "model_executor", "models") if places else None
    if models is None or not (models / "registry.py").is_file():
        return None
    found = re.search(
        rf'"{re.escape(architecture)}": \(\s*"(\w+)",\s*"(\w+)"', (models / "registry.py").read_text("utf-8")
    )
    return _inherits_lora(models, *found.groups()) if found else None


def _inherits_lora(models: Path, module: str, name: str) -> bool:
    """Return whether a class of vLLM's models has, or may have, the base class SupportsLoRA, maybe by another class of them."""
    path = models / f"{module}.py"
    if not path.is_file():
        return True  # not known, and vLLM will say
    body = ast.parse(path.read_text("utf-8")).body
    bases = [
        ast.unparse(base)
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == name
        for base in node.bases
    ]
    imported = {
        alias.name: node.module.removeprefix(_MODELS)
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module and (node.level == 1 or node.module.startswith(_MODELS))
        for alias in node.names
    }
    return "SupportsLoRA" in bases or any(
        _inherits_lora(models, imported.get(base, module), base) for base in bases if base != name
    )


def _lengths(config: Config, entries: Mapping[str, Any]) -> Iterator[Problem]:
    generator = config.generator
    changes = config.trainer.policy.config_overrides
    overrides = generator.inference_engine.engine_init_kwargs.get("hf_overrides", {})
    rope, _ = config.engine_rope
    most = position_limit({**entries, **changes, **overrides}, rope)
    offline = config.trainer.offline
    wanted = longest_sample(config) if offline else config.max_model_len
    if most is None or wanted <= most:
        return
    if offline:
        yield Problem(
            "trainer.max_length",
            f"{wanted} is more than the {most} tokens that the model at {config.trainer.policy.model.path} takes (its config.json); lower it",
        )
        return
    before = config.max_input_length
    name = "trainer.max_prompt_length" if generator.max_input_length is None else "generator.max_input_length"
    yield Problem(
        name,
        f"{before} tokens before a turn and {wanted - before} of max_generate_length are {wanted}, more than the {most} that the model at "
        f"{config.trainer.policy.model.path} takes (its config.json); lower {name} or generator.sampling_params.max_generate_length",
    )


def position_limit(entries: Mapping[str, Any], rope: Mapping[str, Any] | None = None) -> int | None:
    """Return the tokens that a model takes at most, as vLLM 0.31 derives them (`_get_and_verify_max_len`); None: its config.json does not say.

    Args:
        entries: of config.json.
        rope: scaling of the rotary positions in the place of the model's own; empty: that.
    """
    own = text_entries(entries)
    limits = [own[name] for name in _LENGTHS if isinstance(own.get(name), int)]
    if not limits:
        return None
    scaling = rope or own.get("rope_parameters") or own.get("rope_scaling") or {}
    kinds = scaling.values() if all(isinstance(kind, Mapping) for kind in scaling.values()) else [scaling]
    factors = [kind.get("factor") or 1.0 for kind in kinds if _type_of(kind) not in _SCALED_ALREADY]
    scaled = factors and "gemma3" not in str(own.get("model_type", ""))
    length = own["model_max_length"] if isinstance(own.get("model_max_length"), int) else min(limits)
    return int(length * factors[-1]) if scaled else length


def _type_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


@cache
def vllm_options() -> frozenset[str]:
    """Return the names of the options of vLLM's server, read from its source without importing it; empty where there is none."""
    spec = find_spec("vllm")
    found = set[str]()
    for place in spec.submodule_search_locations or () if spec else ():
        for file, classes in _OPTIONS:
            path = Path(place, file)
            if not path.is_file():  # another version: not known
                return frozenset()
            text = path.read_text(encoding="utf-8")
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and node.name in classes:
                    fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
                    found |= {field.id for field in fields if isinstance(field, ast.Name)}
            found |= {name.replace("-", "_") for name in re.findall(r'"--([a-z][a-z0-9-]+)"', text)}
    return frozenset(found)
