"""One micro-batch that ranks share is what one rank computes of it: models, numbers of heads, outputs and gradients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config.rules.model_fit import HeadShare
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.packed.sequence_parallel import fitted
from tests.trainer.launcher import run_ranks
from tests.trainer.material import VOCABULARY
from tests.trainer.ranks import Ranks
from tests.trainer.sequence import scenarios

MODELS: dict[str, dict[str, Any]] = {
    "one head of keys": {"kind": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 1},
    "uneven heads": {"kind": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 3},
    "experts": {"kind": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "sinks and windows": {
        "kind": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
        "initializer_range": 0.05,
    },
    "reward model": {"kind": "qwen2", "mode": "reward_model"},
    "bf16": {"kind": "qwen2", "dtype": "bf16", "num_key_value_heads": 1},
}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


QUICK = ("uneven heads", "sinks and windows", "reward model")


def made(folder: Path, model_path: Path, names: Iterable[str], alone: World) -> dict[str, Any]:
    """Return the options of a scenario, whose models one rank has computed."""
    options = dict[str, Any]()
    for name in names:
        entries = MODELS[name]
        torch.manual_seed(3)
        own = {key: value for key, value in entries.items() if key not in ("kind", "mode", "dtype")}
        path = folder / name
        shutil.copytree(model_path, path)  # for its tokenizer
        AutoModelForCausalLM.from_config(AutoConfig.for_model(entries["kind"], **SIZES | own)).save_pretrained(path)
        options[name] = {"path": str(path), **{key: entries[key] for key in ("mode", "dtype") if key in entries}}
    found = {"models": options, "out": str(folder)}
    scenarios.passes(alone, found)
    return found


def expect_same(options: dict[str, Any], ranks: int, name: str) -> None:
    one, several = (load_file(f"{options['out']}/{name}.{size}") for size in (1, ranks))
    assert one.keys() == several.keys()
    assert any(key.startswith("gradient.") for key in one)
    for key, value in one.items():
        if name != "bf16":
            # a gradient is a sum whose terms are as large as its largest entries
            atol = 1e-5 + 1e-6 * value.abs().max().item()
            torch.testing.assert_close(
                several[key], value, atol=atol, rtol=1e-5, msg=lambda said, key=key: f"{key}: {said}"
            )
        elif key not in ("ids", "top"):
            assert (several[key] - value).norm() < 0.05 * value.norm(), key


def test_two_ranks(tmp_path: Path, model_path: Path, alone: World, two: Ranks) -> None:
    models = made(tmp_path, model_path, QUICK, alone)
    two.play([("sequence.scenarios:passes", models)])
    for name in QUICK:
        expect_same(models, 2, name)


@pytest.mark.faults_slow
def test_more_models_and_more_ranks_than_heads_of_keys(tmp_path: Path, model_path: Path, alone: World) -> None:
    models = made(tmp_path, model_path, MODELS, alone)
    for ranks in (2, 3, 4):
        done = run_ranks(ranks, json.dumps([("passes", models)]), script="trainer/sequence/scenarios.py")
        assert done.returncode == 0, done.stderr
        for name in MODELS:
            expect_same(models, ranks, name)


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 8), (8, 2), (14, 2), (12, 4), (6, 1)])
def test_heads_of_each_rank(heads: int, key_heads: int) -> None:
    for ranks in range(1, heads + 1):
        shares = HeadShare.of(heads, key_heads, ranks)
        assert [head for share in shares for head in share.queries] == list(range(heads))
        assert max(len(share.queries) for share in shares) == -(-heads // ranks)
        every = torch.arange(key_heads)[None, :, None]
        for share in shares:
            given = fitted(every[:, share.keys.start : share.keys.stop], share.times)[0, :, 0]
            assert len(share.queries) % len(given) == 0
            asked = given.repeat_interleave(len(share.queries) // len(given)).tolist()
            assert asked == [head // (heads // key_heads) for head in share.queries]
