"""Measures optimizer steps of a policy by the length of its samples, without a run."""

from __future__ import annotations

import time
from statistics import median

import torch

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.config.token_limits import largest_micro_batch
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.distributed import World
from hpcrl.trainer.family import trainer_family
from hpcrl.trainer.models.flops import describe_flops
from hpcrl.types import MicroBatch

_LEAST_TOKENS = 256
_WARM, _STEPS = 2, 3


def speed_by_length(config: Config, world: World) -> dict[int, tuple[float, float]]:
    """Return tokens per second of a rank and MFU, 0 where the device's peak is not known, by the length of the samples; all ranks call it.

    Each rank trains a micro-batch of random tokens per step, as large as those of a run: of one sample, of four and of sixteen.
    Empty for policies that read more than tokens, and with Megatron-core, whose ranks share samples otherwise.
    """
    if config.trainer.strategy != "fsdp2" or not family_of(config).writes_texts:
        return {}
    tokens = max(_LEAST_TOKENS, largest_micro_batch(config))
    family = trainer_family(config)
    policy, objective, flops = family.load_policy(config, world), family.objective(config), family.flops(config)
    policy.schedule(1000)
    found = dict[int, tuple[float, float]]()
    for count in (16, 4, 1):
        samples = [tokens // count] * count
        batch = random_micro_batch(samples, policy.vocabulary, 1 / (tokens * world.size))
        seconds = world.max([_step_seconds(policy, objective, batch, world.device)])[0]
        work = flops.training(samples, sum(samples) - count) * world.size
        rates = describe_flops(work, seconds, world.size, world.device, config.trainer.peak_tflops)
        found[tokens // count] = sum(samples) / seconds, rates.get("throughput/mfu", 0.0)
    return found


def _step_seconds(policy: PolicyEngine, objective: Objective, batch: MicroBatch, device: torch.device) -> float:
    took = []
    for _ in range(_WARM + _STEPS):
        began = time.perf_counter()
        policy.forward_backward([batch], objective)
        policy.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return median(took[_WARM:])


def random_micro_batch(lengths: list[int], vocabulary: int, weight: float) -> MicroBatch:
    """Return samples of these lengths with random tokens, of which every token but the last of each is trained.

    Args:
        weight: of each trained token in the loss.
    """
    total = sum(lengths)
    ids = torch.randint(vocabulary, (total,))
    mask = torch.ones(total)
    mask[torch.tensor(lengths).cumsum(0) - 1] = 0
    return MicroBatch(
        token_ids=ids,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        lengths=lengths,
        labels=ids.roll(-1),
        loss_mask=mask,
        weights=mask * weight,
        nll_weights=torch.zeros(total),
        observation_weights=torch.zeros(total),
        rollout_logprobs=torch.full((total,), -5.0),
        ref_logprobs=torch.full((total,), -5.0),
        advantages=torch.randn(total),
    )
