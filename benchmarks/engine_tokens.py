"""How many tokens a second one vLLM server gives its client, and what its API server and its engine take of a core meanwhile.

    python benchmarks/engine_tokens.py MODEL [--prompts 32] [--samples 32] [--tokens 512] [--logprobs 0 20] [--tiny]
    python benchmarks/engine_tokens.py MODEL --drafts 4 --prompts 8 --tokens 96 [--rounds 3]

MODEL is a folder with the random Qwen3 of benchmarks/random_qwen3.py, which gets the quickstart's tokenizer. Prompts are asked for together, as a rollout
worker asks; a first round, which is not measured, warms up. Prints one line of JSON.

With --drafts, MODEL is a released model with its chat template, such as configs/recipes/smollm2/model. Two servers in float32, of which one has so many n-gram
drafts per pass, take rounds in turns: greedy answers that repeat a text of the prompt. Medians are printed, what was accepted, and the largest difference
between the log-probabilities of the same tokens.
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
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Drafts, Engine, Generation

_TOKENIZER = Path(__file__).parents[1] / "configs" / "quickstart" / "model"
_RUN, _TOKEN = "measured", "a-token-of-the-benchmark"
_START_S = 600.0
_WORDS = 50
_SYLLABLES = [first + vowel for first in "bdfgklmnprst" for vowel in "aeiou"]
_OF_TWO = 0.4
"""Share of a GPU's memory for each of two servers."""


def processor_seconds(leader: int) -> dict[str, float]:
    """Return the processor time of each process of a group, by its name."""
    found: dict[str, float] = {}
    for pid in group_of(leader):
        stat = Path(f"/proc/{pid}/stat").read_text()
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found[name] = found.get(name, 0.0) + seconds
    return found


async def measure(server: Server, given: argparse.Namespace) -> list[dict[str, Any]]:
    engine, rows = server.connect(), list[dict[str, Any]]()
    sampling = {"temperature": 1.0, "max_tokens": given.tokens, "ignore_eos": True}
    try:
        for number, logprobs in enumerate([given.logprobs[0], *given.logprobs]):
            before, began = processor_seconds(server.pid), time.monotonic()
            own = {**sampling, "logprobs": logprobs}
            requests = (
                engine.generate([5 + prompt, 7, 9, 11], given.samples, 1000 * prompt, own)
                for prompt in range(given.prompts)
            )
            await asyncio.gather(*requests)
            seconds = time.monotonic() - began
            after = processor_seconds(server.pid)
            cores = {name: round((after[name] - before.get(name, 0.0)) / seconds, 2) for name in after}
            rate = round(given.prompts * given.samples * given.tokens / seconds)
            if number:
                rows.append({"logprobs": logprobs, "tokens/s": rate, "seconds": round(seconds, 2), "cores": cores})
    finally:
        await engine.close()
    return rows


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
    before, began = sum(processor_seconds(pid).values()), time.monotonic()
    found = await asyncio.gather(*(engine.generate(prompt, 1, 1, sampling) for prompt in prompts))
    seconds, answers = time.monotonic() - began, [one for (one,) in found]
    made = sum(len(one.token_ids) for one in answers)
    own = sum(processor_seconds(pid).values()) - before
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


def with_tokenizer(model: Path, stack: ExitStack) -> Path:
    """Return the folder of a random model with the quickstart's tokenizer."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to((model / name).resolve())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((_TOKENIZER / name).read_bytes())
    return folder


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
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--logprobs", type=int, nargs="+", default=[0, 20])
    parser.add_argument(
        "--drafts", type=int, default=0, help="draft tokens per pass, against none; answers repeat a text"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each server with --drafts, after one that warms up")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    given = parser.parse_args()
    if given.tiny:
        given.prompts, given.samples, given.tokens = 2, 4, 16
        given.logprobs = [0]  # with more the engine core of vLLM 0.31's CPU build ends without a word
        given.model = _TOKENIZER  # vLLM's CPU build has no heads as small as those of the random model
    section = InferenceEngineConfig(
        model_dtype="bfloat16", max_num_seqs=64 if given.tiny else 1024, max_num_batched_tokens=8192
    )
    with ExitStack() as stack:
        if given.drafts:
            print(json.dumps(with_drafts(given, stack)))
            return
        began = time.monotonic()
        server = serve(with_tokenizer(given.model, stack), section, 256 if given.tiny else 1024, "engine", stack)
        started = round(time.monotonic() - began, 1)
        try:
            print(json.dumps({"start": started, "rows": asyncio.run(measure(server, given))}))
        except EngineError as error:
            raise server.failure("failed") from error


if __name__ == "__main__":
    main()
