"""Measures the tokens per second of one replica by the lengths of prompts and completions, without a run."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.rollout.engines.base import Engine, Launched, engine_sampling
from hpcrl.rollout.engines.launch import launched
from hpcrl.rollout.engines.watchdog import run_watched
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.runtime.token import make_secret

_LONGEST, _SAMPLES = 2048, 128
_PARTS = 16


def engine_speed_by_length(config: Config, folder: Run, log: Path) -> dict[tuple[int, int], float]:
    """Start a replica on this node, and return the tokens that it generates per second, by the tokens of a prompt and of a completion.

    Prompts are random, and asked for together in groups, as a training step asks one replica: 128 samples at most, of 2,048 tokens at most.
    Short is a sixteenth of that, long is the rest. Empty for policies that write no texts, replicas on several nodes and remote servers.

    Args:
        folder: where the engine finds a token.
        log: of the engine.

    Raises:
        EngineError: it does not start, fails or hangs, with the end of its log.
    """
    engine = config.generator.inference_engine
    if not family_of(config).writes_texts or config.engine_nodes > 1 or engine.remote_urls:
        return {}
    make_directory(folder.token.parent)
    make_secret(folder.token)
    with launched(folder, config, log, trains=False) as replica:
        replica.wait_ready(engine.start_timeout_seconds)
        return asyncio.run(_measure(config, replica))


async def _measure(config: Config, replica: Launched) -> dict[tuple[int, int], float]:
    model = config.trainer.policy.model
    vocabulary = read_tokenizer(model.path, **model.pretrained.at_revision).vocab_size
    length = min(config.max_model_len, _LONGEST)
    short = max(1, length // _PARTS)
    shapes = [(short, short), (short, length - short), (length - short, short)]
    engine, limits = replica.connect(), config.generator.inference_engine

    async def all_shapes() -> dict[tuple[int, int], float]:
        await _speed(config, engine, vocabulary, *shapes[0])  # warms up
        return {shape: await _speed(config, engine, vocabulary, *shape) for shape in shapes}

    try:
        return await run_watched(
            replica, engine, [all_shapes()], limits.stall_timeout_seconds, limits.start_timeout_seconds
        )
    finally:
        await engine.close()


async def _speed(config: Config, engine: Engine, vocabulary: int, prompt: int, completion: int) -> float:
    """Return tokens generated per second."""
    samples = min(config.generator.n_samples_per_prompt, _SAMPLES)
    groups = -(-config.trainer.train_batch_size // config.generator.inference_engine.engines)
    groups = min(groups, _SAMPLES // samples)
    own: dict[str, Any] = {"max_tokens": completion, "ignore_eos": True, "stop": [], "stop_token_ids": []}
    sampling = engine_sampling(config.generator.sampling_params, "train", vocabulary) | own
    prompts = [random.choices(range(vocabulary), k=prompt) for _ in range(groups)]
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(engine.generate(ids, samples, number * samples, sampling) for number, ids in enumerate(prompts))
    )
    return sum(len(one.token_ids) for answer in answers for one in answer) / (time.perf_counter() - began)
