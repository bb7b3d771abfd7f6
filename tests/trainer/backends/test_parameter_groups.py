"""Groups of parameters: by which names, with which learning rate and weight decay, and for which optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpcrl.config import TrainerConfig
from hpcrl.config.sections.model import OptimizerConfig
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.trainer.backends.fsdp.engine import FsdpCritic
from hpcrl.trainer.backends.fsdp.optimizer import make_optimizer, make_step
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.parameter_groups import parameter_groups
from tests.trainer.scenarios import make_engine

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "model.layers.0.self_attn.q_proj.lora_B.default.weight",
    "model.layers.11.mlp.experts.base_layer.lora_B.default.weight",
]


def optimizer(groups: dict[str, Any], **options: Any) -> OptimizerConfig:
    return build(OptimizerConfig, {"groups": groups, **options})


def test_names_are_those_of_files() -> None:
    settings = optimizer(
        {
            "B": {"match": r"\.lora_B\.weight$", "lr_factor": 16.0},
            "embedding": {"match": r"^model\.embed_tokens", "weight_decay": 0.0},
        },
        weight_decay=0.1,
    )
    rest, adapters, embedding = parameter_groups(NAMES, settings, "trainer.policy")
    assert (rest.names, rest.lr_factor, rest.weight_decay) == ({NAMES[1]}, 1.0, 0.1)
    assert (adapters.names, adapters.lr_factor, adapters.weight_decay) == ({*NAMES[2:]}, 16.0, 0.1)
    assert (embedding.names, embedding.lr_factor, embedding.weight_decay) == ({NAMES[0]}, 1.0, 0.0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"head": {"match": "lm_head"}},
            'trainer.critic.optimizer_config.groups.head.match "lm_head" finds no trained parameter; these are trained: '
            "model.embed_tokens.weight, model.layers.N.self_attn.q_proj.lora_A.weight, "
            "model.layers.N.self_attn.q_proj.lora_B.weight, model.layers.N.mlp.experts.lora_B.weight",
        ),
        (
            {"all": {"match": "model"}, "B": {"match": "lora_B"}},
            'groups.B.match "lora_B" finds model.layers.0.self_attn.q_proj.lora_B.weight, which is in the group all too',
        ),
    ],
)
def test_a_pattern_finds_something_that_no_other_finds(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        parameter_groups(NAMES, optimizer(groups), "trainer.critic")
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Muon"])
def test_steps_are_those_of_torch_with_groups(name: str) -> None:
    torch.manual_seed(1)
    layers, other = (nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4), nn.Linear(4, 4)) for _ in range(2))
    other.load_state_dict(layers.state_dict())
    groups = {
        "first": {"match": r"^0\.", "lr_factor": 0.5},
        "biases": {"match": r"[12]\.bias$", "weight_decay": 0.0},
        "fixed": {"match": r"^2\.weight", "lr_factor": 0.0},
    }
    own = make_optimizer(layers, optimizer(groups, name=name, lr=0.02, weight_decay=0.1, muon_momentum=0.9))
    first, second, third = other
    expected: list[torch.optim.Optimizer] = []
    decays = {"lr": 0.01, "weight_decay": 0.1}
    matrices = [{"params": [first.weight], "lr": 0.005}, {"params": [second.weight]}]
    rest = [{"params": [first.bias], "lr": 0.005}, {"params": [second.bias, third.bias], "weight_decay": 0.0}]
    if name == "Muon":
        expected.append(torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn="match_rms_adamw", **decays))
    else:
        rest += matrices
    expected.append((torch.optim.Adam if name == "Adam" else torch.optim.AdamW)(rest, **decays))
    fixed = third.weight.detach().clone()
    for step in range(4):
        x = torch.randn(16, 6)
        for each in (layers, other):
            each.zero_grad()
            each(x).square().mean().backward()
        make_step(own, 0.01)
        for each in expected:
            each.step()
        for parameter, value in layers.named_parameters():
            wanted = other.get_parameter(parameter)
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-4, msg=f"{parameter}, step {step}")
    assert torch.equal(layers[2].weight, fixed)


def test_adapters_and_critics_have_groups_too(model_path: Any, alone: World) -> None:
    settings = {"optimizer_config": {"groups": {"B": {"match": "lora_B", "lr_factor": 16.0}}}}
    adapted = {"trainer": {"policy": settings | {"model": {"lora": {"rank": 2}}}}}
    engine = make_engine(alone, str(model_path), adapted)
    names = {id(each): name for name, each in engine._model.model.named_parameters()}
    rest, second = ([names[id(each)] for each in group["params"]] for group in engine._optimizer.param_groups)
    assert second == [name for name in names.values() if ".lora_B." in name]
    assert rest == [name for name in names.values() if ".lora_A." in name]
    path = str(model_path)
    trainer = build(
        TrainerConfig, {"policy": {"model": {"path": path}}, "critic": settings | {"model": {"path": path}}}
    )
    with pytest.raises(
        DataError, match=r'trainer\.critic\.optimizer_config\.groups\.B\.match "lora_B".*: embed_tokens'
    ):
        FsdpCritic(trainer, alone)
