"""Tiny models, ranks of all sizes, and what engines of both kinds tell after the same training (parity.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.trainer.backends.megatron.material import EXPERTS, SHARED
from tests.trainer.material import VOCABULARY, expect_same_metrics, make_batch, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over

Way = dict[str, Any]

MODELS = {
    "tied": Qwen2Config(**SHARED | {"vocab_size": VOCABULARY, "tie_word_embeddings": True}),
    # a vocabulary that two ranks cannot share without padding
    "untied": Qwen3Config(**SHARED | {"vocab_size": VOCABULARY + 1, "head_dim": 16}),
    "moe": Qwen3MoeConfig(
        **SHARED | EXPERTS | {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 16, "norm_topk_prob": True}
    ),
}


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
            make_batch(self.run, step, 4, 3, masked=True, routed=True)

    def way(self, name: str, model: str, trainer: Mapping[str, Any], do: list[Any] | None = None, **more: Any) -> Way:
        paths = {
            part: {"model": {"path": str(self.folder / model)}}
            for part in ("policy", *(["critic"] if more.get("critic") else []))
        }
        return {
            "out": str(self.folder / f"{name}.{model}"),
            "run": str(self.run.path),
            "trainer": laid_over(paths, dict(trainer)),
            "do": do or [("train", 1), ("train", 2)],
            **more,
        }

    def play(self, size: int, ways: list[Way]) -> None:
        self.ranks[size].play([("backends.megatron.parity:play", {"ways": ways})])

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

    def from_step_2(self) -> Told:
        """Return what a run tells that begins there."""
        told = self.told | {"updates": self.told["updates"][2:]}
        tensors = {name: value for name, value in self.tensors.items() if not name.startswith("1.")}
        return Told(told, tensors, {name: value for name, value in self.samples.items() if not name.startswith("1.")})


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def megatron(**options: Any) -> dict[str, Any]:
    """Return the trainer's section with options of megatron_config; the reference is laid out as the policy."""
    trained = ("optimizer_config_kwargs", "ddp_config", "lora_type")
    ref = {name: value for name, value in options.items() if name not in trained}
    return {"strategy": "megatron", "policy": {"megatron_config": options}, "ref": {"megatron_config": ref}}


def expect_same(found: Told, expected: Told, bound: float = 1e-5) -> None:
    assert found.told["error"] == ""
    assert found.told["done"] == expected.told["done"]
    for own, other in zip(found.told["updates"], expected.told["updates"], strict=True):
        expect_same_metrics(own, other, absolute=bound, relative=bound)
    for own, other in ((found.tensors, expected.tensors), (found.samples, expected.samples)):
        assert own.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(
                own[name], value, atol=bound, rtol=bound, msg=lambda text, name=name: f"{name}: {text}"
            )
