"""docs/models.md says what hpcrl does with models of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from hpcrl.config.rules.model_fit import MEGATRON_FAMILIES, STATE_LAYERS
from hpcrl.data.model_config import with_older_names
from hpcrl.data.models.routers import routers
from hpcrl.trainer.backends.fsdp.model import PackedPolicy
from hpcrl.trainer.backends.fsdp.sharding import units
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.packed.attention import PACKED
from tests.trainer.families.features import FEATURES, Feature, works
from tests.trainer.families.models import FAMILIES, Family, config_of, model_of, write_model
from tests.trainer.families.ranks import trained
from tests.trainer.families.table import PAGE, promised, rows_of
from tests.trainer.material import run_of_two
from tests.trainer.models.trees import FORWARD, both
from tests.trainer.ranks import Ranks

MEGATRON_OR_VLLM = {"vLLM": "vllm", "Megatron": "megatron.core"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute tiny models by one thread: more wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cells() -> Iterator[Any]:
    for family, feature in product(FAMILIES, FEATURES):
        marks = [] if family.quick and feature.quick else [pytest.mark.faults_slow]
        yield pytest.param(family, feature, marks=marks, id=f"{family.kind}, {feature.name}")


@pytest.mark.parametrize(("family", "feature"), list(cells()))
def test_the_table_is_true(family: Family, feature: Feature, tmp_path: Path) -> None:
    if feature.name in MEGATRON_OR_VLLM:
        pytest.importorskip(MEGATRON_OR_VLLM[feature.name])
    assert works(family, feature, tmp_path) == promised(rows_of(PAGE.read_text())[family.kind], feature)


_SCALED: dict[str, dict[str, Any]] = {
    "llama": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "qwen2": {"rope_type": "linear", "factor": 4.0},
    "qwen3": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "phi3": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.1, 2.2, 2.3]},
    "glm4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "scaled"), [(each, scaled) for each in FAMILIES for scaled in (False, True) if not scaled or each.kind in _SCALED],
    ids=lambda value: value.kind if isinstance(value, Family) else str(value),
)  # fmt: skip
def test_names_for_transformers_4_change_nothing_in_transformers_5(
    tmp_path: Path, family: Family, scaled: bool
) -> None:
    """Of models whose bases of rotary positions are not the defaults."""
    config_of(family).save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    positions = entries.get("rope_parameters") or {}
    for one in [positions] if "rope_theta" in positions else positions.values():
        one |= {"rope_theta": one["rope_theta"] * 1.7, **(_SCALED[family.kind] if scaled else {})}
    older, read = with_older_names(entries), list[Any]()
    for each in (entries, older):
        (tmp_path / "config.json").write_text(json.dumps(each))
        read.append(AutoConfig.from_pretrained(tmp_path))
    assert ("rope_theta" in older) == ("rope_parameters" in entries)
    assert older == with_older_names(older), "what has them stays as it is"
    with torch.no_grad():
        ids, models = torch.arange(2, 30)[None], [model_of(family, "eager", config) for config in read]
        assert torch.equal(*(model(ids).logits for model in models))


SHARDED = ["gemma2", "gpt_oss", "mamba2", "qwen3_next", "zamba2"]


@pytest.mark.faults_slow
def test_two_ranks_train_as_one_does(tmp_path: Path, alone: World, two: Ranks) -> None:
    models = {
        family.kind: str(write_model(family, tmp_path / family.kind)) for family in FAMILIES if family.kind in SHARDED
    }
    run = run_of_two(tmp_path / "run", groups=4, size=3)
    options = {"models": models, "run": str(run.path), "out": str(tmp_path)}
    trained(alone, options)
    two.play([("families.ranks:trained", options)])
    for kind in SHARDED:
        expected, found = (json.loads((tmp_path / f"{kind}-{ranks}.json").read_text()) for ranks in (1, 2))
        for one, other in zip(expected, found, strict=True):
            assert other["final_loss"] == pytest.approx(one["final_loss"], abs=1e-5), kind
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4), kind
        expected, found = (load_file(tmp_path / f"{kind}-{ranks}.safetensors") for ranks in (1, 2))
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, atol=2e-4, rtol=0, msg=lambda text, at=(kind, name): f"{at}: {text}"
            )


def of(kind: str) -> Family:
    return next(family for family in FAMILIES if family.kind == kind)


def test_residuals_in_float32_meet_a_head_in_bfloat16() -> None:
    model: Any = model_of(of("mamba2"), PACKED)
    model.to(torch.bfloat16)
    assert model.config.residual_in_fp32
    logprobs_P, *_ = PackedPolicy(model, FORWARD).run(both([[3, 4, 5, 6, 7], [3, 4, 5, 6]])[0])
    assert logprobs_P.dtype == torch.float32
    assert logprobs_P.any()


def test_layers_that_share_weights_are_no_units() -> None:
    names = {type(unit).__name__ for unit in units(model_of(of("zamba2"), PACKED), {})}
    assert names == {"Zamba2MambaDecoderLayer"}, "those of two Zamba2HybridLayer are the same"


def test_the_table_has_all_families() -> None:
    rows = rows_of(PAGE.read_text())
    assert list(rows) == [family.kind for family in FAMILIES]
    assert rows.keys() >= STATE_LAYERS.keys() | MEGATRON_FAMILIES.keys()
    (column,) = [feature for feature in FEATURES if feature.name == "Megatron"]
    assert {kind for kind, line in rows.items() if promised(line, column)} == MEGATRON_FAMILIES.keys()


@pytest.mark.parametrize(("kind", "found"), [("qwen3_moe", 2), ("jamba", 0)])
def test_a_linear_layer_alone_is_no_router(kind: str, found: int) -> None:
    assert len(routers(model_of(of(kind), "eager"))) == found
