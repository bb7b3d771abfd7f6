"""LoRA of Cosmos-RL: its settings go through the converter, and its layers get adapters as the trainer's do."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from hpcrl.config.sections.model import LoraConfig
from hpcrl.trainer.models.lora import adapted_layers, add_adapters, is_of_adapter, merging, own_name
from tests.golden.adapters.converted import cosmos
from tests.golden.case import Case

_SETTINGS = "policy.lora."
_WITH_LORA = {f"{_SETTINGS}target_modules": "all-linear", "train.compile": False, "policy.parallelism.tp_size": 1}


class _Layers(nn.Module):
    """What the trainer asks of a model: its head and its device."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            parent, _, own = name.rpartition(".")
            below = any(other.startswith(f"{name}.") for other in names)
            layer = nn.Module() if below else nn.LayerNorm(2) if own == "norm" else nn.Linear(3, 2)
            self.get_submodule(parent).add_module(own, layer)

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "lm_head", None)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def injected(case: Case) -> dict[str, Any]:
    model, lora = _Layers([name for name in case.inputs["module_names"] if name]), _lora(case)
    _add(model, lora)
    layers = list(adapted_layers(model))
    alphas = {layer.name: layer.scaling * layer.rank for layer in layers}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "replaced": [layer.name for layer in layers],
        "ranks": {layer.name: [layer.rank, alphas[layer.name]] for layer in layers},
        "trainable": [name.replace(".default.", ".") if is_of_adapter(name) else own_name(name) for name in trained],
    }


def linear(case: Case) -> dict[str, Any]:
    given = {name: torch.tensor(value) for name, value in case.inputs.items()}
    model = _Layers(["layer"])
    layer = cast("nn.Linear", model.get_submodule("layer"))
    layer.weight.data, layer.bias.data = given["W"], given["b"]
    _add(model, _lora(case))
    (adapted,) = adapted_layers(model)
    adapted.A.data, adapted.B.data = given["A"], given["B"]
    wrapped = model.get_submodule("layer")
    return {
        "y": wrapped(given["x"]),
        "merged_weight": merging(wrapped, lambda whole: whole)(layer.weight),
        "scaling": adapted.scaling,
        "unmerged_equal": torch.equal(layer.weight, given["W"]),
    }


def _lora(case: Case) -> LoraConfig:
    given = {f"{_SETTINGS}{name}": value for name, value in case.params.items()}
    return cosmos({**_WITH_LORA, **given}).trainer.policy.model.lora


def _add(model: _Layers, lora: LoraConfig) -> None:
    add_adapters(cast("Any", model), lora, "trainer.policy", torch.float32, seed=0)


ADAPTERS = {"inject_lora_adapters": injected, "LoraInjectedLinear": linear}
