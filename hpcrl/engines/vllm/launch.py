"""Checks of vLLM's options before a start: unknown options, sizes that do not fit the model, adapters and images that it does not load."""

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
from hpcrl.data.vision.families import VisionFamily
from hpcrl.errors import did_you_mean

_OPTIONS = (("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),)
_MODELS = "vllm.model_executor.models."
_OPTIONS += (("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs")),)


def check_engine(config: Config, entries: Mapping[str, Any] | None) -> Iterator[Problem]:
    engine = config.generator.inference_engine
    # where torch is missing too, this is a login node, of which nothing follows for the nodes; nor does it where jobs have another environment
    if not engine.remote_urls and not config.slurm.other_environment and find_spec("torch") and not find_spec("vllm"):
        yield Problem(
            "generator.inference_engine.backend",
            "vllm is not installed here; install it (docs/installation.md), or set transformers, an engine that needs nothing else",
        )
    yield from _unknown("generator.inference_engine", engine.engine_init_kwargs)
    if entries is not None:
        yield from _sizes(config, text_entries(entries))
        yield from _adapters(config, entries)


def check_teacher(config: Config) -> Iterator[Problem]:
    yield from _unknown("trainer.distillation.engine", config.trainer.distillation.engine.engine_init_kwargs)


def check_vision(config: Config, family: VisionFamily, sees: str) -> Iterator[Problem]:
    engine = config.generator.inference_engine
    if not family.vllm:
        yield Problem(
            "generator.inference_engine.backend",
            f'{sees} by a tower that vLLM 0.31 does not have, or whose weights it knows by other names; use "transformers"',
        )
    if engine.remote_urls:
        yield Problem(
            "generator.inference_engine.remote_urls",
            f"{sees}, and a server that others have started may prepare images in another way; leave it out",
        )
    if engine.speculative.method:
        yield Problem(
            "generator.inference_engine.speculative.method",
            f"{sees}, whose placeholders are never sampled, and vLLM 0.31 has no logit_bias with drafts; leave it out",
        )
    if config.loads_adapters:
        yield Problem(
            "generator.inference_engine.merge_lora",
            f"{sees}, and of adapters vLLM uses none in the vision tower; set it to true",
        )


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
    """Yield sizes by which a model cannot be sharded."""
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
    if not config.loads_adapters:
        return
    for architecture in entries.get("architectures") or []:
        if loads_lora(architecture) is False:
            yield Problem(
                "generator.inference_engine.merge_lora",
                f"the vLLM that is installed here loads no adapters for models of {architecture}; set it to true",
            )


@cache
def loads_lora(architecture: str) -> bool | None:
    """Return whether vLLM loads adapters for a model, read from its source without importing it; None: unknown."""
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
    """Return whether a class of vLLM's models has, or may have, the base class SupportsLoRA, maybe inherited."""
    path = models / f"{module}.py"
    if not path.is_file():
        return True  # unknown; vLLM will check
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
