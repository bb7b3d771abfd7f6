"""Models on this machine are checked against the layout of their ranks when a run is submitted; others are named."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.launch.submit.megatron_fields import SOURCES, field_names
from hpcrl.launch.submit.models import check_layouts, entries_of, fetch_entries, folder_of, unchecked_models
from hpcrl.launch.submit.preflight import check_files
from tests.paths import CONFIGS

POLICY, REF = "trainer.policy.megatron_config", "trainer.ref.megatron_config"
TWO = {f"{POLICY}.tensor_model_parallel_size": 2, f"{REF}.tensor_model_parallel_size": 2}
ONE: dict[str, Any] = {}
THREE = {f"{POLICY}.tensor_model_parallel_size": 3, f"{REF}.tensor_model_parallel_size": 3}


def config(model: Path | str, settings: dict[str, Any]) -> Config:
    """Return a configuration for Megatron, which no file may name yet."""
    data = {"data.train_data": [str(CONFIGS / "quickstart" / "data" / "train.parquet")], "data.val_data": []}
    base = {**data, "environment.env_class": "format", "trainer.train_batch_size": 8, "trainer.strategy": "megatron"}
    return build(Config, nested({**base, "trainer.policy.model.path": str(model), **settings}))


def model(folder: Path, **entries: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_hidden_layers": 6} | entries))
    return folder


def test_a_layout_is_refused_with_its_arithmetic(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    with pytest.raises(DataError) as caught:
        check_files(config(path, THREE))
    assert str(caught.value) == (
        f"{POLICY}.tensor_model_parallel_size: 3 does not divide the model's 4 attention heads (4 = 2 x 2) and "
        "4 key-value heads (4 = 2 x 2); use 1, 2 or 4"
    )
    check_files(config(path, TWO))
    check_files(config(path, {**THREE, "trainer.strategy": "fsdp2"}))


FSDP2 = {"trainer.strategy": "fsdp2"}


def test_samples_of_models_that_carry_a_state_are_not_packed(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    other, plain = model(tmp_path / "other", layer_types=kinds), model(tmp_path / "plain", layer_types=kinds[1:])
    with pytest.raises(DataError) as caught:
        check_files(config(plain, {**FSDP2, "trainer.critic.model.path": str(other)}))
    assert str(caught.value) == (
        f"trainer.use_sample_packing: {other} (trainer.critic) has layers that may carry a state from one packed sample into the next "
        "(linear_attention); set it to false"
    )
    check_files(config(plain, FSDP2))
    check_files(config(model(tmp_path / "known", layer_types=kinds, model_type="qwen3_next"), FSDP2))
    check_files(config(other, {**FSDP2, "trainer.use_sample_packing": False}))


def test_targets_of_lora_are_weights_of_the_model(tmp_path: Path) -> None:
    small = model(tmp_path / "small")
    lora = {**FSDP2, "trainer.policy.model.lora.rank": 4}
    wrong = {**lora, "trainer.policy.model.lora.target_modules": ["q_prj"]}
    check_files(config(small, wrong))  # its weights are not here
    names = ["model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    save_file({f"{name}.weight": np.zeros((2, 2), np.float32) for name in names}, small / "model.safetensors")
    with pytest.raises(DataError) as caught:
        check_files(config(small, wrong))
    assert str(caught.value).startswith(
        f'trainer.policy.model.lora.target_modules: {small} has no weight with "q_prj" in its name; did you mean q_proj'
    )
    check_files(config(small, {**lora, "trainer.policy.model.lora.target_modules": ["q_proj", "self_attn.k_proj"]}))
    check_files(config(small, {**lora, "trainer.policy.model.lora.exclude_modules": ["k_proj", "lm_head"]}))
    with pytest.raises(DataError, match=r'lora\.exclude_modules: .* has no weight with "k_prj"'):
        check_files(config(small, {**lora, "trainer.policy.model.lora.exclude_modules": "k_prj"}))
    mixture = model(tmp_path / "mixture", moe_num_experts=8)
    save_file({"a.weight": np.zeros((2, 2), np.float32)}, mixture / "model.safetensors")
    check_files(config(mixture, wrong))


def test_fields_of_megatron_core_are_known_before_the_job(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    path, table = model(tmp_path / "model"), f"{POLICY}.optimizer_config_kwargs"
    with pytest.raises(DataError) as caught:
        check_files(
            config(path, {**ONE, f"{table}.optimizer_cpu_ofload": True, f"{POLICY}.transformer_config_kwargs.foo": 1})
        )
    assert str(caught.value).splitlines() == [
        f"{POLICY}.transformer_config_kwargs.foo: Megatron-core's TransformerConfig has no such field",
        f"{table}.optimizer_cpu_ofload: Megatron-core's OptimizerConfig has no such field; did you mean optimizer_cpu_offload?",
    ]
    check_files(
        config(path, {**ONE, f"{table}.optimizer_cpu_offload": True, f"{POLICY}.transformer_config_kwargs.fp16": False})
    )


def test_every_field_of_megatron_core_is_read_from_its_source() -> None:
    """The names that its source gives are those of the classes that the trainer fills."""
    optimizer = pytest.importorskip("megatron.core.optimizer").OptimizerConfig
    transformer = pytest.importorskip("megatron.core.transformer").TransformerConfig
    for kind, sources in ((transformer, "transformer_config_kwargs"), (optimizer, "optimizer_config_kwargs")):
        assert {each.name for each in fields(kind)} == field_names(SOURCES[sources])


def test_routers_are_asked_of_mixtures_only(tmp_path: Path) -> None:
    dense, mixture = model(tmp_path / "dense"), model(tmp_path / "mixture", moe_num_experts=8)
    balanced = {**FSDP2, "trainer.policy.experts.aux_loss_coef": 0.01}
    with pytest.raises(
        DataError, match=r"^trainer\.policy\.experts\.aux_loss_coef: .*dense is no mixture of experts; leave it out$"
    ):
        check_files(config(dense, balanced))
    check_files(config(mixture, balanced))


def test_what_the_run_changes_of_the_model_counts(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    changed = {f"{POLICY}.model_config_kwargs": {"num_attention_heads": 6, "num_key_value_heads": 3}}
    assert list(check_layouts(config(path, {**THREE, **changed, "trainer.algorithm.use_kl_loss": False}))) == []


def test_reference_and_critic_are_told_apart(tmp_path: Path) -> None:
    policy, ref, critic = (model(tmp_path / str(heads), num_attention_heads=heads) for heads in (4, 5, 7))
    named = {"trainer.ref.model.path": str(ref), "trainer.critic.model.path": str(critic)}
    first, second = check_layouts(config(policy, {**TWO, **named}))
    assert first.path == f"{REF}.tensor_model_parallel_size"
    assert first.message.startswith("2 does not divide the reference model's 5 attention heads")
    assert second.path == f"{POLICY}.tensor_model_parallel_size"
    assert second.message.startswith("2 does not divide the critic's 7 attention heads")
    assert list(check_layouts(config(policy, {**TWO, **named, "trainer.strategy": "fsdp2"}))) == []


def test_ranks_that_share_tokens_have_heads_each(tmp_path: Path) -> None:
    policy, few = model(tmp_path / "policy"), model(tmp_path / "few", num_attention_heads=2)
    four = {**FSDP2, "trainer.policy.sequence_parallel_size": 4, "trainer.placement.policy_num_gpus_per_node": 8}
    assert list(check_layouts(config(policy, four))) == []
    assert list(check_layouts(config("some/model", four))) == []
    (problem,) = check_layouts(config(few, four))
    assert problem.path == "trainer.policy.sequence_parallel_size"
    assert problem.message == (
        "in attention each of 4 ranks has query heads of its own, and the model has 2; use at most 2, best a divisor"
    )
    others = {
        "trainer.ref.model.path": str(few),
        "trainer.critic.model.path": str(few),
        "trainer.distillation.enable": True,
        "trainer.distillation.model_path": str(few),
        "trainer.distillation.placement.fsdp_size": 4,
        "trainer.distillation.placement.sequence_parallel_size": 4,
    }
    found = {problem.path: problem.message for problem in check_layouts(config(policy, {**four, **others}))}
    assert [message.partition(" and the ")[2].partition(" has")[0] for message in found.values()] == [
        "reference model",
        "critic",
        "teacher",
    ]
    assert list(found) == [
        "trainer.ref.sequence_parallel_size",
        "trainer.critic.sequence_parallel_size",
        "trainer.distillation.placement.sequence_parallel_size",
    ]


def test_ranks_share_the_experts_that_a_model_has(tmp_path: Path) -> None:
    dense, mixture = model(tmp_path / "dense"), model(tmp_path / "mixture", num_experts=6)
    size, four = "fsdp_config.expert_parallel_size", {**FSDP2, "trainer.placement.policy_num_gpus_per_node": 4}
    assert list(check_layouts(config(mixture, {**four, f"trainer.policy.{size}": 2}))) == []
    assert list(check_layouts(config("some/model", {**four, f"trainer.policy.{size}": 4}))) == []
    (problem,) = check_layouts(config(mixture, {**four, f"trainer.policy.{size}": 4}))
    assert problem.path == f"trainer.policy.{size}"
    assert problem.message == "4 does not divide the model's 6 experts (6 = 2 x 3); use 1, 2, 3 or 6"
    others = {
        **{f"trainer.{role}.model.path": str(dense) for role in ("ref", "critic")},
        "trainer.distillation.enable": True,
        "trainer.distillation.model_path": str(dense),
        "trainer.distillation.placement.fsdp_size": 2,
        **{f"trainer.{role}.{size}": 2 for role in ("policy", "ref", "critic", "distillation")},
    }
    found = {problem.path: problem.message for problem in check_layouts(config(mixture, {**four, **others}))}
    roles = {"ref": "reference model", "critic": "critic", "distillation": "teacher"}
    assert found == {
        f"trainer.{role}.{size}": f"the {whose} has no experts that 2 ranks could share; use 1"
        for role, whose in roles.items()
    }


def test_a_model_that_is_not_here_is_named_and_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    away = config("some/model", THREE)
    assert list(check_layouts(away)) == []
    (line,) = unchecked_models(away)
    assert line.startswith("some/model is not on this machine")
    assert "Megatron's ranks" in line
    (line,) = unchecked_models(config("some/model", {"trainer.strategy": "fsdp2"}))
    assert "`hf download some/model`" in line
    assert "Megatron" not in line


def test_a_model_in_the_cache_of_the_hub_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "models--some--model"
    folder = model(cached / "snapshots" / "1234")
    assert folder_of(Pretrained("some/model")) is None
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1234\n")
    assert folder_of(Pretrained("some/model")) == folder
    (line,) = unchecked_models(config("some/model", THREE))
    assert line.startswith("some/model is not on this machine; a node without a network"), "config.json alone"
    (folder / "model.safetensors").touch()
    assert list(unchecked_models(config("some/model", THREE))) == []
    assert len(list(check_layouts(config("some/model", THREE)))) == 1
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(cached.parent))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert folder_of(Pretrained("some/model")) == folder, "as the library reads its former name"
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", "")
    monkeypatch.setenv("HF_HUB_CACHE", "")
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "hub").rename(tmp_path / ".cache" / "huggingface" / "hub")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of(Pretrained("some/model")) is not None, "what is empty is not set"
    folder = tmp_path / ".cache" / "huggingface" / folder.relative_to(tmp_path)
    (folder / "config.json").write_text("no json")
    with pytest.raises(DataError, match=r"config.json: expected a JSON object"):
        entries_of(Pretrained("some/model"))


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[" * 100_000, '{"hidden_size": "64"}', '{"num_hidden_layers": 1000000000000}']
)
def test_a_config_of_another_shape_is_refused_at_submit(tmp_path: Path, text: str) -> None:
    path = model(tmp_path / "model")
    (path / "config.json").write_text(text)
    for settings in (TWO, FSDP2):
        with pytest.raises(DataError, match=r"model/config.json: .*expected"):
            check_files(config(path, settings))


def test_without_the_library_of_the_hub_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a login node that has only what commands need."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # what importlib takes for "there is none"
    assert not fetch_entries(Pretrained("org/model"))
