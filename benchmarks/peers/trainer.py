"""The trainers alone: each of the tools trains the same given samples, of uneven length, and says what it took and what the loss was.

    python benchmarks/peers/trainer.py TOOL --way WAY --model DIR --output FILE [--prompt N] [--batches N]

run.py starts it once per tool and way, with the Python of that tool. A batch is 16 samples in groups of 8; both tools first compute the log-probabilities of
the policy as it is, then make two optimizer steps, each over the whole batch in micro-batches of a group. In the first of them the ratio to the old policy is 1 everywhere; the loss of the
second depends on what the first has changed. `recomputed` computes activations again in backward, as both tools do by default.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

OWN_WAYS: dict[str, dict[str, Any]] = {
    "": {"gradient_checkpointing": False},
    "shared prefixes": {"gradient_checkpointing": False, "shared_prefixes": True},
    "recomputed": {},
    "recomputed but attention": {"gradient_checkpointing_keep": "attention"},
    "shared prefixes, recomputed": {"shared_prefixes": True},
}
"""Settings of hpcrl's trainer in each way."""
WAYS = ("", "recomputed")
"""Those of TRL."""
GROUPS, SAMPLES, UPDATES = 2, 8, 2
_LR, _CLIP = 1e-4, 0.2
_SHORTEST, _LONGEST = 4, 128
_TOKENS = range(5, 17)  # of the quickstart's tokenizer, with which TRL turns answers into text
_VOCABULARY = 22016


@dataclass(frozen=True)
class Answer:
    """One given sample: token ids of prompt and answer, the reward of the answer, and the advantage in its group (reward - mean)."""

    prompt: list[int]
    answer: list[int]
    reward: float
    advantage: float


@dataclass
class Taken:
    """What the training took: of each batch the seconds and tokens, of each optimizer step loss and norm of the gradient."""

    seconds: list[float]
    tokens: list[int]
    losses: list[float]
    grad_norms: list[float]


def draw_batches(count: int, prompt_tokens: int) -> list[list[Answer]]:
    """Return batches, the same each time; lengths of answers are log-normal around 24 tokens."""
    source, batches = random.Random(0), []
    for _ in range(count):
        batch = []
        for _ in range(GROUPS):
            prompt = source.choices(_TOKENS, k=prompt_tokens)
            lengths = [min(_LONGEST, max(_SHORTEST, round(source.lognormvariate(3.2, 0.9)))) for _ in range(SAMPLES)]
            rewards = [source.random() for _ in lengths]
            batch += [
                Answer(prompt, source.choices(_TOKENS, k=length), reward, reward - fmean(rewards))
                for length, reward in zip(lengths, rewards, strict=True)
            ]
        batches.append(batch)
    return batches


