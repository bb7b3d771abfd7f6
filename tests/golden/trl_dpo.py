"""Asks TRL's DPOTrainer for loss, gradient and metrics of one batch, for each loss type: makes trl_dpo.json, which is beside it.

    /path/to/environment/bin/python -m tests.golden.trl_dpo      in an environment that has trl, peft and this project (benchmarks/peers/run.py makes one)

The policy is the quickstart's model; the reference is the same with all its parameters scaled, or with adapters the policy without them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

PLACE = Path(__file__).with_suffix(".json")
MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
REFERENCE_SCALE = 0.8
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
METRICS = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
METRICS += ["logps/chosen", "logps/rejected"]
LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "bco_pair", "nca_pair", "apo_zero", "apo_down", "sft")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name]} for name in LOSSES},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "several": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.3},
    "reference_free": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "reference_free": True},
    "lora": {"loss_type": ["sigmoid", "sft"], "lora": True},
}


def rows() -> list[dict[str, Any]]:
    """Return pairs of different lengths, some with several turns before them."""
    words = ["cab", "sort: gdbca", "a", "lkjihgfedcba", "sort: bbaa", "ed", "hgf", "jc"]
    chosen = ["abc", "abcdg", "a", "abcdefghijkl", "aabb", "de", "fgh", "cj"]
    rejected = ["acb", "bdgca", "aaaaaa", "lkjihgfedcba", "ab", "deed", "hfg", "jjjjjjjjc"]
    found = list[dict[str, Any]]()
    for at, word in enumerate(words):
        before = [{"role": "user", "content": "ba"}, {"role": "assistant", "content": "ab"}] if at % 3 == 0 else []
        row = {"prompt": [*before, {"role": "user", "content": word}]}
        for name, answer in {"chosen": chosen[at], "rejected": rejected[at]}.items():
            row[name] = [{"role": "assistant", "content": answer}]
        found.append(row)
    return found


def scaled(model: torch.nn.Module) -> torch.nn.Module:
    """Scale all parameters of the reference."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(REFERENCE_SCALE)
    return model


def fill_adapters(model: torch.nn.Module) -> None:
    """Give PEFT's adapters values that do not depend on a random generator."""
    named = sorted((name, parameter) for name, parameter in model.named_parameters() if "lora_" in name)
    with torch.no_grad():
        for at, (_, parameter) in enumerate(named):
            parameter.copy_(0.1 * torch.sin(0.37 * torch.arange(parameter.numel()) + at).view_as(parameter))


def answer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL says of the batch."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    own = {name: value for name, value in settings.items() if name not in ("reference_free", "lora")}
    lora = settings.get("lora", False)
    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for _ in range(2))
    with tempfile.TemporaryDirectory() as output:
        arguments = DPOConfig(output, bf16=False, use_cpu=True, report_to="none", gradient_checkpointing=False, **own)
        trainer = DPOTrainer(
            policy,
            None if lora else scaled(reference),
            arguments,
            train_dataset=Dataset.from_list(rows()),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if lora else None,
        )
        if lora:
            fill_adapters(trainer.model)
        batch = trainer.data_collator(list(trainer.train_dataset))
        if settings.get("reference_free"):
            trainer.precompute_ref_logps = True
            batch |= {f"ref_{name}_logps": torch.zeros(len(rows())) for name in ("chosen", "rejected")}
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    metrics = {name: trainer._metrics["train"][name][-1] for name in METRICS}
    norm = torch.nn.utils.get_total_norm(gradients).item()
    return {"loss": loss.item(), "grad_norm": norm, **metrics}


def tokens() -> list[dict[str, list[int]]]:
    """Return what TRL makes of the rows: token ids of prompts and answers."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    policy, reference = (AutoModelForCausalLM.from_pretrained(MODEL) for _ in range(2))
    with tempfile.TemporaryDirectory() as output:
        arguments = DPOConfig(output, bf16=False, use_cpu=True, report_to="none")
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        trainer = DPOTrainer(
            policy, reference, arguments, train_dataset=Dataset.from_list(rows()), processing_class=tokenizer
        )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{name: row[name] for name in names} for row in trainer.train_dataset]


def main() -> None:
    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    import trl

    torch.set_num_threads(1)
    cases = {name: {"settings": settings, "expected": answer(settings)} for name, settings in CASES.items()}
    value = {"trl": trl.__version__, "rows": rows(), "tokens": tokens(), "cases": cases}
    PLACE.write_text(json.dumps(value) + "\n")
    for name, case in cases.items():
        print(name, case["expected"])


if __name__ == "__main__":
    main()
