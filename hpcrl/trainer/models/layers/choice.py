"""Choice of the kernels of a model's layers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LowPrecisionConfig, PolicyConfig
from hpcrl.errors import DataError, RunError


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of the layers of a model.

    Attributes:
        compiled: by torch.compile, for packed samples of any lengths.
        liger: norms, MLPs and rotary positions by Liger's kernels.
    """

    compiled: bool = False
    low_precision: LowPrecisionConfig = field(default_factory=LowPrecisionConfig)
    liger: bool = False

    @classmethod
    def of(cls, policy: PolicyConfig) -> Kernels:
        """Return those of a policy and its reference."""
        return cls(
            compiled=bool(policy.compile_model), low_precision=policy.low_precision, liger=policy.enable_liger_kernel
        )


def choose_flash_attention(version: int | None) -> None:
    """Set torch's flash attention to this version in this process; 2 is torch's own, and None leaves it unchanged.

    Raises:
        RunError: there is no such version here.
    """
    wanted = f"FA{version}" if version and version > 2 else None
    if current_flash_attention_impl() == wanted:
        return
    if wanted is None:
        restore_flash_attention_impl()
        return
    if torch.cuda.is_available() and (have := torch.cuda.get_device_capability()) != (9, 0):
        raise RunError(
            f"trainer.flash_attn_version={version}: FlashAttention {version} is for GPUs of compute capability 9.0 (Hopper), and "
            f"{torch.cuda.get_device_name()} has {have[0]}.{have[1]}; leave it out"
        )
    try:
        activate_flash_attention_impl(wanted)
    except (ImportError, RuntimeError) as error:
        raise RunError(
            f"trainer.flash_attn_version={version}: torch finds no FlashAttention {version} here ({error}); install it, or leave it out"
        ) from error


def use_liger(model: PreTrainedModel) -> None:
    """Replace norms, MLPs and rotary positions of a model by Liger's Triton kernels.

    The head and the loss stay hpcrl's own. Rotary positions are replaced for all models of this type in the process.

    Args:
        model: may be on the meta device; its modules and parameters stay the same.

    Raises:
        RunError: Liger's kernels cannot be loaded.
        DataError: Liger does not know this type of model.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RunError(
            f"trainer.policy.enable_liger_kernel: Liger's kernels cannot be loaded ({error}): pip install 'hpcrl[liger]', or set it to false"
        ) from error
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise DataError(
            f"trainer.policy.enable_liger_kernel: Liger has no kernels for models of type {kind}; set it to false"
        )
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & inspect.signature(apply).parameters.keys()
    apply(model=model, **dict.fromkeys(losses, False))