def make_model(place: Path) -> None:
    """Write a random model of 56 million parameters."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from benchmarks.peers.work import QUICKSTART

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART.parent / "quickstart" / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)


def train_with_hpcrl(model: Path, batches: list[list[Answer]], way: str) -> Taken:
    """Train with the FSDP2 backend, on packed samples."""
    from benchmarks.random_qwen3 import ALONE
    from hpcrl.config import TrainerConfig
    from hpcrl.config.validate import build
    from hpcrl.trainer.backends.build import build_policy
    from hpcrl.trainer.distributed import joined
    from hpcrl.trainer.loss import build_objective

    optimizer = {"lr": _LR, "weight_decay": 0.0}
    table = {
        "policy": {"model": {"path": str(model)}, "optimizer_config": optimizer, "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}},
        "algorithm": {"use_kl_loss": False, "eps_clip_low": _CLIP, "eps_clip_high": _CLIP},
        **OWN_WAYS[way],
    }  # fmt: skip
    config, taken = build(TrainerConfig, table), Taken([], [], [], [])
    os.environ |= ALONE
    with joined() as world:
        policy, objective = build_policy(config, 1.0, world), build_objective(config.algorithm)
        policy.schedule(UPDATES * len(batches))
        for batch in batches:
            began = time.monotonic()
            mini = packed(batch)
            if config.shared_prefixes:
                mini.rows.share_prefixes()
            mini.rows.scores.old_logprobs = mini.scored(policy.logprobs)
            for _ in range(UPDATES):
                sums = policy.forward_backward(mini.micro_batches(), objective)
                taken.losses.append(sums["final_loss"].item())
                taken.grad_norms.append(policy.step().grad_norm)
            taken.seconds.append(time.monotonic() - began)
            taken.tokens.append(sum(mini.rows.lengths))
    return taken


def packed(batch: list[Answer]) -> Any:
    """Return a batch as hpcrl's trainer has it: its samples packed, with weights that make the loss the mean over tokens, and advantages."""
    import torch

    from hpcrl.trainer.batching import MicroBatchLimit, RowRef, planned
    from hpcrl.trainer.packing import MiniBatch, pack
    from hpcrl.types import Row

    refs = [RowRef(at // SAMPLES, at % SAMPLES, len(one.prompt) + len(one.answer)) for at, one in enumerate(batch)]
    limit = MicroBatchLimit(SAMPLES)
    plan = planned(refs, 1, (limit, limit))
    chosen = [batch[ref.group * SAMPLES + ref.index] for ref in plan.shares[0]]
    tokens = sum(len(one.answer) for one in chosen)
    samples = []
    for one in chosen:
        mask = torch.tensor([0.0] * len(one.prompt) + [1.0] * len(one.answer))
        ids, zeros = torch.tensor(one.prompt + one.answer), torch.zeros_like(mask)
        samples.append(Row(ids, mask, zeros, mask.int() - 1, zeros, "stop"))
    found = pack(samples, plan.shares[0])
    found.weights = [1 / tokens] * len(samples)
    advantages_B = torch.tensor([one.advantage for one in chosen])
    found.scores.advantages = advantages_B.repeat_interleave(torch.tensor(found.lengths))
    return MiniBatch(plan, found, rank=0, tokens=tokens)


def train_with_trl(model: Path, batches: list[list[Answer]], output: Path, way: str) -> Taken:
    """Train with GRPOTrainer, to which the samples are given by its rollout_func."""
    import sys

    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.step_times import StepTimes

    given, batch = iter(batches), list[Answer]()

    def rollout(*_: Any) -> dict[str, Any]:
        batch[:] = next(given)
        ids = {"prompt_ids": [one.prompt for one in batch], "completion_ids": [one.answer for one in batch]}
        return {**ids, "logprobs": None}

    def reward(**_: Any) -> list[float]:
        return [one.reward for one in batch]

    times = StepTimes(UPDATES, lambda *_: None)
    arguments = GRPOConfig(
        output_dir=str(output), use_cpu=True, bf16=False, gradient_checkpointing=way == "recomputed", model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=GROUPS, steps_per_generation=GROUPS, num_iterations=UPDATES,
        num_generations=SAMPLES, max_steps=UPDATES * len(batches), max_completion_length=_LONGEST, scale_rewards="none", beta=0.0,
        loss_type="dapo", epsilon=_CLIP, learning_rate=_LR, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model),
        args=arguments,
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUPS * len(batches)),
        callbacks=[times],
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    tokens = [sum(len(one.prompt) + len(one.answer) for one in batch) for batch in batches]
    return Taken(times.seconds, tokens, [one["loss"] for one in steps], [one["grad_norm"] for one in steps])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tool", choices=("hpcrl", "trl"))
    parser.add_argument("--way", choices=OWN_WAYS, default="")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--batches", type=int, default=3)
    arguments = parser.parse_args()
    batches = draw_batches(arguments.batches, arguments.prompt)
    if arguments.tool == "hpcrl":
        taken = train_with_hpcrl(arguments.model, batches, arguments.way)
    else:
        taken = train_with_trl(arguments.model, batches, arguments.output.parent, arguments.way)
    arguments.output.write_text(json.dumps(vars(taken)))


if __name__ == "__main__":
    main()
