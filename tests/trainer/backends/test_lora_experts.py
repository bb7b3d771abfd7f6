"""LoRA on the experts of a mixture, on FSDP2: it is what PEFT and transformers compute, in training and with what is exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hpcrl.config.sections.model import LoraConfig, Pretrained
from hpcrl.errors import DataError
from hpcrl.trainer.backends.fsdp.sharding import units
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.lora import add_adapters, gather_adapter
from tests.trainer import scenarios
from tests.trainer.backends.test_engine import GROUPS, SIZE, AdamW, expect_same, true
from tests.trainer.backends.test_lora import ONLY_ADAPTERS, SEED, TwoThenOne, with_lora
from tests.trainer.material import VOCABULARY, run_of_two
from tests.trainer.ranks import Ranks

ALL: dict[str, Any] = {"rank": 4, "target_parameters": ["experts"]}
SOME: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "use_rslora": True,
    "target_modules": [],
    "target_parameters": ["experts.gate_up_proj", "layers.0.mlp.experts.down_proj"],
    "exclude_modules": "layers.1",
    "rank_pattern": {"experts.gate_up_proj": 2},
    "alpha_pattern": {"experts.down_proj": 3.0},
    "init_method": "gaussian",
}
BESIDE: dict[str, Any] = {"rank": 4}
EPS = 1e-3  # Adam makes whole steps of gradients that are no more than rounding, but for this
OURS = {"all": ALL, "some": SOME, "beside": BESIDE}
THEIRS = {
    "all": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "beside": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "some": {
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"],
        "rank_pattern": {"experts.gate_up_proj": 2},
        "alpha_pattern": {"experts.down_proj": 3.0},
    },
}  # fmt: skip
TWO = {
    "all-two-ranks": with_lora(ALL, 2, gradient_checkpointing=True),
    "beside-experts-that-ranks-share": with_lora(
        BESIDE, 2, policy={"fsdp_config": {"expert_parallel_size": 2}, "optimizer_config": {"eps": EPS}}
    ),
    "some-two-ranks": with_lora(SOME, 1, policy={"fsdp_config": {"wrap_policy": {"min_num_params": 2000}}}),
}


def write_mixture(path: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        **changes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, mixture: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("experts")
    run = run_of_two(path / "run", GROUPS, SIZE)
    options = {"model": str(mixture), "run": str(run.path), "out": str(path)}
    scenarios.variants(alone, {**options, "variants": {"all": with_lora(ALL)}})
    two.play([("scenarios:variants", {**options, "variants": TWO})])
    return path


def peft_config(kind: str) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 16, **THEIRS[kind]})


def adapt(kind: str, model: torch.nn.Module) -> None:
    """Give a model PEFT's adapters, with the first values that ours have."""
    peft.inject_adapter_in_model(peft_config(kind), model)
    own = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)  # pyright: ignore[reportAttributeAccessIssue]
    add_adapters(own, LoraConfig(**OURS[kind]), "trainer.policy", torch.float32, SEED)
    drawn = {name: value for name, value in own.state_dict().items() if ".lora_" in name}
    missing, unexpected = model.load_state_dict(drawn, strict=False)
    assert not unexpected
    assert not [name for name in missing if ".lora_" in name]


@pytest.mark.parametrize("name", ["all", *TWO])
def test_every_way_is_what_peft_computes(results: Path, mixture: Path, name: str) -> None:
    kind = name.partition("-")[0]
    optimizer = partial(AdamW, eps=EPS) if kind == "beside" else AdamW
    truth = true(results, mixture, frozen=ONLY_ADAPTERS, adapt=partial(adapt, kind), optimizer=optimizer)
    assert any("experts" in name for name in truth.gradients) == (kind != "beside")
    expect_same(results, truth, name)


@pytest.mark.parametrize(
    "lora", [ALL, pytest.param({**SOME, "init_method": "pissa"}, marks=pytest.mark.faults_slow)], ids=["all", "some"]
)
def test_checkpoints_hold_adapters_and_peft_computes_the_same_with_an_export(
    mixture: Path, tmp_path: Path, alone: World, two: Ranks, lora: dict[str, Any]
) -> None:
    trainer = {"policy": {"model": {"lora": lora}}, "algorithm": {"use_kl_loss": True}}
    found = TwoThenOne.trained(mixture, tmp_path, alone, two, trainer, most=1e-5)
    tensors = found.saved("model.")
    assert any(".experts." in name for name in tensors)
    assert all(".lora_" in name for name in tensors)


@pytest.mark.parametrize("method", ["olora", "pissa", "xavier"])
def test_a_policy_begins_as_the_model(mixture: Path, method: Any) -> None:
    ours = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    token_ids = torch.tensor([[4, 9, 2, 7]])
    with torch.no_grad():
        before = ours(token_ids).logits
        add_adapters(ours, LoraConfig(**{**ALL, "init_method": method}), "trainer.policy", torch.float32, SEED)
        torch.testing.assert_close(ours(token_ids).logits, before, atol=1e-5, rtol=1e-5)


def test_a_run_begins_with_given_adapters(mixture: Path, tmp_path: Path) -> None:
    model, ours = (AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32) for _ in range(2))
    add_adapters(model, LoraConfig(**SOME), "trainer.policy", torch.float32, SEED)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    gather_adapter(model, LoraConfig(**SOME), Pretrained(str(mixture)), lambda parameter: parameter).write(tmp_path)
    given = {**SOME, "alpha": 5.0, "alpha_pattern": {}, "use_rslora": False, "adapter_path": str(tmp_path)}
    add_adapters(ours, LoraConfig(**given), "trainer.policy", torch.float32, SEED)
    token_ids = torch.tensor([[4, 9, 2, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours(token_ids).logits, model(token_ids).logits, atol=1e-6, rtol=1e-5)


def test_dense_layers_beside_experts_are_adapted(tmp_path: Path) -> None:
    """PEFT takes their names for those of experts in files of transformers before version 5."""
    model = AutoModelForCausalLM.from_pretrained(write_mixture(tmp_path / "mixed", mlp_only_layers=[1]))
    add_adapters(model, LoraConfig(rank=4), "trainer.policy", torch.float32, SEED)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if ".lora_A." in name}
    assert shapes["model.layers.1.mlp.gate_proj.lora_A.default.weight"] == (4, 32)
    assert not [name for name in shapes if "experts" in name]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_parameters": ["expert_s"]}, 'target_parameters "expert_s": the model has no parameter of experts with that in its name'),
        ({**ALL, "target_modules": [], "exclude_modules": "experts"}, "exclude_modules and modules_to_save leave no module to adapt"),
    ],
)  # fmt: skip
def test_names_that_find_nothing(mixture: Path, lora: dict[str, Any], said: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture)
    with pytest.raises(DataError, match=said):
        add_adapters(model, LoraConfig(**{"rank": 2, **lora}), "trainer.policy", torch.float32, SEED)


def test_adapted_experts_are_no_unit_of_their_own(mixture: Path) -> None:
    """Their adapter reads them before it calls them."""
    model = AutoModelForCausalLM.from_pretrained(mixture)
    add_adapters(model, LoraConfig(**ALL), "trainer.policy", torch.float32, SEED)
    with pytest.raises(DataError, match="Qwen3MoeExperts cannot be a unit; name what lies around it"):
        units(model, {"transformer_layer_cls_to_wrap": ["Qwen3MoeExperts"]})
