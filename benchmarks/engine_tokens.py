"""What n-gram drafts gain on vLLM: tokens per second, and per second of the processor, of one server with them and one without, in turns.

    python benchmarks/engine_tokens.py MODEL [--drafts 4] [--prompts 8] [--tokens 96] [--rounds 3]

MODEL is a released model with its chat template, such as configs/recipes/smollm2/model. Two servers in float32, of which one has so many n-gram
drafts per pass, take rounds in turns: greedy answers that repeat a text of the prompt. Medians are printed, what was accepted, and the largest difference
between the log-probabilities of the same tokens. A first round, which is not measured, warms up. `hpcrl bench` measures an engine by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from hpcrl.config import InferenceEngineConfig
from hpcrl.config.sections.generator import SpeculativeConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.engines.vllm.processes import group_of
from hpcrl.engines.vllm.server import Server, ServerOptions
from hpcrl.rollout.engines.base import Drafts, Engine, Generation

_RUN, _TOKEN = "measured", "a-token-of-the-benchmark"
_START_S = 600.0
_WORDS = 50
_SYLLABLES = [first + vowel for first in "bdfgklmnprst" for vowel in "aeiou"]
_OF_TWO = 0.4
"""Share of a GPU's memory for each of two servers."""


def processor_seconds(leader: int) -> float:
    """Return the processor time of all processes of a group."""
    found = 0.0
    for pid in group_of(leader):
        stat = Path(f"/proc/{pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def random_text(draw: random.Random) -> str:
    """Return words of one to four syllables, which no model knows by heart."""
    return " ".join("".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4))) for _ in range(_WORDS))


def repeating(model: Path, count: int) -> list[list[int]]:
    """Return prompts that ask to repeat a random text, as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [random_text(random.Random(number)) for number in range(count)]
    asked = [[{"role": "user", "content": f"Repeat this text word for word, twice:\n\n{text}"}] for text in texts]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in asked]


async def answer(engine: Engine, pid: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return the answers to prompts that are asked together, tokens per second, and per second of the processor."""
    sampling = {"temperature": 0.0, "max_tokens": tokens}
    before, began = processor_seconds(pid), time.monotonic()
    found = await asyncio.gather(*(engine.generate(prompt, 1, 1, sampling) for prompt in prompts))
    seconds, answers = time.monotonic() - began, [one for (one,) in found]
    made = sum(len(one.token_ids) for one in answers)
    own = processor_seconds(pid) - before
    return {"answers": answers, "tokens/s": made / seconds, "tokens/cpu s": made / own}


def difference(one: list[Generation], other: list[Generation]) -> tuple[int, float]:
    """Return how many tokens are the same before the first that differs in an answer, and how far their log-probabilities are apart."""
    same, most = 0, 0.0
    for first, second in zip(one, other, strict=True):
        pairs = list(zip(first.token_ids, second.token_ids, strict=False))
        count = next((place for place, (left, right) in enumerate(pairs) if left != right), len(pairs))
        apart = zip(first.logprobs[:count], second.logprobs[:count], strict=True)
        same, most = same + count, max([most, *(abs(left - right) for left, right in apart)])
    return same, most


async def compare(servers: list[Server], prompts: list[list[int]], given: argparse.Namespace) -> dict[str, Any]:
    """Return figures of a server without drafts, and of one with them."""
    engines = [server.connect() for server in servers]
    try:
        rounds = list[list[dict[str, Any]]]()
        before = Drafts()
        for number in range(given.rounds + 1):
            asked = [
                await answer(engine, server.pid, prompts, given.tokens)
                for engine, server in zip(engines, servers, strict=True)
            ]
            if number:
                rounds.append(asked)
                continue
            await engines[1].load()  # that round warmed up
            before = engines[1].drafts or before
        await engines[1].load()
    finally:
        for engine in engines:
            await engine.close()
    rates = {
        name: [round(median(each[place][name] for each in rounds), 1) for place in (0, 1)]
        for name in ("tokens/s", "tokens/cpu s")
    }
    same, most = difference(*(one["answers"] for one in rounds[-1]))
    made = sum(len(one.token_ids) for one in rounds[-1][0]["answers"])
    drafts = engines[1].drafts.metrics(before) if engines[1].drafts else {}
    return {**rates, "same tokens": f"{same} of {made}", "logprobs differ by": most, **drafts}


def serve(model: Path, section: InferenceEngineConfig, length: int, name: str, stack: ExitStack) -> Server:
    """Return a server that is ready; `stack` ends it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    token = folder / "token"
    token.write_text(_TOKEN + "\n")
    token.chmod(0o600)
    on_cpu = not torch.cuda.is_available()
    options = ServerOptions(Pretrained(str(model)), section, 1, length, on_cpu, _RUN, token)
    server = Server(options, folder, folder / f"{name}.log")
    stack.callback(server.stop)
    server.wait_ready(_START_S)
    return server


def with_drafts(given: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Start both servers, and return their figures."""
    prompts = repeating(given.model, given.prompts)
    length = max(map(len, prompts)) + given.tokens
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=given.drafts)
    sections = [
        InferenceEngineConfig(
            model_dtype="float32", max_num_seqs=given.prompts, gpu_memory_utilization=_OF_TWO, speculative=each
        )
        for each in (SpeculativeConfig(), drafts)
    ]
    servers = [serve(given.model, section, length, str(place), stack) for place, section in enumerate(sections)]
    return asyncio.run(compare(servers, prompts, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=lambda text: Path(text).resolve(), help="its folder")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per pass")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3, help="of each server, after one that warms up")
    given = parser.parse_args()
    with ExitStack() as stack:
        print(json.dumps(with_drafts(given, stack)))


if __name__ == "__main__":
    main()
