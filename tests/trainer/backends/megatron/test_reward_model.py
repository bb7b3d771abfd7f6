"""Reward models on Megatron-core: over all layouts the loss, gradient and metrics of TRL's RewardTrainer, and exports that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification

pytest.importorskip("megatron.core")

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.publish import ADAPTER, Publisher
from tests.trainer.backends.test_reward_model import (
    CASES,
    QUICKSTART,
    SAID,
    config,
    expect_same,
    fill,
    make_pairs,
    scores,
    trained,
)
from tests.trainer.ranks import Ranks

TP2, PP2, CP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
CANONICAL = {"lora_type": "canonical_lora"}
# ranks, sizes, cases of TRL's
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "tp2": (2, TP2, ["margins", "lora"]),
    "pp2": (2, PP2, ["centered", "lora"]),
    "dp2": (2, {}, ["plain"]),
    "cp2": (2, CP2, ["margins"]),
    "tp2-pp2": (4, TP2 | PP2, list(CASES)),
}
ROWS = [ids for row in SAID["tokens"] for ids in row.values()]
ROWS += [[*ROWS[0], 0], [*ROWS[1], 0, 0], [0, 0]]  # that end with the padding token
FILLED = "filled"
rarely = pytest.mark.faults_slow


def settings_of(ranks: int, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "strategy": "megatron",
        "policy": {"megatron_config": {"dtype": "fp32", **sizes, **CANONICAL}},
        "max_tokens_per_micro_batch": 60,
        "placement": {"policy_num_gpus_per_node": ranks},
    }


def on_ranks(world: World, options: dict[str, Any]) -> None:
    """A scenario: train, score and export in one layout."""
    run, found = Run(Path(options["run"])), dict[str, Any]()
    changes = settings_of(world.size, options["sizes"])
    for name in options["cases"]:
        settings = CASES[name]["settings"]
        found[name] = trained(run, world, settings, changes, lambda engine: engine.restore(run.path / FILLED))
        engine: Any = build_policy(config(run, settings, changes).trainer, 1.0, world)
        if settings.get("lora"):
            engine.restore(run.path / FILLED)
        publisher = Publisher(run, 0, world, torch.float32, 1, engines=False)
        model, target = Pretrained(str(run.path / "model")), Path(f"{options['out']}-{name}")
        publisher.export(engine, 3, model, ChatTemplateConfig(), target=target)
        found[f"{name} scores"] = scores(engine, ROWS)
    if world.first:
        write_json(Path(options["out"]), found)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, alone: World) -> Run:
    """A run with pairs, a model, and a checkpoint of its adapters, which one rank of FSDP2 wrote."""
    run = make_pairs(tmp_path_factory.mktemp("reward_model") / "run")
    engine: Any = build_policy(config(run, {"lora": True}, {}).trainer, 1.0, alone)
    fill(engine)
    (run.path / FILLED).mkdir()
    engine.save(run.path / FILLED, alone.control)
    return run


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), 4)
    yield ranks
    ranks.close()


def expect_layout(run: Run, ranks: Ranks, folder: Path, name: str) -> None:
    _, sizes, cases = LAYOUTS[name]
    options = {"run": str(run.path), "sizes": sizes, "cases": cases, "out": str(folder / "found")}
    ranks.play([("backends.megatron.leave:leave", {}), ("backends.megatron.test_reward_model:on_ranks", options)])
    found = read_json(folder / "found")
    assert found is not None
    for case in cases:
        expect_same(case, found[case], what=name)
        lora = CASES[case]["settings"].get("lora")
        expect_export(folder / f"found-{case}", found[f"{case} scores"], adapted=bool(lora))


def expect_export(place: Path, said: list[float], *, adapted: bool) -> None:
    loaded = AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float32)
    assert type(loaded).__name__ == "Qwen2ForSequenceClassification"
    assert loaded.config.num_labels == 1
    models: list[Any] = [loaded]
    if adapted:
        base = AutoModelForSequenceClassification.from_pretrained(QUICKSTART, num_labels=1, dtype=torch.float32)
        models.append(peft.PeftModel.from_pretrained(base, place / ADAPTER))
    for model in models:
        with torch.no_grad():
            expected = [model(torch.tensor([row])).logits.item() for row in ROWS]
        assert said == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_two_ranks_train_as_trl(run: Run, two: Ranks, tmp_path: Path, name: str) -> None:
    expect_layout(run, two, tmp_path, name)


@rarely
@pytest.mark.parametrize("name", ["dp2", "cp2"])
def test_other_layouts_train_as_trl(run: Run, two: Ranks, tmp_path: Path, name: str) -> None:
    expect_layout(run, two, tmp_path, name)


@rarely
def test_four_ranks_train_as_trl(run: Run, four: Ranks, tmp_path: Path) -> None:
    expect_layout(run, four, tmp_path, "tp2-pp2")
