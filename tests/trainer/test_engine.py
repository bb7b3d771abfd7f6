"""The engine under real torchrun: however a mini-batch is spread, it is the same optimizer step as plain transformers make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.advantages import grpo
from hpcrl.data.samples import read_group
from hpcrl.run.layout import Run
from hpcrl.types import Batch
from tests.trainer.material import make_batch, make_run, run_ranks

GROUPS, SIZE = 4, 3
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one-by-one": {"micro": 1, "forward": 1},
        "all-at-once": {"micro": 64, "forward": 64},
        "chunked": {"micro": 4, "chunk_rows": 5, "gradient_checkpointing": True},
    },
    2: {
        "two-ranks-one-by-one": {"micro": 1, "forward": 2},
        "two-ranks": {"micro": 2, "reshard_after_forward": False},
        "two-ranks-chunked": {"micro": 2, "chunk_rows": 5, "gradient_checkpointing": True},
        "two-ranks-bf16": {"micro": 2, "param_dtype": "bf16"},
    },
}
EXACT = [name for variants in VARIANTS.values() for name in variants if not name.endswith("bf16")]


class Truth:
    """Two batches trained with nothing but transformers and torch: no packing, no sharding, one sample at a time."""

    def __init__(self, path: Path, run: Run, batches: list[Batch]) -> None:
        self.model, self.reference = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            for _ in range(2)
        )
        self.run = run
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01)
        self.losses: list[float] = []
        self.norms: list[float] = []
        for batch in batches:
            samples = [read_group(run.path / group.path) for group in batch.groups]
            old = [[self.score(self.model, s)[0].detach() for s in group] for group in samples]
            for start in range(0, GROUPS, 2):
                self.update(batch, samples, old, range(start, start + 2))

    def score(self, model: torch.nn.Module, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=sample.token_ids[None]).logits[0, :-1] / 0.9
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(-1, sample.token_ids[1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    def update(self, batch: Batch, samples: list[Any], old: list[Any], groups: range) -> None:
        total = tokens = torch.tensor(0.0)
        for group in groups:
            advantages = grpo(torch.tensor(batch.groups[group].rewards))
            for index, sample in enumerate(samples[group]):
                mask = sample.loss_mask[1:]
                logprobs, entropy = self.score(self.model, sample)
                with torch.no_grad():
                    reference, _ = self.score(self.reference, sample)
                ratio = (logprobs - old[group][index]).exp()
                advantage = advantages[index]
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                kl = (reference - logprobs).exp() - (reference - logprobs) - 1
                total = total + ((loss + 0.1 * kl - 0.02 * entropy) * mask).sum()
                tokens = tokens + mask.sum()
        self.optimizer.zero_grad()
        (total / tokens).backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item())
        update = len(self.losses)
        self.optimizer.param_groups[0]["lr"] = 2e-3 * (0.5 if update == 0 else 1 - (update - 1) / 7)
        self.optimizer.step()
        self.losses.append((total / tokens).item())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    path = tmp_path_factory.mktemp("engine")
    run = make_run(path / "run")
    for step in (1, 2):
        make_batch(run, step, GROUPS, SIZE)
    for ranks, variants in VARIANTS.items():
        options = {"model": str(model_path), "run": str(run.path), "out": str(path), "variants": variants}
        poison = {**options, "out": str(path / f"poisoned-{ranks}.json")}
        alike = {"out": str(path / f"alike-{ranks}.json")}
        done = run_ranks(ranks, json.dumps([("variants", options), ("poisoned", poison), ("disagreement", alike)]))
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def truth(results: Path, model_path: Path) -> Truth:
    run = Run.open(results / "run")
    return Truth(model_path, run, [Batch.from_json(json.loads(run.batch(step).read_text())) for step in (1, 2)])


@pytest.mark.parametrize("name", EXACT)
def test_every_way_is_the_same(results: Path, truth: Truth, name: str) -> None:
    updates = json.loads((results / f"{name}.json").read_text())
    assert [u["final_loss"] / u["tokens"] for u in updates] == pytest.approx(truth.losses, abs=1e-5)
    assert [u["grad_norm"] for u in updates] == pytest.approx(truth.norms, rel=1e-5)
    assert truth.norms[0] > 1  # so clipping took part
    tensors = load_file(results / f"{name}.safetensors")
    for key, parameter in truth.model.named_parameters():
        torch.testing.assert_close(tensors[f"gradient.{key}"], truth.gradients[key], atol=1e-5, rtol=0)
        torch.testing.assert_close(tensors[f"parameter.{key}"], parameter.detach(), atol=1e-5, rtol=0)


def test_the_policy_moved_and_met_clipping(results: Path) -> None:
    updates = json.loads((results / "two-ranks.json").read_text())
    assert updates[0]["clip_ratio"] == updates[0]["policy_kl"] == 0
    assert updates[1]["ratio"] != pytest.approx(updates[1]["tokens"])
    assert updates[-1]["policy_kl"] > 0


def test_bf16_keeps_fp32_parameters_and_stays_close(results: Path, truth: Truth) -> None:
    tensors = load_file(results / "two-ranks-bf16.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    updates = json.loads((results / "two-ranks-bf16.json").read_text())
    assert [u["final_loss"] / u["tokens"] for u in updates] == pytest.approx(truth.losses, abs=0.05)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_is_skipped(results: Path, ranks: int) -> None:
    facts = json.loads((results / f"poisoned-{ranks}.json").read_text())
    assert facts == {"skipped": [True, False], "same": True, "updates": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_agree(results: Path, ranks: int) -> None:
    assert json.loads((results / f"alike-{ranks}.json").read_text()) == ranks
