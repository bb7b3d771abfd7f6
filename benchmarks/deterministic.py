"""What trainer.deterministic costs on CPUs: processor seconds of the embedded engine and of an FSDP2 trainer, with it and without, in turns.

    python benchmarks/deterministic.py MODEL [--prompts 4] [--samples 4] [--tokens 32] [--rounds 3]

Prints one line of JSON: medians, and the largest difference between the log-probabilities of engine and trainer. One thread computes.
`alone` is an engine that generates one sample after the other, as trainer.deterministic has it, but not in blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from hpcrl.config import Config
from hpcrl.engines.embedded.rollout import Embedded, embedded_options
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.types import MicroBatch, Row

_PROMPT, _START_S = 24, 600.0


def settings(model: str, *, deterministic: bool) -> Config:
    return Config.from_dict(
        {
            "data": {"train_data": ["train.jsonl"], "val_data": ["val.jsonl"]},
            "trainer": {
                "deterministic": deterministic,
                "max_steps": 1,
                "gradient_checkpointing": False,
                "policy": {
                    "model": {"path": model},
                    "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
                },
            },
            "generator": {"inference_engine": {"backend": "transformers", "model_dtype": "float32"}},
            "environment": {"env_class": "sort_letters"},
        }
    )


async def generated(engine: Engine, given: argparse.Namespace) -> list[tuple[list[int], Generation]]:
    sampling = {"temperature": 1.0, "max_tokens": given.tokens, "ignore_eos": True}
    prompts = [[3 + (number + at) % 14 for at in range(_PROMPT)] for number in range(given.prompts)]
    asked = [engine.generate(prompt, given.samples, 7, sampling) for prompt in prompts]
    groups = await asyncio.gather(*asked)
    return [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]


def packed(samples: list[tuple[list[int], Generation]]) -> PackedRows:
    rows = list[Row[torch.Tensor]]()
    for prompt, said in samples:
        before = torch.zeros(len(prompt))
        rows.append(
            Row(
                token_ids=torch.tensor([*prompt, *said.token_ids]),
                loss_mask=torch.cat([before, torch.ones(len(said.token_ids))]),
                rollout_logprobs=torch.cat([before, torch.tensor(said.logprobs)]),
                versions=torch.cat([before - 1, torch.zeros(len(said.token_ids))]).int(),
                rewards=torch.zeros(len(prompt) + len(said.token_ids)),
                stop_reason="length",
            )
        )
    return pack(rows)


def trained(policy: FsdpPolicy, batch: MicroBatch) -> float:
    """Compute gradients; return the largest difference of log-probabilities."""
    apart = list[float]()

    def objective(of: MicroBatch, logprobs_P: torch.Tensor, *_: torch.Tensor) -> Any:
        apart.append(float((logprobs_P.detach() - of.rollout_logprobs)[of.loss_mask > 0].abs().max()))
        return -(logprobs_P * of.loss_mask).sum(), {}

    policy.forward_backward([batch], objective)
    policy.skip()
    return max(apart)


def measured(world: World, given: argparse.Namespace) -> dict[str, Any]:
    seconds = dict[str, list[float]]()
    apart = {"plain": 0.0, "deterministic": 0.0}
    configs = {name: settings(given.model, deterministic=name == "deterministic") for name in apart}
    options = {name: embedded_options(config) for name, config in configs.items()}
    options["alone"] = replace(options["deterministic"], in_blocks=False)
    engines = dict[str, Embedded]()
    for name, one in options.items():  # transformers loads one model of a process at a time
        engines[name] = Embedded(one)
        engines[name].wait_ready(_START_S)
    policies = {name: FsdpPolicy(config.trainer, 1.0, world) for name, config in configs.items()}
    for number in range(1 + given.rounds):  # the first one is not measured
        for name, engine in engines.items():
            began = time.process_time()
            samples = asyncio.run(generated(engine.connect(), given))
            middle = time.process_time()
            if number:
                seconds.setdefault(f"generate, {name}", []).append(middle - began)
            if name not in policies:
                continue
            apart[name] = max(apart[name], trained(policies[name], packed(samples).whole()))
            if number:
                seconds.setdefault(f"train, {name}", []).append(time.process_time() - middle)
    for engine in engines.values():
        engine.stop()
    found = {name: round(median(values), 3) for name, values in seconds.items()}
    return {"model": given.model, "seconds": found, "largest difference": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for name, value in (("prompts", 4), ("samples", 4), ("tokens", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    with joined() as world:
        print(json.dumps(measured(world, parser.parse_args())))


if __name__ == "__main__":
    main()
