"""Weights between Hugging Face files and megatron's parameters, under real torchrun: bit by bit, however ranks share the model."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("megatron.core")

from hpcrl.trainer.models.hf import CriticSource
from tests.trainer.backends.megatron.material import CONFIGS, write_model
from tests.trainer.launcher import run_ranks

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2}, {"cp": 2}],
    4: [
        {"tp": 2, "pp": 2},
        {"tp": 4},  # more ranks than groups of queries
        {"ep": 2, "pp": 2},
        {"ep": 2, "tp": 2, "etp": 2},
        {"ep": 4, "tp": 2, "etp": 1},
    ],
}

RANKS = [1, 2, pytest.param(4, marks=pytest.mark.faults_slow)]

Told = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        write_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def told_by(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Told]]:
    """What the scenarios of so many ranks wrote, by name of the file."""

    @functools.cache
    def play(ranks: int) -> dict[str, Told]:
        out, layouts = tmp_path_factory.mktemp(f"told-by-{ranks}"), LAYOUTS[ranks]
        whole = [layout for layout in layouts if layout.keys().isdisjoint({"pp", "cp"})]
        todo: list[tuple[str, Told]] = [
            ("round_trip", {"layouts": layouts, "out": f"{out}/round-trip"}),
            ("logits", {"layouts": whole, "out": f"{out}/logits"}),
        ]
        if ranks == 2:
            todo += two_ranks(models, out)
        given = json.dumps([[name, {"models": str(models), **options}] for name, options in todo])
        result = run_ranks(ranks, given, script="trainer/backends/megatron/weights_scenarios.py")
        assert result.returncode == 0, result.stderr
        return {path.name: json.loads(path.read_text()) for path in out.iterdir() if path.is_file()}

    return play


@pytest.fixture(scope="module")
def told(told_by: Callable[[int], dict[str, Told]]) -> dict[str, Told]:
    return told_by(2)


def two_ranks(models: Path, out: Path) -> list[tuple[str, Told]]:
    critics = {"fresh": str(models / "qwen2-tied"), "saved": str(saved_critic(models, out / "critic"))}
    return [
        ("cast", {"layout": {"pp": 2}, "out": f"{out}/cast"}),
        ("critic", {"layouts": [{"tp": 2}, {"pp": 2}], "out": f"{out}/critics", **critics}),
        ("refused", {"layout": {"pp": 2}, "models": broken(models, out), "out": f"{out}/refused"}),
        ("freezing", {"layout": {"pp": 2}, "cases": FREEZING, "out": f"{out}/freezing"}),
    ]


def saved_critic(models: Path, target: Path) -> Path:
    """Write a critic as transformers save it: a body without prefix, and its head."""
    source = CriticSource(path=str(models / "qwen2-tied"), role="trainer.critic", head="score", seed=9)
    source.whole(torch.float32, "sdpa").save_pretrained(target)
    return target


def changed(models: Path, target: Path, name: str, tensors: dict[str, torch.Tensor | None]) -> list[str]:
    """Write a copy of a model with other tensors, or (None) without them; return its name and place."""
    shutil.copytree(models / name, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for tensor, value in tensors.items():
        file = target / index["weight_map"].get(tensor, next(iter(index["weight_map"].values())))
        held = {key: kept for key, kept in load_file(file).items() if key != tensor}
        save_file(held if value is None else held | {tensor: value}, file, {"format": "pt"})
        index["weight_map"].pop(tensor, None)
        index["weight_map"] |= {} if value is None else {tensor: file.name}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return [name, str(target)]


def broken(models: Path, out: Path) -> dict[str, list[str]]:
    other_kind = out / "other-kind"
    other_kind.mkdir()
    (other_kind / "pytorch_model.bin").touch()
    cut = out / "cut"
    shutil.copytree(models / "llama", cut)
    for file in cut.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    last, up = "model.layers.3.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    return {
        "missing": changed(models, out / "missing", "qwen3-moe", {last: None}),
        "shape": changed(models, out / "shape", "qwen2", {up: torch.ones(40, 32)}),
        "untied": changed(models, out / "untied", "qwen2-tied", {"lm_head.weight": torch.ones(131, 32)}),
        "other-kind": ["llama", str(other_kind)],
        "cut": ["llama", str(cut)],
    }


FREEZING: dict[str, tuple[str, dict[str, bool], list[str]]] = {
    "nothing": ("qwen2", {}, []),
    "patterns": ("qwen2", {}, [r"embed_tokens|layers\.[012]\.", "norm", r"self_attn\.[qkv]_proj\.bias"]),
    "map": ("qwen2", {"model": False, "model.layers.2.self_attn": True}, []),
    "tied": ("qwen2-tied", {}, ["embed_tokens"]),
    "part": ("qwen2", {}, [r"q_proj\.weight"]),
    "unknown": ("qwen2", {}, ["no_such_name"]),
    "experts": (
        "mixtral",
        {"model": False, "model.layers.1.mlp.experts.down_proj": True, "model.layers.3.mlp.gate": True},
        [],
    ),
}


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_loaded_is_exported_again_bit_by_bit(told_by: Callable[[int], dict[str, Told]], ranks: int):
    found = told_by(ranks)["round-trip"]
    assert {case: names for case, names in found["differing"].items() if names} == {}
    assert not any(found["everywhere"])
    assert len(found["differing"]) >= len(CONFIGS)


@pytest.mark.parametrize("ranks", RANKS)
def test_logits_are_those_of_transformers(told_by: Callable[[int], dict[str, Told]], ranks: int):
    found = told_by(ranks)["logits"]
    assert len(found) >= len(CONFIGS)
    for case, (difference, spread) in found.items():
        assert difference < 1e-5 * max(spread, 1), case
        assert spread > 0.5, case


def test_any_value_is_exported_in_any_type(told: dict[str, Told]):
    assert told["cast"] == []


def test_a_critic_has_the_head_of_its_files_or_the_one_that_fsdp2_draws(told: dict[str, Told]):
    assert len(told["critics"]) == 4
    assert {case: names for case, names in told["critics"].items() if names} == {}


@pytest.mark.parametrize(
    ("case", "parts"),
    {
        "missing": ["no weights for model.layers.3.mlp.experts.2.up_proj.weight"],
        "shape": ["model.layers.0.mlp.up_proj.weight", "(40, 32)", "(48, 32)", "trainer.policy.model.path"],
        "untied": ["lm_head.weight", "trainer.policy.model_config_kwargs.tie_word_embeddings=false"],
        "other-kind": ["model.safetensors.index.json", "save_pretrained"],
        "cut": ["cannot be loaded"],
    }.items(),
)
def test_what_cannot_be_loaded_is_an_error_on_all_ranks(told: dict[str, Told], case: str, parts: list[str]):
    assert all(part in told["refused"][case] for part in parts), told["refused"][case]
    assert "ranks raised" not in told["refused"][case]


def test_parameters_are_frozen_by_the_names_that_they_have_with_fsdp2(told: dict[str, Told]):
    trained = {case: found["trained"] for case, found in told["freezing"].items()}
    assert "0 of 2 ranks raised" in told["freezing"]["patterns"]["error"]
    assert len(trained["nothing"]) == 3 + 4 * 12
    layer, attention = "model.layers.3.", "model.layers.2.self_attn."
    linear = [f"mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
    linear += [f"self_attn.{name}_proj.weight" for name in "koqv"]
    assert trained["patterns"] == sorted(["lm_head.weight", *(layer + name for name in linear)])
    biased = [f"{attention}{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")]
    assert trained["map"] == sorted(["lm_head.weight", f"{attention}o_proj.weight", *biased])
    assert "model.embed_tokens.weight" not in trained["tied"]
    experts = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(4)]
    assert trained["experts"] == sorted([*experts, "model.layers.3.block_sparse_moe.gate.weight"])


def test_a_part_of_a_fused_parameter_cannot_be_frozen(told: dict[str, Told]):
    attention = "model.layers.0.self_attn."
    error = told["freezing"]["part"]["error"]
    assert f"{attention}q_proj.weight, {attention}k_proj.weight, {attention}v_proj.weight" in error
    assert "ranks raised" not in error
    assert 'freeze_pattern "no_such_name"' in told["freezing"]["unknown"]["error"]
