"""Supervised fine-tuning of the same rows by hpcrl and by TRL's SFTTrainer, each in a process of its own.

    python benchmarks/peers/supervised.py hpcrl|trl [--way padded|padding-free|packed] --model DIR --output FILE [--batches N]

A random model of 57 million parameters with a vocabulary of 22,016 learns rows of uneven lengths, log-normal around 200 tokens, 20 to 1,000; of each
every token but the first is predicted. A batch of 16 rows is an optimizer step. Number types, optimizer and learning rate are the same, and
neither recomputes activations. What differs is what a pass has: hpcrl's, rows laid end to end, at most 1,024 tokens (trainer.max_tokens_per_micro_batch),
or one longer row; TRL's, 8 rows (its default), in three ways:

padded         its default: rows as long as the longest of the 8
padding-free   padding_free=True: the 8 rows laid end to end
packed         packing=True: rows laid end to end up to 1,024 tokens, and as many steps' worth of them as there are; its batches are others, so
               its losses cannot be compared

transformers' scaled dot-product attention is given to TRL's; flash attention needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.peers.trainer import Taken

WAYS = ("padded", "padding-free", "packed")
ROWS, TRL_ROWS, TOKENS = 16, 8, 1024
_LR = 1e-4
_SHORTEST, _LONGEST, _MIDDLE, _SPREAD = 20, 1000, 5.3, 0.8
_FIRST, _VOCABULARY = 20, 22016


def draw_batches(count: int) -> list[list[list[int]]]:
    """Return the token ids of each row of each batch, the same each time."""
    source = random.Random(0)

    def row() -> list[int]:
        length = min(_LONGEST, max(_SHORTEST, round(source.lognormvariate(_MIDDLE, _SPREAD))))
        return [source.randrange(_FIRST, _VOCABULARY) for _ in range(length)]

    return [[row() for _ in range(ROWS)] for _ in range(count)]


def train_with_hpcrl(model: Path, batches: list[list[list[int]]]) -> Taken:
    """Train with the FSDP2 backend, on packed rows."""
    from benchmarks.random_qwen3 import ALONE
    from hpcrl.config import TrainerConfig
    from hpcrl.config.validate import build
    from hpcrl.trainer.backends.build import build_policy
    from hpcrl.trainer.distributed import joined
    from hpcrl.trainer.offline.likelihood import build_likelihood_objective

    optimizer = {"lr": _LR, "weight_decay": 0.0}
    table = {
        "mode": "sft",
        "policy": {"model": {"path": str(model)}, "optimizer_config": optimizer, "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}},
        "gradient_checkpointing": False,
    }  # fmt: skip
    config, taken = build(TrainerConfig, table), Taken([], [], [], [])
    os.environ |= ALONE
    with joined() as world:
        policy, objective = build_policy(config, 1.0, world), build_likelihood_objective(config.distillation)
        policy.schedule(len(batches))
        for batch in batches:
            began = monotonic()
            sums = policy.forward_backward(packed(batch).micro_batches(), objective)
            taken.losses.append(sums["final_loss"].item())
            taken.grad_norms.append(policy.step().grad_norm)
            taken.seconds.append(monotonic() - began)
            taken.tokens.append(sum(map(len, batch)))
    return taken


def packed(batch: list[list[int]]) -> Any:
    """Return a batch as hpcrl's trainer has it: rows packed into passes, with weights that make the loss the mean over the predicted tokens."""
    import torch

    from hpcrl.trainer.batching import MicroBatchLimit, RowRef, planned
    from hpcrl.trainer.packing import MiniBatch, pack
    from hpcrl.types import Row

    limit = MicroBatchLimit(1, TOKENS)
    refs = [RowRef(at, 0, len(row)) for at, row in enumerate(batch)]
    plan = planned(refs, 1, (limit, limit))
    samples, tokens = [], sum(len(row) - 1 for row in batch)
    for ref in plan.shares[0]:
        count = ref.length
        ids, mask = torch.tensor(batch[ref.group]), torch.tensor([0.0] + [1.0] * (count - 1))
        versions = torch.full((count,), -1, dtype=torch.int32)
        samples.append(Row(ids, mask, torch.zeros(count), versions, torch.zeros(count), "stop"))
    found = pack(samples, plan.shares[0])
    found.weights = [1 / tokens] * len(samples)
    return MiniBatch(plan, found, rank=0, tokens=tokens)


def train_with_trl(model: Path, batches: list[list[list[int]]], output: Path, way: str) -> Taken:
    """Train with SFTTrainer, to which the rows are given as tokens."""
    import sys

    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.step_times import StepTimes

    rows = [row for batch in batches for row in batch]
    whole, times = ROWS // TRL_ROWS, StepTimes(1, lambda *_: None)
    # as many tokens in a pass as 8 rows have on average
    a_pass = TRL_ROWS if way != "packed" else max(1, round(TRL_ROWS * sum(map(len, rows)) / len(rows) / TOKENS))
    arguments = SFTConfig(
        output_dir=str(output), use_cpu=True, bf16=False, gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=a_pass, gradient_accumulation_steps=whole, num_train_epochs=1, max_length=TOKENS if way == "packed" else None,
        train_sampling_strategy="sequential", packing=way == "packed", padding_free=way == "padding-free",
        learning_rate=_LR, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, dataloader_drop_last=way == "packed",
        save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=str(model),
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        callbacks=[times],
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    if way == "packed":
        lengths = [sum(row) for row in trainer.train_dataset["seq_lengths"]]  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue, reportOptionalSubscript]
        size = a_pass * whole
        tokens = [sum(lengths[at * size : (at + 1) * size]) for at in range(len(times.seconds))]
        return Taken(times.seconds, tokens, [], [])
    tokens = [sum(map(len, batch)) for batch in batches]
    return Taken(times.seconds, tokens, [one["loss"] for one in steps], [one["grad_norm"] for one in steps])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tool", choices=("hpcrl", "trl"))
    parser.add_argument("--way", choices=("", *WAYS), default="")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=3)
    arguments = parser.parse_args()
    batches = draw_batches(arguments.batches)
    if arguments.tool == "hpcrl":
        taken = train_with_hpcrl(arguments.model, batches)
    else:
        taken = train_with_trl(arguments.model, batches, arguments.output.parent, arguments.way)
    arguments.output.write_text(json.dumps(vars(taken)))


if __name__ == "__main__":
    main()
