"""Asks TRL's RewardTrainer for loss, gradient and metrics of one batch of pairs: makes trl_reward.json, which is beside it.

    /path/to/environment/bin/python -m tests.golden.trl_reward   in an environment that has trl, peft and this project (benchmarks/peers/run.py makes one)

The model is the quickstart's, with a head whose weights follow a formula.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.golden.trl_dpo import LORA, MODEL, fill_adapters, rows

PLACE = Path(__file__).with_suffix(".json")
METRICS = ("accuracy", "margin", "mean_reward")
MARGINS = (0.0, 0.5, 2.0, 0.1, 0.0, 1.5, 0.25, 3.0)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "centered": {"center_rewards_coefficient": 0.05},
    "margins": {"margins": True, "center_rewards_coefficient": 0.01},
    "lora": {"lora": True},
}


def fill_head(model: Any) -> None:
    """Give the head values that do not depend on a random generator."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("score.weight", "score.modules_to_save.default.weight")):
                parameter.copy_(torch.cos(0.7 * torch.arange(parameter.numel())).view_as(parameter))


def answer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL says of the batch."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    own = {name: value for name, value in settings.items() if name == "center_rewards_coefficient"}
    said = [
        row | ({"margin": margin} if settings.get("margins") else {})
        for row, margin in zip(rows(), MARGINS, strict=True)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    lora = {**LORA, "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]}
    adapters = LoraConfig(task_type="SEQ_CLS", modules_to_save=["score"], **lora) if settings.get("lora") else None
    with tempfile.TemporaryDirectory() as output:
        arguments = RewardConfig(
            output, bf16=False, use_cpu=True, report_to="none", gradient_checkpointing=False, **own
        )
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        trainer = RewardTrainer(
            model, arguments, train_dataset=Dataset.from_list(said), processing_class=tokenizer, peft_config=adapters
        )
        fill_head(trainer.model)
        if adapters:
            fill_adapters(trainer.model)
        batch = trainer.data_collator(list(trainer.train_dataset))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    metrics = {name: trainer._metrics["train"][name][-1] for name in METRICS}
    tokens = [{name: row[name] for name in ("chosen_ids", "rejected_ids")} for row in trainer.train_dataset]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    return {"expected": {"loss": loss.item(), "grad_norm": norm, **metrics}, "tokens": tokens}


def main() -> None:
    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    import trl

    torch.set_num_threads(1)
    found = {name: answer(settings) for name, settings in CASES.items()}
    cases = {name: {"settings": settings, "expected": found[name]["expected"]} for name, settings in CASES.items()}
    value = {"trl": trl.__version__, "rows": rows(), "tokens": found["plain"]["tokens"], "cases": cases}
    PLACE.write_text(json.dumps(value) + "\n")
    for name, case in cases.items():
        print(name, case["expected"])


if __name__ == "__main__":
    main()
