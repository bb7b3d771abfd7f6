"""The contract of the engine seam: however ranks share a model, and whichever engine trains it, it is the same training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("megatron.core")

from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from hpcrl.run.layout import Run
from tests.trainer.material import VOCABULARY, expect_same_metrics, make_batch, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over

Way = dict[str, Any]

_SHARED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS = {
    "tied": Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=4, tie_word_embeddings=True, **_SHARED),
    # a vocabulary that two ranks cannot share without padding
    "untied": Qwen3Config(vocab_size=VOCABULARY + 1, num_hidden_layers=4, head_dim=16, **_SHARED),
    "moe": Qwen3MoeConfig(vocab_size=VOCABULARY, num_hidden_layers=2, head_dim=16, **_EXPERTS, **_SHARED),
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
VPP = PP2 | {"pipeline_schedule": "Interleaved1F1B", "pipeline_layers_per_stage": 1}
ETP1 = {"expert_tensor_parallel_size": 1}
WHOLE = {"optimizer_config_kwargs": {"use_distributed_optimizer": False}}


class Seam:
    """Ranks of all sizes, the material of the tests and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = {size: Ranks(_made(folder / f"ranks-{size}"), size) for size in (1, 2, 4)}
        for name, config in MODELS.items():
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # norms and biases that are all alike would hide what is mixed up
                        parameter.add_(0.2 * torch.randn_like(parameter))
            model.save_pretrained(folder / name)
        self.run = make_run(folder / "run")
        for step in (1, 2):
            make_batch(self.run, step, 4, 3)

    def way(self, name: str, model: str, trainer: Mapping[str, Any], do: list[Any] | None = None, **more: Any) -> Way:
        paths = {part: {"model": {"path": str(self.folder / model)}} for part in ("policy", *(["critic"] if more.get("critic") else []))}
        return {
            "out": str(self.folder / f"{name}.{model}"),
            "run": str(self.run.path),
            "trainer": laid_over(paths, dict(trainer)),
            "do": do or [("train", 1), ("train", 2)],
            **more,
        }

    def play(self, size: int, ways: list[Way]) -> None:
        self.ranks[size].play([("megatron.parity:play", {"ways": ways})])

    def told(self, way: Way) -> Told:
        out = Path(way["out"])
        samples = sorted(out.parent.glob(f"{out.name}.*.samples"))
        return Told(
            json.loads(Path(f"{out}.json").read_text()),
            load_file(out),
            {name: value for path in samples for name, value in load_file(path).items()},
        )

    def close(self) -> None:
        for ranks in self.ranks.values():
            ranks.close()


@dataclass(frozen=True)
class Told:
    told: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    samples: dict[str, torch.Tensor]


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def megatron(**options: Any) -> dict[str, Any]:
    """Return the trainer's section with options of megatron_config; the reference is laid out as the policy."""
    ref = {name: value for name, value in options.items() if name not in ("optimizer_config_kwargs", "ddp_config")}
    return {"strategy": "megatron", "policy": {"megatron_config": options}, "ref": {"megatron_config": ref}}


def expect_same(found: Told, expected: Told, bound: float = 1e-5) -> None:
    assert found.told["error"] == ""
    for own, other in zip(found.told["updates"], expected.told["updates"], strict=True):
        expect_same_metrics(own, other, absolute=bound, relative=bound)
    for own, other in ((found.tensors, expected.tensors), (found.samples, expected.samples)):
        assert own.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(own[name], value, atol=bound, rtol=bound, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def seam(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seam]:
    seam = Seam(tmp_path_factory.mktemp("seam"))
    yield seam
    seam.close()


@pytest.fixture(scope="module")
def truth(seam: Seam) -> dict[str, Told]:
    """What one rank of FSDP2 makes of each model."""
    ways = {name: seam.way("truth", name, {}) for name in MODELS}
    seam.play(1, list(ways.values()))
    return {name: seam.told(way) for name, way in ways.items()}


# per number of ranks: name, megatron's options, models
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], list[str]]]] = {
    1: [("alone", {}, ["tied", "untied", "moe"])],
    2: [
        ("tp2", TP2, ["tied", "untied", "moe"]),
        ("pp2", PP2, ["tied", "untied", "moe"]),
        ("vpp2", VPP, ["tied", "untied"]),
        ("dp2", {}, ["tied", "moe"]),
        ("dp2-whole", WHOLE, ["tied"]),
        ("cp2", CP2, ["tied", "moe"]),
        ("ep2", EP2, ["moe"]),
    ],
    4: [
        ("tp2-dp2", TP2, ["tied"]),
        ("tp2-pp2", TP2 | PP2, ["tied", "moe"]),
        ("cp2-pp2", CP2 | PP2, ["tied"]),
        ("ep2-tp2", EP2 | TP2 | ETP1, ["moe"]),
    ],
}


LAYOUT_CASES = [(size, name, model) for size, rows in LAYOUTS.items() for name, _, models in rows for model in models]


@pytest.fixture(scope="module")
def laid_out(seam: Seam, truth: dict[str, Told]) -> Callable[[int], dict[tuple[str, str], Way]]:
    @cache
    def play(size: int) -> dict[tuple[str, str], Way]:
        ways = {
            (name, model): seam.way(name, model, megatron(**options))
            for name, options, models in LAYOUTS[size]
            for model in models
        }
        seam.play(size, list(ways.values()))
        return ways

    return play


@pytest.mark.parametrize(("size", "name", "model"), LAYOUT_CASES)
def test_every_layout_trains_alike(seam: Seam, truth: dict[str, Told], laid_out: Any, size: int, name: str, model: str):
    expect_same(seam.told(laid_out(size)[name, model]), truth[model])
