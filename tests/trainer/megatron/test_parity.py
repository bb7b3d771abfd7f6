"""The contract of the engine seam: however ranks share a model, and whichever engine trains it, it is the same training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.trainer.scenarios import laid_over
from tests.trainer.megatron.seam import MODELS, Seam, Told, Way, expect_same, megatron

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
VPP = PP2 | {"pipeline_schedule": "Interleaved1F1B", "pipeline_layers_per_stage": 1}
ETP1 = {"expert_tensor_parallel_size": 1}
WHOLE = {"optimizer_config_kwargs": {"use_distributed_optimizer": False}}


@pytest.fixture(scope="module")
def seam(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seam]:
    seam = Seam(tmp_path_factory.mktemp("seam"))
    yield seam
    seam.close()


def optimizer(**options: Any) -> dict[str, Any]:
    return {"policy": {"optimizer_config": options}}


def frozen(*patterns: str, **trainable: bool) -> dict[str, Any]:
    return {"policy": {"freeze_pattern": list(patterns), "trainable_map": trainable}}


def ddp(**options: Any) -> dict[str, Any]:
    return {"ddp_config": options}


OVERLAP = ddp(overlap_grad_reduce=True, overlap_param_gather=True)
RECOMPUTED = {"gradient_checkpointing": True}
SELECTIVE = {"transformer_config_kwargs": {"recompute_granularity": "selective"}}
FIRST_STAGE = r"embed_tokens|layers\.[01]\."

# what one rank of FSDP2 does: the section of the trainer, models
TRUTHS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, list(MODELS)),
    "clipped": (optimizer(max_grad_norm=0.05), ["tied", "moe"]),
    "adam": (optimizer(name="Adam", weight_decay=0.5, adam_betas=[0.8, 0.99]), ["tied"]),
    "decay": (optimizer(weight_decay=5.0), ["untied", "moe"]),
    "frozen": (frozen(r"layernorm|layers\.2\.", "embed_tokens"), ["untied"]),
    "frozen-stage": (frozen(FIRST_STAGE), ["untied"]),
    "frozen-but-experts": (frozen(r"^(?!.*\.experts\.)"), ["moe"]),
    "frozen-experts": (frozen(r"\.experts\."), ["moe"]),
}
Row = tuple[str, dict[str, Any], dict[str, Any], str, list[str]]

# per number of ranks: name, megatron's options, the rest of the section, what it is like, models
LAYOUTS: dict[int, list[Row]] = {
    1: [("alone", {}, {}, "plain", ["tied", "untied", "moe"])],
    2: [
        ("tp2", TP2, {}, "plain", ["tied", "untied", "moe"]),
        ("pp2", PP2, {}, "plain", ["tied", "untied", "moe"]),
        ("vpp2", VPP, {}, "plain", ["tied", "untied"]),
        ("dp2", {}, {}, "plain", ["tied", "moe"]),
        ("dp2-whole", WHOLE, {}, "plain", ["tied"]),
        ("cp2", CP2, {}, "plain", ["tied", "moe"]),
        ("ep2", EP2, {}, "plain", ["moe"]),
        ("ep2-whole", EP2 | WHOLE, {}, "plain", ["moe"]),
    ],
    4: [
        ("tp2-dp2", TP2, {}, "plain", ["tied"]),
        ("tp2-pp2", TP2 | PP2, {}, "plain", ["tied", "moe"]),
        ("cp2-pp2", CP2 | PP2, {}, "plain", ["tied"]),
        ("ep2-tp2", EP2 | TP2 | ETP1, {}, "plain", ["moe"]),
    ],
}
OPTIONS: dict[int, list[Row]] = {
    1: [
        ("adam", WHOLE, {}, "adam", ["tied"]),
        ("decay", {}, {}, "decay", ["untied"]),
    ],
    2: [
        ("tp2-clipped", TP2, {}, "clipped", ["tied"]),
        ("tp2-adam", TP2, {}, "adam", ["tied"]),
        ("tp2-recomputed", TP2, RECOMPUTED, "plain", ["untied"]),
        ("tp2-frozen", TP2, {}, "frozen", ["untied"]),
        ("pp2-clipped", PP2, {}, "clipped", ["tied", "moe"]),
        ("pp2-dynamic", PP2 | {"pipeline_dynamic_shape": True, "moe_token_dispatcher_type": "alltoall"}, {}, "plain", ["tied", "moe"]),
        ("pp2-selective", PP2 | SELECTIVE, RECOMPUTED, "plain", ["tied"]),
        ("pp2-frozen", PP2, {}, "frozen", ["untied"]),
        ("pp2-frozen-stage", PP2, {}, "frozen-stage", ["untied"]),
        ("pp2-frozen-stage-whole", PP2 | WHOLE, {}, "frozen-stage", ["untied"]),
        ("vpp2-recomputed", VPP, RECOMPUTED, "plain", ["untied"]),
        ("vpp2-dynamic", VPP | {"pipeline_dynamic_shape": True}, {}, "plain", ["tied"]),
        ("dp2-clipped", {}, {}, "clipped", ["tied"]),
        ("dp2-overlap", OVERLAP, {}, "plain", ["tied", "moe"]),
        ("dp2-overlap-whole", WHOLE | ddp(overlap_grad_reduce=True), {}, "plain", ["tied"]),
        ("dp2-scaled", ddp(average_in_collective=False), {}, "plain", ["moe"]),
        ("dp2-frozen", {}, {}, "frozen", ["untied"]),
        ("cp2-recomputed", CP2, RECOMPUTED, "plain", ["tied"]),
        ("ep2-clipped", EP2, {}, "clipped", ["moe"]),
        ("ep2-decay", EP2 | WHOLE, {}, "decay", ["moe"]),
        ("ep2-frozen-experts", EP2, {}, "frozen-experts", ["moe"]),
        ("ep2-frozen-but-experts", EP2, {}, "frozen-but-experts", ["moe"]),
        ("ep2-allgather", EP2 | {"moe_token_dispatcher_type": "allgather"}, {}, "plain", ["moe"]),
    ],
    4: [
        ("pp2-dp2-overlap", PP2 | OVERLAP, {}, "plain", ["tied"]),
        ("vpp2-dp2-overlap", VPP | OVERLAP, {}, "plain", ["untied"]),
        ("ep2-tp2-recomputed", EP2 | TP2 | ETP1, RECOMPUTED, "clipped", ["moe"]),
        ("ep2-dp2", EP2 | PP2, {}, "clipped", ["moe"]),
    ],
}


def cases(table: dict[int, list[Row]]) -> list[Any]:
    return [
        pytest.param(size, name, like, model, id=f"{name}-{model}")
        for size, rows in table.items()
        for name, _, _, like, models in rows
        for model in models
    ]


class Played:
    """What came of ways, which the ranks of one size go all at once."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam
        self._done: dict[int, dict[tuple[str, str], Way]] = {}
        ways = {
            (name, model): seam.way(f"truth-{name}", model, trainer)
            for name, (trainer, models) in TRUTHS.items()
            for model in models
        }
        seam.play(1, list(ways.values()))
        self.truth = {key: seam.told(way) for key, way in ways.items()}

    def told(self, table: dict[int, list[Row]], size: int, name: str, model: str) -> Told:
        number = 10 * size + (table is OPTIONS)
        if number not in self._done:
            ways = {
                (case, model): self._seam.way(case, model, laid_over(megatron(**options), laid_over(TRUTHS[like][0], trainer)))
                for case, options, trainer, like, models in table[size]
                for model in models
            }
            self._done[number] = ways
            self._seam.play(size, list(ways.values()))
        return self._seam.told(self._done[number][name, model])


@pytest.fixture(scope="module")
def played(seam: Seam) -> Played:
    return Played(seam)


@pytest.mark.parametrize(("size", "name", "like", "model"), cases(LAYOUTS))
def test_every_layout_trains_alike(played: Played, size: int, name: str, like: str, model: str):
    expect_same(played.told(LAYOUTS, size, name, model), played.truth[like, model])


@pytest.mark.parametrize(("size", "name", "like", "model"), cases(OPTIONS))
def test_options_train_alike(played: Played, size: int, name: str, like: str, model: str):
    expect_same(played.told(OPTIONS, size, name, model), played.truth[like, model])


def test_what_is_compared_does_something(played: Played):
    plain, clipped = played.truth["plain", "tied"], played.truth["clipped", "tied"]
    norms = [update["grad_norm"] for update in clipped.told["updates"]]
    assert min(norms) > 0.05
    print(norms)
    for name in ("clipped", "adam"):
        moved = played.truth[name, "tied"].tensors
        assert max((moved[key] - plain.tensors[key]).abs().max().item() for key in moved if key.startswith("weights")) > 1e-3, name
