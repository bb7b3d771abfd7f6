"""Losses of routers and what is told of them, on FSDP2: they are what their formulas say, however a mini-batch is spread."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.types import Batch
from tests.trainer import scenarios
from tests.trainer.backends.test_engine import GROUPS, SIZE, AdamW, Truth, expect_same, variant
from tests.trainer.backends.test_lora_experts import write_mixture
from tests.trainer.material import run_of_two
from tests.trainer.ranks import Ranks

AUX, Z = 0.3, 0.02
EPS = 1e-3  # Adam makes whole steps of gradients that are no more than rounding, but for this
EXPERTS: dict[str, Any] = {
    "experts": {"aux_loss_coef": AUX, "z_loss_coef": Z},
    "optimizer_config": {"eps": EPS},
}
SHARED = {"fsdp_config": {"expert_parallel_size": 2}}
ALONE = {
    "one-by-one": variant(1, policy=EXPERTS),
    "recomputed": variant(4, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=True, policy=EXPERTS),
    "all-at-once": variant(64, gradient_checkpointing=True, policy=EXPERTS),
    "padded-rows": variant(4, use_sample_packing=False, policy=EXPERTS),
    "shared": {**variant(64, policy=EXPERTS), "tokens": 60, "shared": True},
}
TWO = {
    "two-ranks": variant(2, gradient_checkpointing=True, policy=EXPERTS),
    "tokens-shared": variant(2, policy={**EXPERTS, "sequence_parallel_size": 2}),
    "experts-shared": variant(2, gradient_checkpointing=True, policy={**EXPERTS, **SHARED}, ref=SHARED),
    "experts-and-tokens-shared": variant(2, policy={**EXPERTS, **SHARED, "sequence_parallel_size": 2}),
    "two-ranks-apart": variant(1, policy={**EXPERTS, "fsdp_config": {"reshard_after_forward": False}}),
}


class Balanced(Truth):
    """With the losses of its routers, by transformers' logits of one sample at a time."""

    def __init__(self, *given: Any) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []
        super().__init__(*given, optimizer=partial(AdamW, eps=EPS))

    def score(self, model: torch.nn.Module, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if model is self.model and torch.is_grad_enabled():
            told = model(input_ids=sample.token_ids[None], output_router_logits=True).router_logits
            self.seen.append(told)
        return super().score(model, sample)

    def update(self, batch: Batch, samples: list[Any], old: list[Any], groups: range) -> None:
        self.seen = []
        super().update(batch, samples, old, groups)

    def added(self) -> torch.Tensor:
        costs, self.chosen = [], torch.zeros(2, 4)
        for layers in self.seen:
            for number, logits_TE in enumerate(layers):
                counts_E = torch.zeros(4)
                for token in logits_TE.topk(2).indices.tolist():
                    counts_E[token] += 1
                self.chosen[number] += counts_E
                share_E = counts_E / (2 * len(logits_TE))
                aux = 4 * sum(f * p for f, p in zip(share_E, logits_TE.softmax(-1).mean(0), strict=True))
                z = logits_TE.exp().sum(-1).log().pow(2).mean()
                costs.append(AUX * aux + Z * z)
        return torch.stack(costs).sum() / len(self.seen)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, mixture: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("balance")
    run = run_of_two(path / "run", GROUPS, SIZE)
    options = {"model": str(mixture), "run": str(run.path), "out": str(path)}
    scenarios.variants(alone, {**options, "variants": ALONE})
    two.play([("scenarios:variants", {**options, "variants": TWO})])
    return path


@pytest.fixture(scope="module")
def truth(results: Path, mixture: Path) -> Balanced:
    run = Run.open(results / "run")
    return Balanced(mixture, run, [Batch.from_json(json.loads(run.batch(step).read_text())) for step in (1, 2)])


@pytest.mark.parametrize("name", [*ALONE, *TWO])
def test_every_way_is_what_the_formulas_say(results: Path, truth: Balanced, name: str) -> None:
    expect_same(results, truth, name)


@pytest.mark.parametrize("name", [*ALONE, *TWO])
def test_what_is_told_counts_each_token_once(results: Path, truth: Balanced, name: str) -> None:
    told = json.loads((results / f"{name}.json").read_text())[-1]
    load_L = truth.chosen.amax(-1) / truth.chosen.mean(-1)
    assert told["experts/load"] == pytest.approx(load_L.mean().item())
    assert told["experts/load_max"] == pytest.approx(load_L.amax().item())
    assert told["experts/idle_share"] == (truth.chosen == 0).float().mean().item()
    entropies = [torch.distributions.Categorical(logits=each).entropy() for layers in truth.seen for each in layers]
    assert told["experts/router_entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    costs = AUX * told["experts/aux_loss"] + Z * told["experts/z_loss"]
    assert 2 * costs == pytest.approx(truth.added().item(), rel=1e-5)
