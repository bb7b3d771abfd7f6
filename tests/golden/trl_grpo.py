"""Asks TRL's GRPOTrainer for the losses vespo and luspo of given log-probabilities, and for the advantages of GDPO of answers that it samples: makes
trl_grpo.json, which is beside it.

    /path/to/environment/bin/python -m tests.golden.trl_grpo      in an environment that has trl (benchmarks/peers/run.py makes one)

The trainer's own `_compute_loss` gets tensors in the place of the model's outputs. GDPO is the trainer's multi_objective_aggregation="normalize_then_sum".
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

PLACE = Path(__file__).with_suffix(".json")
MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"
LENGTHS = (5, 3, 7, 1, 4, 6)
ADVANTAGES = (1.2, -0.7, 0.3, -1.5, 0.0, -0.2)
GROUP, WEIGHTS, LONGEST = 4, {"letters": 1.0, "rising": 0.3}, 8
CASES: dict[str, dict[str, Any]] = {
    "vespo": {"loss_type": "vespo"},
    "vespo_settings": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 0.5, "vespo_lambda_neg": 4.0,
    },
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15},
}  # fmt: skip


def letters(completions: list[Any], **_: Any) -> list[float]:
    """Reward different letters."""
    return [float(len(set(_text(one)))) for one in completions]


def rising(completions: list[Any], **_: Any) -> list[float]:
    """Reward an answer by how many letters come after a smaller one."""
    return [float(sum(one < other for one, other in pairwise(_text(said)))) for said in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def tensors() -> dict[str, torch.Tensor]:
    """Return log-probabilities of policy and old policy, and the mask, [B, T]; the second trained token of a sample is masked, as a tool's is."""
    draw = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    logprobs = -3 * torch.rand(shape, generator=draw)
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).float()
    mask[2, 1] = 0
    return {"logprobs": logprobs, "old": logprobs + 0.2 * torch.randn(shape, generator=draw), "mask": mask}


def trainer_of(output: str, **settings: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    common = {"bf16": False, "use_cpu": True, "report_to": "none", "gradient_checkpointing": False, "beta": 0.0}
    common |= {"num_generations": GROUP, "per_device_train_batch_size": 2 * GROUP, "gradient_accumulation_steps": 1}
    common |= {"max_completion_length": LONGEST}
    prompts = [{"prompt": [{"role": "user", "content": word}]} for word in ("sort: gdbca", "cab", "lkj", "ed")]
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        [letters, rising],
        GRPOConfig(output, **common | settings),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def loss_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's loss, and its gradient, [B, T]."""
    given = tensors()
    leaf, mask = given["logprobs"].clone().requires_grad_(), given["mask"]
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of(output, **settings)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(mask), None)
        ids = torch.ones(mask.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
            "advantages": torch.tensor(ADVANTAGES), "old_per_token_logps": given["old"], "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert leaf.grad is not None
    return {"loss": loss.item(), "gradient": leaf.grad.tolist()}


def gdpo() -> dict[str, Any]:
    """Return rewards of answers that TRL samples, and what it makes advantages of them."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of(
            output, multi_objective_aggregation="normalize_then_sum", reward_weights=list(WEIGHTS.values())
        )
        rows = [trainer.train_dataset[at] for at in (0, 1)]
        found = trainer._generate_and_score_completions([row for row in rows for _ in range(GROUP)])
    rewards = {name: list(trainer._logs["rewards"][name]) for name in WEIGHTS}
    return {"rewards": rewards, "weights": WEIGHTS, "group": GROUP, "advantages": found["advantages"].tolist()}


def main() -> None:
    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    import trl

    torch.set_num_threads(1)
    cases = {name: {"settings": settings, "expected": loss_of(settings)} for name, settings in CASES.items()}
    given = {name: values.tolist() for name, values in tensors().items()}
    value = {"trl": trl.__version__, **given, "advantages": ADVANTAGES, "cases": cases, "gdpo": gdpo()}
    PLACE.write_text(json.dumps(value) + "\n")
    print({name: case["expected"]["loss"] for name, case in cases.items()}, value["gdpo"])


if __name__ == "__main__":
    main()
