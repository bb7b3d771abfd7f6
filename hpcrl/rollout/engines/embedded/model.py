"""The model of the embedded engine: its first weights, and those of published versions."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hpcrl.data.model_config import ConfiguredModel
from hpcrl.data.vision.classes import auto_class
from hpcrl.data.weight_files import ADAPTER_PREFIX, PublishedWeights, WeightReader
from hpcrl.errors import DataError, EngineError
from hpcrl.rollout.engines.embedded.cache import expect_attention_only

_MOST_NAMED = 8


def load_model(source: ConfiguredModel, dtype: str, device: torch.device) -> PreTrainedModel:
    """Return the model with its first weights. Raises EngineError where it is none that the engine can run, or cannot be loaded.

    Args:
        dtype: of weights and computation, such as "bfloat16".
    """
    disable_progress_bar()  # of no use in a log file
    try:
        config = source.config()
        expect_attention_only(config)
        model = auto_class(config).from_pretrained(
            source.path,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=_attention(config),
            trust_remote_code=False,
            **source.at_revision,
        )
    except (OSError, ValueError, RuntimeError, UnpicklingError, DataError) as error:
        raise EngineError(f"the model at {source} cannot be loaded: {error}") from error
    return cast(Any, model).to(device).eval()


def _attention(config: PreTrainedConfig) -> str:
    """Return the kernel that computes what a model's attention is: scaled_dot_product_attention caps no scores, and knows no sinks."""
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"


def read_tensors(weights: PublishedWeights) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a published version by name, and what was read as `proof.check_ranks` wants it.

    Raises:
        EngineError: its files cannot be read.
    """
    given, tensors = dict[str, str](), dict[str, torch.Tensor]()
    try:
        with closing(WeightReader(weights.path)) as reader:
            for name, tensor, digest in reader:
                given[name], tensors[name] = digest, tensor
    except (OSError, ValueError) as error:
        raise EngineError(f"weights of version {weights.version}: {error}") from error
    return tensors, {"rank": 0, "of": 1, **weights.held(given)}


@torch.inference_mode()
def replace_weights(model: PreTrainedModel, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Give a model other weights. Raises EngineError where they are not those of this model.

    Args:
        tensors: by their names on disk, which may be others than the model's own, such as those of single experts: transformers knows
            how they belong together.
    """
    own = model.state_dict(keep_vars=True)
    named = {name: own[name] for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    if len(named) == len(tensors) and set(model.parameters()) <= set(named.values()):  # as a rule; no second model
        for name, tensor in tensors.items():
            named[name].copy_(tensor)
        return
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    answer = type(model).from_pretrained(None, config=model.config, state_dict=tensors, dtype=model.dtype, **options)
    newer, loaded = cast("tuple[PreTrainedModel, dict[str, Any]]", answer)
    missing = sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    if missing:
        raise EngineError(f"{source} lacks {', '.join(missing[:_MOST_NAMED])}, or has them in another shape")
    for mine, other in zip(model.parameters(), newer.parameters(), strict=True):
        mine.copy_(other)


@torch.no_grad()  # parameters made in inference mode could not be moved from a GPU and back
def replace_adapter(model: PreTrainedModel, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Let a model compute with an adapter instead of the one that it had, if it had one.

    Args:
        tensors: by their names in PEFT's files.
        source: directory with PEFT's configuration beside them.

    Raises:
        EngineError: they are not for this model.
    """
    if not (own := _adapter_of(model)):
        import peft  # takes half a second, and most runs have no adapters

        # within a module, since of a model PEFT would take dense and shared layers beside experts for experts of older files
        peft.inject_adapter_in_model(
            peft.LoraConfig.from_pretrained(str(source)), torch.nn.ModuleDict({"model": model})
        )
        own = _adapter_of(model)
    named = {
        name.removeprefix(ADAPTER_PREFIX).replace(".weight", ".default.weight"): tensor
        for name, tensor in tensors.items()
    }
    if wrong := sorted(own.keys() ^ named.keys()):
        raise EngineError(f"{source} is no adapter of this model, by {', '.join(wrong[:_MOST_NAMED])}")
    for name, tensor in named.items():
        own[name].copy_(tensor)


def _adapter_of(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
