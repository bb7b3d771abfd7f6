"""Muon against torch's own on one rank, the same on two, in checkpoints, and as large as is estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hpcrl.config.sections.model import OptimizerConfig
from hpcrl.planning.memory import Weight, fsdp_state
from hpcrl.trainer.backends.fsdp.muon import Muon, matrices_of
from hpcrl.trainer.backends.fsdp.optimizer import make_adam, make_optimizer, make_step
from hpcrl.trainer.backends.orthogonal import orthogonal
from hpcrl.trainer.backends.reference import forget_moments
from hpcrl.trainer.distributed import World
from tests.planning.memory_scenarios import held_by
from tests.trainer.backends.muon_scenarios import matrices, stack
from tests.trainer.kernels.scenarios import stopped
from tests.trainer.material import run_of_two
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine

GROUPS = {
    "attention": {"match": "self_attn", "lr_factor": 0.5},
    "norms": {"match": "layernorm", "weight_decay": 0.0},
}
MUON = {"trainer": {"policy": {"optimizer_config": {"name": "Muon", "groups": GROUPS}}}, "micro": 4}


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8), (3, 4, 12)])
def test_singular_values_come_near_to_1_and_vectors_stay(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(1e3 * matrix).float()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.mT @ found @ right.mT
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < diagonal.min() <= diagonal.max() < 1.3
    assert (values - torch.diag_embed(diagonal)).abs().max() < 0.1
    assert not orthogonal(torch.zeros(shape)).any()


def test_steps_are_those_of_torch() -> None:
    """torch.optim.Muon with the same scale of updates for matrices, and AdamW for the rest."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.Linear(10, 4, bias=False))
    other = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.Linear(10, 4, bias=False))
    other.load_state_dict(layers.state_dict())
    config = OptimizerConfig(name="Muon", lr=0.02, weight_decay=0.1, muon_momentum=0.9)
    own = make_optimizer(layers, config)
    options = {"lr": 0.01, "weight_decay": 0.1}
    expected = [
        torch.optim.Muon([other[1].weight, other[2].weight], momentum=0.9, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW([other[0].weight, other[1].bias], **options),
    ]
    for step in range(4):
        ids, wanted = torch.randint(7, (16,)), torch.randn(16, 4)
        for each in (layers, other):
            (each(ids) - wanted).square().mean().backward()
        make_step(own, 0.01)
        for each in expected:
            each.step()
        for name, value in layers.named_parameters():
            torch.testing.assert_close(value, other.get_parameter(name), rtol=0, atol=1e-4, msg=f"{name}, step {step}")
        for each in (layers, other):
            each.zero_grad()


def test_matrices_are_those_of_hidden_layers(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    names = {name for name, each in model.named_parameters() if each in matrices_of(model)}
    assert {name.split(".")[-2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert {name for name, each in model.named_parameters() if Weight(name, tuple(each.shape)).moved_by_muon} == names


def test_ranks_that_share_matrices_compute_them_whole(two: Ranks, tmp_path: Path) -> None:
    two.play([("backends.muon_scenarios:sharded", {"out": str(tmp_path / "parts")})])
    parts = json.loads((tmp_path / "parts").read_text())
    for place, matrix in enumerate(matrices()):
        pieces = [torch.tensor(each[place]) for each in parts]
        found = torch.cat([piece for piece in pieces if piece.numel()], matrix.ndim - 2)
        torch.testing.assert_close(found, orthogonal(matrix.bfloat16()).float(), rtol=0, atol=0)


def test_ranks_that_share_experts_compute_their_own(two: Ranks, tmp_path: Path) -> None:
    two.play([("backends.muon_scenarios:experts", {"out": str(tmp_path / "parts")})])
    found = torch.tensor([part for (part,) in json.loads((tmp_path / "parts").read_text())]).flatten(0, 1)
    torch.testing.assert_close(found, orthogonal(stack()).float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layer", "moments"),
    [
        (nn.Sequential(nn.Linear(6, 5, bias=False)), {"momentum_buffer"}),
        (nn.LayerNorm(6), {"step", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_matrices_or_the_rest_can_be_all_that_is_trained(layer: nn.Module, moments: set[str]) -> None:
    optimizer = make_optimizer(layer, OptimizerConfig(name="Muon"))
    before = [each.detach().clone() for each in layer.parameters()]
    layer(torch.randn(3, 6)).square().sum().backward()
    make_step(optimizer, 0.1)
    assert {name for state in optimizer.state.values() for name in state} == moments
    assert all((now != then).any() for now, then in zip(layer.parameters(), before, strict=True))


def test_what_muon_moves_no_more_is_restored_with_new_moments(model_path: Path, alone: World, tmp_path: Path) -> None:
    """An earlier version of hpcrl moved all matrices by Muon that are no embedding, such as what stands before the layers: here the embedding."""
    saves, resumed = (make_engine(alone, str(model_path), MUON) for _ in range(2))
    own, moved = saves._optimizer, matrices_of(saves._model.model)
    embedding = saves._model.model.get_input_embeddings().weight
    groups = [{"params": [*moved, embedding], "lr_factor": 1.0, "weight_decay": 0.0}]
    rest = [each for each in saves._model.parameters() if each not in moved and each is not embedding]
    saves._optimizer = Muon(groups, make_adam([groups[0] | {"params": rest}], saves._optimizer_config), 0.95)
    assert type(own) is Muon
    for each in saves._model.parameters():
        each.grad = torch.ones_like(each)
    saves.schedule(2)
    saves.step()
    saves.save(tmp_path, torch.distributed.group.WORLD)  # pyright: ignore[reportArgumentType]
    resumed.restore(tmp_path)
    assert resumed.updates == 1
    others = dict(saves._model.named_parameters())
    for name, each in resumed._model.named_parameters():
        torch.testing.assert_close(each, others[name], rtol=0, atol=0)
        state, saved = resumed._optimizer.state[each], saves._optimizer.state[others[name]]
        if others[name] is embedding:
            assert {"exp_avg": 0.0, "step": 0.0}.items() <= {
                key: float(value.abs().sum()) for key, value in state.items()
            }.items()
            continue
        assert state.keys() == saved.keys()
        assert all(torch.equal(state[key], saved[key]) and saved[key].any() for key in saved), name


def test_updates_take_the_memory_of_gradients() -> None:
    layer = nn.Linear(6, 5, bias=False)
    layer(torch.randn(3, 6)).square().sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    before = gradient.clone()
    make_step(make_optimizer(nn.Sequential(layer), OptimizerConfig(name="Muon")), 0.1)
    assert (gradient != before).all()


def test_a_run_goes_on_on_fewer_ranks(model_path: Path, alone: World, two: Ranks, tmp_path: Path) -> None:
    run = str(run_of_two(tmp_path / "run", 4, 3).path)
    (tmp_path / "saved").mkdir()

    def options(out: str, **more: Any) -> dict[str, Any]:
        places = {"model": str(model_path), "run": run, "saved": str(tmp_path / "saved"), "out": str(tmp_path / out)}
        return {**MUON, **places, **more}

    again = ("kernels.scenarios:stopped", options("again", restores=True))
    two.play([("kernels.scenarios:stopped", options("first")), again])
    stopped(alone, options("alone", restores=True))
    first, again, fewer = (json.loads((tmp_path / out).read_text()) for out in ("first", "again", "alone"))
    for other, near in ((again, 1e-6), (fewer, 1e-4)):
        assert [one["final_loss"] for one in other] == pytest.approx([one["final_loss"] for one in first], abs=near)
    engine = make_engine(alone, str(model_path), MUON)
    engine.restore(tmp_path / "saved")
    momenta = [state["momentum_buffer"] for state in engine._optimizer.state.values() if "momentum_buffer" in state]
    assert momenta
    assert all(each.any() for each in momenta)
    forget_moments(engine._optimizer)
    assert not any(each.any() for each in momenta)


def test_memory_is_what_is_estimated(model_path: Path, alone: World) -> None:
    found = held_by(make_engine(alone, str(model_path), MUON))
    model = AutoModelForCausalLM.from_pretrained(model_path)
    shapes = [Weight(name, tuple(each.shape)) for name, each in model.named_parameters()]
    need, adam = (fsdp_state(shapes, 1, "fp32", muon=muon) for muon in (True, False))
    assert found["optimizer"] == need.optimizer < adam.optimizer
