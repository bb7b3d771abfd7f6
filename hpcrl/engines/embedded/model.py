"""The model of the embedded engine: its first weights, and those of published versions."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hpcrl.data.model_config import ConfiguredModel
from hpcrl.data.vision.classes import auto_class
from hpcrl.data.vision.families import family_of
from hpcrl.engines.embedded.cache import expect_attention_only
from hpcrl.errors import DataError, EngineError
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.models.packed.blocks import compute_in_blocks

_MOST_NAMED = 8


def load_model(
    source: ConfiguredModel, dtype: str, device: torch.device, *, in_blocks: bool = False
) -> PreTrainedModel:
    """Return the model with its first weights. Raises EngineError where it is none that the engine can run, or cannot be loaded.

    Args:
        dtype: of weights and computation, such as "bfloat16".
        in_blocks: its passes are those of blocks.py, if it sees no images.
    """
    disable_progress_bar()  # of no use in a log file
    try:
        config = source.config()
        in_blocks = in_blocks and family_of(config) is None
        expect_attention_only(config)
        model = auto_class(config).from_pretrained(
            source.path,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=PACKED if in_blocks else _attention(config),
            trust_remote_code=False,
            **source.at_revision,
        )
    except (OSError, ValueError, RuntimeError, UnpicklingError, DataError) as error:
        raise EngineError(f"the model at {source} cannot be loaded: {error}") from error
    if in_blocks:
        compute_in_blocks(model)
    return cast(Any, model).to(device).eval()


def _attention(config: PreTrainedConfig) -> str:
    """Return the attention kernel for a model: scaled_dot_product_attention has neither capped scores nor sinks."""
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"


@torch.inference_mode()
def replace_weights(model: PreTrainedModel, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Replace a model's weights. Raises EngineError where they are not those of this model.

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
