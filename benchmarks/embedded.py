"""How long 512 samples of the quickstart take in one process: the embedded engine, and what transformers has of its own.

    python benchmarks/embedded.py [--repetitions N] [--threads N]

64 prompts of the validation data, 8 samples of at most 8 tokens each. The ways take turns, so that other work on the machine meets all of them; medians.
`generate` is given the prompts eight times over, as one batch; `generate_batch` is transformers' continuous batching.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hpcrl.config.sections.generator import ChatTemplateConfig, InferenceEngineConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.turns import ChatTurns
from hpcrl.data.model_config import ConfiguredModel
from hpcrl.data.prompts import load_prompts
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.rollout.engines.embedded.launch import Embedded, EmbeddedOptions
from hpcrl.rollout.engines.embedded.model import load_model

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart"
_PROMPTS, _SAMPLES, _TOKENS = 64, 8, 8


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(Pretrained(str(QUICKSTART / "model")), ChatTemplateConfig())
    rows = load_prompts([str(QUICKSTART / "data" / "validation.parquet")], None)[:_PROMPTS]
    return [ChatTurns(tokenizer, {}).opening(row.messages).token_ids for row in rows]


def ways(given: list[list[int]]) -> Mapping[str, Callable[[], int]]:
    """Return functions that generate all samples and return how many tokens these have."""
    model = ConfiguredModel(path=str(QUICKSTART / "model"), role="trainer.policy")
    launched = Embedded(EmbeddedOptions(model, InferenceEngineConfig(model_dtype="float32"), 32, True))
    launched.wait_ready(60)
    own = load_model(model, "float32", torch.device("cpu"))
    batch = torch.tensor([prompt for prompt in given for _ in range(_SAMPLES)])
    bounded = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=1024)  # else it takes the machine's memory
    sampled = GenerationConfig(max_new_tokens=_TOKENS, do_sample=True, pad_token_id=0, eos_token_id=1)

    def embedded() -> int:
        async def play() -> int:
            engine, sampling = launched.connect(), {"max_tokens": _TOKENS}
            requests = (engine.generate(prompt, _SAMPLES, at, sampling) for at, prompt in enumerate(given))
            return sum(len(said.token_ids) for group in await asyncio.gather(*requests) for said in group)

        return asyncio.run(play())

    def generate() -> int:
        said = own.generate(batch, attention_mask=torch.ones_like(batch), generation_config=sampled)  # pyright: ignore[reportCallIssue]
        return int((said[:, batch.shape[1] :] != 0).sum())

    def generate_batch() -> int:
        found = own.generate_batch(  # pyright: ignore[reportCallIssue]
            batch.tolist(), generation_config=sampled, continuous_batching_config=bounded, persistent_manager=True
        )
        return sum(len(one.generated_tokens) for one in found.values())

    return {"embedded": embedded, "generate": generate, "generate_batch": generate_batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    seconds = dict[str, list[float]]()
    tokens = dict[str, int]()
    found = ways(prompts())
    for _ in range(arguments.repetitions + 1):
        for name, way in found.items():
            began = time.monotonic()
            tokens[name] = way()
            seconds.setdefault(name, []).append(time.monotonic() - began)
    for name, own in seconds.items():  # the first of each warms up
        print(f"{name:15} {median(own[1:]) * 1000:7.0f} ms, {tokens[name]} tokens")


if __name__ == "__main__":
    main()
