"""Kernels that are chosen by name: what is there is used, and what is not is an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from hpcrl.config import TrainerConfig
from hpcrl.config.import_path import missing_packages
from hpcrl.config.validate import build
from hpcrl.errors import DataError, RunError
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.layers.choice import choose_flash_attention, use_liger
from tests.trainer import scenarios

NEEDED = {
    "trainer.policy.low_precision.fp8": {"policy": {"low_precision": {"fp8": True}}},
    "trainer.policy.optimizer_config.moments": {"policy": {"optimizer_config": {"moments": "8bit"}}},
    "trainer.critic.optimizer_config.moments": {"critic": {"optimizer_config": {"moments": "8bit"}}},
    "trainer.policy.enable_liger_kernel": {"policy": {"enable_liger_kernel": True}},
    "trainer.flash_attn_version": {"flash_attn_version": 3},
}

_PACKAGES = "torchao", "liger_kernel", "flash_attn_interface"
without_packages = pytest.mark.skipif(any(map(find_spec, _PACKAGES)), reason="packages are here that may be missing")


@without_packages
@pytest.mark.parametrize("setting", NEEDED)
def test_a_package_that_is_missing_is_named_with_its_remedy(setting: str) -> None:
    given = NEEDED[setting]
    policy = {"model": {"path": "m"}, **given.get("policy", {})}
    (problem,) = missing_packages(build(TrainerConfig, {**given, "policy": policy}))
    assert problem.path == setting
    assert "pip install" in problem.message


@without_packages
def test_a_trainer_without_the_package_ends_with_the_remedy(model_path: Path, alone: World) -> None:
    policy = {"model": {"path": str(model_path)}, "low_precision": {"fp8": True}}
    with pytest.raises(
        RunError, match=r"trainer.policy.low_precision.fp8: needs torchao, .* pip install 'hpcrl\[torchao\]'"
    ):
        build_policy(build(TrainerConfig, {"policy": policy}), 1.0, alone)


class Library:
    """What a package registers with torch as FlashAttention 3, but for its kernels."""

    removed = False

    def remove(self) -> None:
        self.removed = True


@pytest.fixture
def registered() -> Iterator[Library]:
    library, own = Library(), _FLASH_ATTENTION_IMPLS["FA3"]
    register_flash_attention_impl("FA3", register_fn=lambda: library)
    yield library
    register_flash_attention_impl("FA3", register_fn=own)
    choose_flash_attention(None)


def test_flash_attention_of_a_version_is_torchs_own_mechanism(
    registered: Library, model_path: Path, alone: World
) -> None:
    for version in (2, None):
        choose_flash_attention(version)
        assert current_flash_attention_impl() is None
    scenarios.make_engine(alone, str(model_path), {"trainer": {"flash_attn_version": 3}})
    assert current_flash_attention_impl() == "FA3"
    assert not registered.removed
    choose_flash_attention(2)
    assert current_flash_attention_impl() is None
    assert registered.removed


@without_packages
def test_flash_attention_that_is_not_installed() -> None:
    with pytest.raises(RunError, match=r"torch finds no FlashAttention 3 here .*install it, or leave it out"):
        choose_flash_attention(3)
    assert current_flash_attention_impl() is None


def tiny(kind: str = "qwen3", **sizes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.kernels
def test_liger_replaces_norms_and_mlps_and_nothing_else() -> None:
    from transformers.models.qwen3 import modeling_qwen3

    own = modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP
    model, before = tiny(), {name: type(module).forward for name, module in tiny().named_modules()}
    names = [name for name, _ in model.named_parameters()]
    try:
        use_liger(model)
        replaced = {
            name
            for name, module in model.named_modules()
            if getattr(module.forward, "__func__", None) is not before[name]
        }
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp")
        layers = {f"model.layers.{layer}.{part}" for layer in range(2) for part in norms}
        assert replaced == {*layers, "model.norm"}
        assert modeling_qwen3.apply_rotary_pos_emb.__name__ == "liger_rotary_pos_emb"
        assert [name for name, _ in model.named_parameters()] == names
    finally:
        modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP = own


@pytest.mark.kernels
def test_liger_does_not_know_every_model() -> None:
    with pytest.raises(DataError, match=r"no kernels for models of type gpt_neox; set it to false"):
        use_liger(tiny("gpt_neox"))


@without_packages
def test_without_liger() -> None:
    with pytest.raises(RunError, match=r"Liger's kernels cannot be loaded .*hpcrl\[liger\]"):
        use_liger(tiny())
