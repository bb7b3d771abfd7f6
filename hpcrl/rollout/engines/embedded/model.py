"""The model of the embedded engine: its first weights, and those of published versions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hpcrl.config.sections.model import rope_parameters
from hpcrl.data.weight_files import PublishedWeights, WeightReader, whole_digest
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.embedded.cache import expect_attention_only

_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model and what a run changes of its configuration.

    Attributes:
        path: directory or hub id in Hugging Face format.
        dtype: of weights and computation, such as "bfloat16".
        config_kwargs: entries of config.json that are replaced.
        rope_scaling, rope_theta: replace the model's rotary positions; empty and None: the model's own.
    """

    path: str
    dtype: str
    config_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None

    def config(self) -> PreTrainedConfig:
        config = AutoConfig.from_pretrained(self.path)
        entries = dict(self.config_kwargs)
        if self.rope_scaling or self.rope_theta is not None:
            entries["rope_parameters"] = rope_parameters(
                config.rope_parameters, dict(self.rope_scaling), self.rope_theta
            )
        if not entries:
            return config
        own, _ = PreTrainedConfig.get_config_dict(self.path)
        # where both forms of rotary positions are there, the older one would only be ignored
        kept = {name: value for name, value in own.items() if name not in ("rope_scaling", "rope_theta")}
        return type(config).from_dict({**(kept if "rope_parameters" in entries else own), **entries})


def load_model(options: ModelOptions, device: torch.device) -> PreTrainedModel:
    """Return the model with its first weights.

    Raises:
        EngineError: it is none that the engine can run, or cannot be loaded.
    """
    disable_progress_bar()  # of no use in a log file
    try:
        config = options.config()
        expect_attention_only(config)
        model = AutoModelForCausalLM.from_pretrained(
            options.path, config=config, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise EngineError(f"the model at {options.path} cannot be loaded: {error}") from error
    return cast(Any, model).to(device).eval()


def end_tokens(model: PreTrainedModel, tokenizer_end: int | None) -> set[int]:
    """Return the ids that end a response: of the tokenizer, and those that the model's generation_config.json names."""
    found = {tokenizer_end} - {None}
    for config in (model.generation_config, model.config.get_text_config()):
        own = getattr(config, "eos_token_id", None) if config is not None else None
        found |= set(own) if isinstance(own, list) else {own} - {None}
    return cast("set[int]", found)


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
    names = weights.tensors.keys() | given.keys()
    wrong = sorted(name for name in names if weights.tensors.get(name) != given.get(name))
    held = {"version": weights.version, "digest": whole_digest(given), "wrong": wrong[:_MOST_NAMED]}
    return tensors, {"rank": 0, "of": 1, **held}


@torch.inference_mode()
def replace_weights(model: PreTrainedModel, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Give a model other weights.

    Args:
        tensors: by their names on disk, which may be others than the model's own, such as those of single experts: transformers knows
            how they belong together.

    Raises:
        EngineError: they are not those of this model.
    """
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    answer = type(model).from_pretrained(None, config=model.config, state_dict=tensors, dtype=model.dtype, **options)
    newer, loaded = cast("tuple[PreTrainedModel, dict[str, Any]]", answer)
    missing = sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    if missing:
        raise EngineError(f"{source} lacks {', '.join(missing[:_MOST_NAMED])}, or has them in another shape")
    for mine, other in zip(model.parameters(), newer.parameters(), strict=True):
        mine.copy_(other)
