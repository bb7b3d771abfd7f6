"""The engine under real torchrun: however a mini-batch is spread, it is the same optimizer step as plain transformers make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.types import Batch
from tests.rows import read_tensors
from tests.trainer import scenarios
from tests.trainer.launcher import run_ranks
from tests.trainer.material import StepBounds, run_of_two
from tests.trainer.ranks import Ranks

GROUPS, SIZE = 4, 3
AdamW = partial(torch.optim.AdamW, weight_decay=0.01)
Adam = partial(torch.optim.Adam, weight_decay=0.5, eps=1e-3, betas=(0.8, 0.99))
FROZEN = r"embed_tokens|layers\.0\.(?!mlp\.up_proj)"


def variant(micro: int, forward: int = 4, **trainer: Any) -> dict[str, Any]:
    return {"micro": micro, "forward": forward, "trainer": trainer}


def fsdp(micro: int = 2, **options: Any) -> dict[str, Any]:
    shared = {name: value for name, value in options.items() if name != "mixed_precision"}
    return variant(micro, policy={"fsdp_config": options}, ref={"fsdp_config": shared})


def adam(**options: Any) -> dict[str, Any]:
    return variant(4, policy={"optimizer_config": options})


VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one-by-one": variant(1, 1),
        "chunked": variant(4, logprobs_chunk_size=5, gradient_checkpointing=True),
        "padded-rows": variant(4, use_sample_packing=False),
        "without-flash": variant(4, flash_attn=False),
        "foreach": adam(implementation="foreach"),
        "for-loop": adam(implementation="for-loop"),
        "bf16-logprobs": variant(4, algorithm={"logprob_dtype": "bf16"}),
        "by-tokens": {**variant(64), "tokens": 20},
        "in-turns": {**variant(4), "turns": True},
        "adam": adam(name="Adam", weight_decay=0.5, eps=1e-3, adam_betas=[0.8, 0.99]),
    },
    2: {
        "two-ranks": fsdp(reshard_after_forward=False),
        "two-ranks-by-tokens": {**variant(64), "tokens": 9},
        "two-ranks-in-turns": {**fsdp(reshard_after_forward=False), "turns": True},
        "reentrant": variant(2, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=True),
        "one-unit": fsdp(wrap_policy={"disable": True}),
        "units-by-class": fsdp(wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer", "Qwen2MLP"]}),
        "two-ranks-frozen": variant(2, policy={"freeze_pattern": [FROZEN]}),
        "frozen-reentrant": variant(
            2,
            gradient_checkpointing=True,
            gradient_checkpointing_use_reentrant=True,
            policy={
                "trainable_map": {
                    "model.embed_tokens": False,
                    "model.layers.0": False,
                    "model.layers.0.mlp.up_proj": True,
                }
            },
        ),
        "two-ranks-bf16": fsdp(mixed_precision={"param_dtype": "bf16"}),
        "two-ranks-fp16": fsdp(mixed_precision={"param_dtype": "fp16"}),
        "master-bf16": fsdp(mixed_precision={"param_dtype": "bf16", "master_dtype": "bf16"}),
    },
    4: {
        "two-copies": fsdp(1, fsdp_size=2),
        "resharded-over-two": fsdp(1, reshard_after_forward=2),
    },
}
# further ones, for `make faults`
MORE: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "compiled-loss": variant(4, logprobs_chunk_size=5, policy={"use_torch_compile": True}),
        "all-at-once": variant(64, 64),
        "padded-rows-without-flash": variant(4, use_sample_packing=False, flash_attn=False),
    },
    2: {
        "two-ranks-one-by-one": variant(1, 2),
        "two-ranks-chunked": variant(2, logprobs_chunk_size=5, gradient_checkpointing=True),
        "units-by-size": fsdp(wrap_policy={"min_num_params": 2000}),
    },
    4: {
        "two-copies-without-resharding": fsdp(1, fsdp_size=2, reshard_after_forward=False),
    },
}
APART = {
    "two-ranks-bf16",
    "two-ranks-fp16",
    "master-bf16",
    "bf16-logprobs",
    "adam",
    "two-ranks-frozen",
    "frozen-reentrant",
}
EXACT = [name for variants in VARIANTS.values() for name in variants if name not in APART]


class Truth:
    """Two batches trained with nothing but transformers and torch: no packing, no sharding, one sample at a time."""

    def __init__(
        self,
        path: Path,
        run: Run,
        batches: list[Batch],
        optimizer: Callable[..., torch.optim.Optimizer] = AdamW,
        frozen: str | None = None,
        adapt: Callable[[torch.nn.Module], object] = lambda _: None,
    ) -> None:
        self.model, self.reference = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            for _ in range(2)
        )
        self.run = run
        adapt(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(frozen is None or not re.search(frozen, name))
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.bounds = StepBounds(1e-5)
        self.losses: list[float] = []
        self.norms: list[float] = []
        for batch in batches:
            samples = [read_tensors(run.path / group.path) for group in batch.groups]
            old = [[self.score(self.model, s)[0].detach() for s in group] for group in samples]
            for start in range(0, GROUPS, 2):
                self.update(batch, samples, old, range(start, start + 2))

    def score(self, model: torch.nn.Module, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=sample.token_ids[None]).logits[0, :-1] / 0.9
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(-1, sample.token_ids[1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    def added(self) -> torch.Tensor | float:
        """Return what a loss has beside that of the policy."""
        return 0.0

    def update(self, batch: Batch, samples: list[Any], old: list[Any], groups: range) -> None:
        total = tokens = torch.tensor(0.0)
        for group in groups:
            rewards = torch.tensor(batch.groups[group].rewards)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
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
        (total / tokens + self.added()).backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item())
        update = len(self.losses)
        self.optimizer.param_groups[0]["lr"] = 2e-3 * (0.5 if update == 0 else 1 - (update - 1) / 7)
        self.optimizer.step()
        self.bounds.add(self.optimizer)
        self.losses.append((total / tokens).item())


def play(ranks: int, todo: list[tuple[str, dict[str, Any]]], alone: World, two: Ranks) -> None:
    if ranks == 1:
        for name, options in todo:
            getattr(scenarios, name)(alone, options)
    elif ranks == 2:
        two.play([(f"scenarios:{name}", options) for name, options in todo])
    else:
        done = run_ranks(ranks, json.dumps(todo))
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("engine")
    run = run_of_two(path / "run", GROUPS, SIZE)
    for ranks, variants in VARIANTS.items():
        options = {"model": str(model_path), "run": str(run.path), "out": str(path), "variants": variants}
        poison = {**options, "out": str(path / f"poisoned-{ranks}.json")}
        alike = {"out": str(path / f"alike-{ranks}.json")}
        play(ranks, [("variants", options), ("poisoned", poison), ("disagreement", alike)], alone, two)
    return path


@pytest.fixture(scope="module")
def more_results(results: Path, model_path: Path, alone: World, two: Ranks) -> Path:
    for ranks, variants in MORE.items():
        options = {"model": str(model_path), "run": str(results / "run"), "out": str(results), "variants": variants}
        play(ranks, [("variants", options)], alone, two)
    return results


def true(results: Path, model_path: Path, **options: Any) -> Truth:
    run = Run.open(results / "run")
    batches = [Batch.from_json(json.loads(run.batch(step).read_text())) for step in (1, 2)]
    return Truth(model_path, run, batches, **options)


@pytest.fixture(scope="module")
def truth(results: Path, model_path: Path) -> Truth:
    return true(results, model_path)


@pytest.mark.parametrize("name", EXACT)
def test_every_way_is_the_same(results: Path, truth: Truth, name: str) -> None:
    expect_same(results, truth, name)
    assert truth.norms[0] > 1  # so clipping took part


@pytest.mark.faults_slow
@pytest.mark.parametrize("name", [name for variants in MORE.values() for name in variants])
def test_further_ways_are_the_same(more_results: Path, truth: Truth, name: str) -> None:
    expect_same(more_results, truth, name)


def test_adam_adds_the_decay_to_the_gradient(results: Path, truth: Truth, model_path: Path) -> None:
    other = true(results, model_path, optimizer=Adam)
    assert other.losses[-1] != pytest.approx(truth.losses[-1], abs=1e-3)
    expect_same(results, other, "adam")


@pytest.mark.parametrize("name", ["two-ranks-frozen", "frozen-reentrant"])
def test_frozen_parameters_stay(results: Path, model_path: Path, name: str) -> None:
    expect_same(results, true(results, model_path, frozen=FROZEN), name)
    tensors = load_file(results / f"{name}.safetensors")
    trained = {key.removeprefix("gradient.") for key in tensors if key.startswith("gradient.")}
    before = load_file(model_path / "model.safetensors")
    assert {key for key, value in before.items() if not torch.equal(value, tensors[f"parameter.{key}"])} == trained
    assert "model.layers.0.mlp.up_proj.weight" in trained


@pytest.mark.faults_slow
def test_compiled_layers_are_the_same(results: Path, truth: Truth, model_path: Path, alone: World, two: Ranks) -> None:
    lora = {"model": {"lora": {"rank": 4}}}
    ways = {
        "compiled": variant(4, gradient_checkpointing=True, policy={"compile_model": True}),
        "adapted": variant(4, policy=lora),
        "adapted-compiled": variant(4, policy={**lora, "compile_model": True}),
    }
    options = {"model": str(model_path), "run": str(results / "run"), "out": str(results), "variants": ways}
    scenarios.variants(alone, options)
    expect_same(results, truth, "compiled")
    two.play(
        [("scenarios:variants", {**options, "variants": {"two-compiled": variant(2, policy={"compile_model": True})}})]
    )
    expect_same(results, truth, "two-compiled")
    plain, compiled = (json.loads((results / f"{name}.json").read_text()) for name in ("adapted", "adapted-compiled"))
    for name in ("final_loss", "grad_norm"):
        assert [each[name] for each in compiled] == pytest.approx([each[name] for each in plain], rel=1e-5, abs=1e-6)


def expect_same(results: Path, truth: Truth, name: str) -> None:
    updates = json.loads((results / f"{name}.json").read_text())
    assert [u["final_loss"] for u in updates] == pytest.approx(truth.losses, abs=1e-5)
    assert [u["grad_norm"] for u in updates] == pytest.approx(truth.norms, rel=1e-5)
    tensors = load_file(results / f"{name}.safetensors")
    for key, parameter in truth.model.named_parameters():
        if key in truth.gradients:
            torch.testing.assert_close(tensors[f"gradient.{key}"], truth.gradients[key], atol=1e-5, rtol=0)
        truth.bounds.expect(tensors[f"parameter.{key}"], parameter)


def test_the_policy_moved_and_met_clipping(results: Path) -> None:
    updates = json.loads((results / "two-ranks.json").read_text())
    assert updates[0]["loss_metrics/clip_ratio"] == updates[0]["policy_kl"] == 0
    assert updates[1]["loss_metrics/ratio"] != pytest.approx(updates[1]["tokens"])
    assert updates[-1]["policy_kl"] > 0


def test_bf16_keeps_fp32_parameters_and_stays_close(results: Path, truth: Truth) -> None:
    tensors = load_file(results / "two-ranks-bf16.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    updates = json.loads((results / "two-ranks-bf16.json").read_text())
    assert [u["final_loss"] for u in updates] == pytest.approx(truth.losses, abs=0.05)


def test_fp16_stays_closer_and_its_gradients_are_scaled_back(results: Path, truth: Truth) -> None:
    updates = json.loads((results / "two-ranks-fp16.json").read_text())
    assert [u["final_loss"] for u in updates] == pytest.approx(truth.losses, abs=0.005)
    assert [u["grad_norm"] for u in updates] == pytest.approx(truth.norms, rel=0.05)


def test_bf16_logprobs_stay_close_and_are_compared_with_such(results: Path, truth: Truth) -> None:
    updates = json.loads((results / "bf16-logprobs.json").read_text())
    assert [u["final_loss"] for u in updates] == pytest.approx(truth.losses, abs=0.05)
    assert [u["final_loss"] for u in updates] != pytest.approx(truth.losses, abs=1e-4)
    # policy, old policy and reference are one and the same at first, so rounding them alike leaves no difference
    assert updates[0]["policy_kl"] == 0
    assert updates[0]["loss_metrics/ratio"] == updates[0]["tokens"]


def test_bf16_parameters_stay_close(results: Path, truth: Truth) -> None:
    tensors = load_file(results / "master-bf16.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    updates = json.loads((results / "master-bf16.json").read_text())
    assert [u["final_loss"] for u in updates] == pytest.approx(truth.losses, abs=0.05)


@pytest.mark.parametrize("ranks", VARIANTS)
def test_a_gradient_that_is_not_finite_is_skipped(results: Path, ranks: int) -> None:
    facts = json.loads((results / f"poisoned-{ranks}.json").read_text())
    assert facts == {"skipped": [True, False], "same": True, "updates": 1}


def test_copies_are_held_by_fewer_ranks(results: Path) -> None:
    shares = {
        name: json.loads((results / f"{name}.share").read_text()) for name in ("two-copies", "resharded-over-two")
    }
    assert shares == {"two-copies": 1 / 2, "resharded-over-two": 1 / 4}


def test_deterministic_kernels_only(results: Path, model_path: Path) -> None:
    """Gradient checkpointing, padded samples and two ranks: all of it has deterministic kernels, and the result is the same."""
    options = {"model": str(model_path), "run": str(results / "run"), "out": str(results / "deterministic.json")}
    done = run_ranks(2, json.dumps([("deterministic", options | variant(2, gradient_checkpointing=True))]))
    assert done.returncode == 0, done.stderr
    assert json.loads((results / "deterministic.facts").read_text()) == {"refused": True, "cublas": ":4096:8"}
    expected = json.loads((results / "two-ranks.json").read_text())[:2]
    actual = json.loads((results / "deterministic.json").read_text())
    assert [u["final_loss"] for u in actual] == pytest.approx([u["final_loss"] for u in expected], abs=1e-5)


@pytest.mark.parametrize("ranks", VARIANTS)
def test_ranks_agree(results: Path, ranks: int) -> None:
    assert json.loads((results / f"alike-{ranks}.json").read_text()) == ranks
