"""What ranks play that share the experts of each layer."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.sharding import local
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.experts.parallel import expert_layers, share_experts
from hpcrl.trainer.saving.publish import Publisher
from tests.planning.memory_scenarios import held
from tests.trainer.scenarios import make_engine, parameters, train_steps

TOKENS, CHOSEN = 9, 2
SHARED: dict[str, Any] = {"expert_parallel_size": 2}
APART: dict[str, Any] = {}


def lives(world: World, options: dict[str, Any]) -> None:
    """Train with experts that ranks share, go on without, and with them again, each from the checkpoint of the one before."""
    run, out, engine = Run.open(options["run"]), Path(options["out"]), None
    told: dict[str, Any] = {}
    for step, fsdp in enumerate((SHARED, APART, SHARED), 1):
        policy = {**options["policy"], "fsdp_config": fsdp}
        engine = make_engine(world, options["model"], {"trainer": {"policy": policy, "ref": {"fsdp_config": fsdp}}})
        if step > 1:
            engine.restore(out / f"s{step - 1}")
            told[f"restored {step - 1}"] = published(engine, out / f"restored{step}", world)
        else:
            experts = engine._model.model.get_submodule("model.layers.0.mlp.experts").parameters()
            told["shapes"] = [list(local(parameter).shape) for parameter in experts]
            told["bytes"] = held(engine._model.parameters())
        train_steps(engine, run, range(step, step + 1), {"micro": 2})
        (out / f"s{step}").mkdir(exist_ok=True)
        engine.save(out / f"s{step}", world.control)
        told[f"trained {step}"] = published(engine, out / f"trained{step}", world)
    assert engine is not None
    values = parameters(engine)
    if world.first:
        (out / "lives.json").write_text(json.dumps(told))
        save_file(values, out / "lives.safetensors")


def published(engine: Any, path: Path, world: World) -> dict[str, str]:
    """Return the digests of all tensors of a version of the weights."""
    if world.first:
        path.mkdir()
        (path / "config.toml").touch()
    world.barrier()
    run = Run.open(path)
    Publisher(run, 0, world, torch.float32, kept_versions=2).publish(engine, 1)
    return PublishedWeights.read(run.weights_of(1)).tensors


def layers(world: World, options: dict[str, Any]) -> None:
    """Compute with a layer of experts that ranks share, and with all of it; each rank has tokens of its own."""
    mesh = DeviceMesh("cpu", list(range(world.size)), mesh_dim_names=("experts",))
    for family, sizes in options["families"].items():
        for way in ("grouped_mm", "eager"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
            model.set_experts_implementation(way)
            layer: Any = expert_layers(model, world.size)[0]
            for at, parameter in enumerate(layer.parameters()):
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(at))
            part: Any = deepcopy(layer)
            share_experts(part, mesh)
            for to_one_rank in (False, True):
                compared(layer, part, world, to_one_rank=to_one_rank)


def compared(layer: Any, part: Any, world: World, *, to_one_rank: bool) -> None:
    """Compare outputs and gradients.

    Args:
        to_one_rank: all tokens go to experts of the first rank, so that others have none.
    """
    count, size = layer.num_experts, world.size
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(size, TOKENS, columns(layer), generator=draw)
    reached = count // size if to_one_rank else count
    experts = torch.rand(size, TOKENS, reached, generator=draw).argsort(-1)[..., :CHOSEN]
    scores, weights = torch.rand(size, TOKENS, CHOSEN, generator=draw), torch.randn(hidden.shape, generator=draw)
    found = []
    for module, of in ((layer, slice(None)), (part, slice(world.rank, world.rank + 1))):
        module.zero_grad()
        inputs = [values[of].flatten(0, 1).clone().requires_grad_() for values in (hidden, scores)]
        outputs = module(inputs[0], experts[of].flatten(0, 1), inputs[1])
        (outputs * weights[of].flatten(0, 1)).sum().backward()
        found.append([outputs.detach(), *(values.grad for values in inputs)])
    for whole, own in zip(*found, strict=True):
        torch.testing.assert_close(own, whole.unflatten(0, (size, TOKENS))[world.rank], atol=1e-5, rtol=1e-5)
    for whole, own in zip(layer.parameters(), part.parameters(), strict=True):
        expected = whole.grad.chunk(size)[world.rank]
        assert expected.any() or (to_one_rank and world.rank)
        torch.testing.assert_close(local(own.grad), expected, atol=1e-5, rtol=1e-5)


def columns(layer: Any) -> int:
    """Return the columns of a token."""
    down = layer.down_proj.shape
    return down[2] if layer.is_transposed else down[1]
